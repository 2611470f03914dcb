#!/usr/bin/env bash
# All my runs in one screen, and which of them need attention: scripts/status.py.
#
#   bash scripts/slurm/status.sh              every run in runs/
#   bash scripts/slurm/status.sh RUN...       these
#   bash scripts/slurm/status.sh --nodes      the hosts, and what failed on them
#   bash scripts/slurm/status.sh --json       the same as one JSON document
#   bash scripts/slurm/status.sh --notify     sends what is new by KEMPNER_NOTIFY, KEMPNER_WEBHOOK
#                                             or
#                                             KEMPNER_MAIL
#
# Exit code 0: all is well; 1: somebody has to look at a run; 2: a run is not there or cannot be
# read. docs/start/monitoring.md
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "${0%"${0##*/}"}lib/all.sh"

kp_setup
kp_apart "$KP_PYTHON" "$KP_ROOT/scripts/status.py" "$@"
