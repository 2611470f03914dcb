"""One supervisor a rank for a program that is not train.py: scripts/slurm/run.sh starts it."""
