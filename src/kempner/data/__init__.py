"""Token shards: how they are made (prepare), read (dataset) and ordered (permute, loader)."""
