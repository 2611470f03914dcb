"""The library behind scripts/train.py: see ARCHITECTURE.md for the rooms and who may import
whom."""
