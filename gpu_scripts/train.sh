#!/usr/bin/env bash
# Trains on the NVIDIA GPUs of this host: one process, all local GPUs. Sets up .venv with the cuda extra on first use.
#
#     bash gpu_scripts/train.sh configs/smollm2.py [--flags ...]
#
# A run directory that exists is resumed.
# PYTHON=python3.12                     the interpreter of a new .venv (3.11 or newer)
# XLA_PYTHON_CLIENT_MEM_FRACTION=.9     the share of GPU memory taken at start
# DETERMINISTIC=1                       deterministic kernels: a resumed run equals an uninterrupted one, some speed less
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ $# -ge 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
if [ ! -e .venv/.installed-cuda ] || [ pyproject.toml -nt .venv/.installed-cuda ]; then
  [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[cuda,tasks]'
  touch .venv/.installed-cuda
fi

export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda}
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-.9}
[ "${DETERMINISTIC:-0}" = 0 ] || export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_deterministic_ops=true"
exec .venv/bin/mas-jax train "$@"
