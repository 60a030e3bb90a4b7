# One screen of commands. PYTHON picks the interpreter that makes .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PYTHONPATH := $(CURDIR)

.PHONY: help install demo test test-ui check fmt chaos bench clean

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
	rm -rf $(VENV) .rollbook
