"""Plans applied to the plain model from outside: recompute, compile, shard, materialise. Their
order is fixed: build.py."""
