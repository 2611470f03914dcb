"""Changes to the plain model from outside, in one fixed order: build.py."""
