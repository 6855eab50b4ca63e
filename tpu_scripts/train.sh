#!/usr/bin/env bash
# Trains on the TPU devices of this host: one process, all local chips.
#
#     bash tpu_scripts/train.sh configs/smollm2.py [--flags ...]
#
# The same command on each host of a slice is how runs start (one process per host); at present a run uses one host only,
# so give it a single-host slice. A run directory that exists is resumed, so a pre-empted VM repeats the command.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ $# -ge 1 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2; }
[ -x .venv/bin/mas-jax ] || { echo "no .venv here: run tpu_scripts/setup_tpu_vm.sh first" >&2; exit 1; }

export JAX_PLATFORMS=${JAX_PLATFORMS:-tpu}
exec .venv/bin/mas-jax train "$@"
