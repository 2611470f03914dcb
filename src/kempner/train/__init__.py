"""A training run: sections, checks, parts, the pieces of a step. Imports no extension by name."""
