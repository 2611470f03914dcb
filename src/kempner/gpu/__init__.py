"""What the GPUs of a node report of themselves, before a run and while it trains. No torch."""
