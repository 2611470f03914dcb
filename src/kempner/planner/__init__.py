"""Requirements of a configuration before it runs: memory, traffic, and combinations that fit."""
