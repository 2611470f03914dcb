"""Data sets on disk as numbered samples, one module per format. For data/opening.py."""
