"""The reports of a node's GPUs, before a run and while it trains."""
