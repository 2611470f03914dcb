"""Surviving: requests to stop, hangs, slow ranks, non-finite steps, two jobs in one directory."""
