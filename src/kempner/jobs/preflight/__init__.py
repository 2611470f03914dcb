"""Checks the nodes of a job before they train: preflight.sh. Nobody imports it."""
