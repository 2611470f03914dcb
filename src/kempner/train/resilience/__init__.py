"""Requests to stop, the watchdog, slow ranks, steps that are not finite, spikes, the way back."""
