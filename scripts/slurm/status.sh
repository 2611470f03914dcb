#!/usr/bin/env bash
# Show all your runs on one screen, and which of them need attention: scripts/status.py.
#
#   bash scripts/slurm/status.sh              every run in runs/
#   bash scripts/slurm/status.sh RUN...       only these
#   bash scripts/slurm/status.sh --nodes      the hosts, and what failed on them
#   bash scripts/slurm/status.sh --json       the same as one JSON document
#   bash scripts/slurm/status.sh --notify     sends news by KEMPNER_NOTIFY, KEMPNER_WEBHOOK or
#                                             KEMPNER_MAIL
#
# Exit code 0: all is well; 1: a run needs attention; 2: a run does not exist or cannot be read.
# docs/start/monitoring.md
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "${0%"${0##*/}"}lib/all.sh"

kp_setup
kp_apart "$KP_PYTHON" "$KP_ROOT/scripts/status.py" "$@"
