#!/usr/bin/env bash
# What most published scripts do, as a baseline for benchmarks/soak.py: srun in the foreground, no
# trap, no requeue by the script. The trainer is the same, and resumes from its newest checkpoint.
#SBATCH --job-name=naive
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=B:SIGTERM@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

srun "${KEMPNER_PYTHON:-python3}" "${KEMPNER_TRAIN:-scripts/train.py}" "$@"
