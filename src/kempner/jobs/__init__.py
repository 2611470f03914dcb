"""The kit: any program under Slurm. Imports no torch at the start, and nothing of the trainer."""
