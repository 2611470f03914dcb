"""One node of a Ray cluster in a Slurm job: ray.sh. Nobody imports it."""
