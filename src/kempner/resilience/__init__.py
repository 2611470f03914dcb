"""Surviving: requests to stop, hangs, slow ranks, steps that are not finite, spikes, two jobs in
one directory."""
