"""What is done to the plain model from outside: recompute, compile, shard, materialise. One fixed
order: build.py."""
