"""Resilience: requests to stop, hangs, slow ranks, non-finite steps, spikes, two jobs in one
directory."""
