"""Makes token shards from documents, and copies them to a host's own disk."""
