"""A Ray cluster in a Slurm job: what runs on each node. scripts/slurm/ray.sh starts it."""
