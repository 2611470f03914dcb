"""Reports of a node's own GPUs, before a run and while it trains. No torch."""
