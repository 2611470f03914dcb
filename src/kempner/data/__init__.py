"""Numbered samples, their mixture and order, and the batches of a rank."""
