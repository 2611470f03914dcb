"""Preparation of token shards from documents, and copies of them on a host's own disk."""
