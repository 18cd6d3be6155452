# make demo   train, prune, retrain, export and measure a small network (recipes/quickstart.yaml)
# make test   ruff, mypy and the tests
# Both make .venv first; nothing else is needed than Python 3.11 or later and make.

PYTHON ?= $(shell command -v python3.11 || echo python3)
PYTEST_ARGS ?=
BIN := .venv/bin

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

# Passive: threads that wait for work sleep. On a busy machine that halves the time; on an idle one it costs little.
demo: .venv/installed-demo
	OMP_WAIT_POLICY=passive $(BIN)/asp run recipes/quickstart.yaml

# One thread per worker: on small networks two processes with one thread each beat one with two.
test: lint
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy

.venv/installed-%: pyproject.toml setup.py $(wildcard kernels/csrc/cpu/*) | .venv/bin/python
	@echo "installing into .venv (torch is large: the first time takes minutes)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv

clean:
	rm -rf .venv build dist *.egg-info
