"""Sweeps: many runs from one file, which scripts/sweep.py plans, submits and compares."""
