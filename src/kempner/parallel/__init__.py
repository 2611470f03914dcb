"""Parallelism applied to the plain model from outside, in a fixed order (build.py)."""
