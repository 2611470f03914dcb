"""Token shards: prepared (prepare), read (dataset) and ordered (permute, loader)."""
