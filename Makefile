# What a checkout can do; `make help` lists it. All of it happens in .venv.

# The Python that .venv is made with.
PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install
# The package itself needs nothing from outside: its build backend is in the locks.
PACKAGE := --no-build-isolation --no-deps --editable .
# The collector, which is compiled when the package is installed.
NATIVE := $(wildcard gputrace/collectors/native/*.[ch])
CODE := $(wildcard gputrace tests benchmarks setup.py)
LOCK := $(BIN)/uv -q pip compile pyproject.toml --universal --python-version 3.11 \
	--fork-strategy fewest --generate-hashes --no-header --no-emit-index-url

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint format bench lock clean

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## /make \1	/p' Makefile | expand -t 16

demo: $(VENV)/.runtime ## Analyze the trace that comes with gputrace, and one made here
	@$(BIN)/gputrace demo

test: $(VENV)/.dev ## Run the tests
	$(BIN)/python -m pytest -q -n 2

lint: $(VENV)/.dev ## Check style, types, imports and spelling
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/codespell

format: $(VENV)/.dev ## Lay the code out and repair what ruff can
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

bench: $(VENV)/.dev ## Run the benchmarks
	$(BIN)/python -m benchmarks

lock: $(VENV)/.made ## Write the locks anew; UPGRADE=--upgrade takes the newest releases
	$(PIP) uv
	$(LOCK) $(UPGRADE) --group build --output-file requirements.lock
	$(LOCK) $(UPGRADE) --group dev --constraint requirements.lock --output-file requirements-dev.lock

clean: ## Remove all that make made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.made:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo 'gputrace needs Python 3.11 or newer, "$(PYTHON)" is not: try make PYTHON=python3.12' >&2; \
		exit 1; }
	@echo 'Installing into $(VENV)'
	@"$(PYTHON)" -m venv --clear $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.made requirements.lock pyproject.toml setup.py $(NATIVE)
	@$(PIP) --require-hashes -r requirements.lock
	@$(PIP) $(PACKAGE)
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements-dev.lock
	@$(PIP) --require-hashes -r requirements-dev.lock
	@touch $@
