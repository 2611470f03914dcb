"""Memory, traffic and time of a configuration before it runs, and combinations that fit."""
