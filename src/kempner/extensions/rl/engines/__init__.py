"""Engines that sample, and the router over them. No torch."""
