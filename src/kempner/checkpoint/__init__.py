"""Saving, committing, choosing and loading the state of a run; for the trainer and
readers of runs."""
