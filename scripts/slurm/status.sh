#!/usr/bin/env bash
# All my runs in one screen, and which of them need attention: scripts/status.py.
#
#   bash scripts/slurm/status.sh              every run in runs/
#   bash scripts/slurm/status.sh RUN...       these
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=lib/all.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/all.sh"

kp_setup
exec "$KP_PYTHON" "$KP_ROOT/scripts/status.py" "$@"
