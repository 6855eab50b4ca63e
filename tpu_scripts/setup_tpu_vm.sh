#!/usr/bin/env bash
# Sets up mas_jax on a TPU VM: a virtual environment .venv with the tpu extra, and a look at the devices.
#
# On one TPU VM, in the checkout:
#     bash tpu_scripts/setup_tpu_vm.sh
# On every host of a slice, from anywhere, with the checkout in the same place on each:
#     gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all --command="cd mas_jax && bash tpu_scripts/setup_tpu_vm.sh"
#
# PYTHON=python3.12   the interpreter (3.11 or newer; 3.12 gets the newest jax)
# EXTRAS=tpu,tasks    what to install beside the package
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
EXTRAS=${EXTRAS:-tpu,tasks}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "mas_jax needs Python 3.11 or newer, and $PYTHON is not: set PYTHON=python3.12" >&2
  exit 1
}
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[$EXTRAS]"

# On a slice, every host has to run this at the same time (--worker=all): libtpu waits for all of them.
.venv/bin/python -c 'import jax; print(jax.__version__, jax.devices())'
