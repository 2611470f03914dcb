"""Saves, commits, chooses and loads the state of a run. For the trainer and whoever reads a run."""
