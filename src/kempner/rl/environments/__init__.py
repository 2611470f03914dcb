"""Environments: prompts and rewards. protocol.py defines an environment, opening.py makes them from
the configuration, scorer.py computes their rewards in limited processes."""
