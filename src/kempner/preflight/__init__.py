"""Checks of a job's nodes before they train: scripts/slurm/preflight.sh."""
