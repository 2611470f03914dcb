"""Proves the nodes of a job before they train: scripts/slurm/preflight.sh."""
