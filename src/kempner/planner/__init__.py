"""What a configuration needs before it runs: memory, traffic, and combinations that fit."""
