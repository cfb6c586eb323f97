# What a checkout can do; `make help` lists it. All of it happens in .venv.

# The Python that .venv is made with.
PYTHON ?= python3
# How long `make fuzz` gives inputs, all targets together, and what `make gpu` and `make causes` may
# take.
MINUTES ?= $(if $(filter gpu causes,$(MAKECMDGOALS)),30,10)
# How often `make causes` records each program.
RUNS ?= 3

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install
# The package itself needs nothing from outside: its build backend is in the locks.
PACKAGE := --no-build-isolation --no-deps --editable .
# The C libraries, which are compiled when the package is installed.
NATIVE := $(wildcard gputrace/collectors/native/*.[ch] gputrace/collectors/native/*/*.[ch] gputrace/store/native/*.c \
	gputrace/model/native/*.c gputrace/readers/native/*.c gputrace/analyzers/whatif/native/*.c)
CODE := $(wildcard gputrace _gputrace_start.py tests benchmarks docs setup.py)
LOCK := $(BIN)/uv -q pip compile pyproject.toml --universal --python-version 3.11 \
	--fork-strategy fewest --generate-hashes --no-header --no-emit-index-url

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
CHECKS := types style imports spelling
.PHONY: help demo test compiled lint $(CHECKS) audit format docs bench gpu causes faults fuzz sanitize workloads lock dist wheels matrix clean

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## /make \1	/p' Makefile | expand -t 16

demo: $(VENV)/.runtime ## Analyze the trace that comes with gputrace, and one made here
	@$(BIN)/gputrace demo

# Three at a time, whatever the cores: for a third of their time, tests wait for others.
# Hundreds of tests record real processes, which a busy machine can delay: a test that fails
# has one more try, and those that needed it are listed. Compiled tests are kept, or each worker
# would compile all of them each time.
test: $(VENV)/.dev ## Run the tests
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -q -n 4 --dist worksteal --reruns 1 -raR

# Once, where each process that a test starts would compile the package for itself, and each of the
# three workers all tests.
compiled: $(VENV)/.dev
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m compileall -q gputrace benchmarks workloads
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -q --collect-only >/dev/null

lint: $(CHECKS) ## Check style, types, imports and spelling

# Targets of their own, so that `make -j2 lint` checks the rest while types are, which take longest.
types: $(VENV)/.dev
	$(BIN)/mypy $(CODE) .ci/audit.py

style: $(VENV)/.dev
	$(BIN)/ruff check $(CODE) examples workloads .ci
	$(BIN)/ruff format --check $(CODE) examples workloads .ci

imports: $(VENV)/.dev
	$(BIN)/lint-imports --no-logo --no-cache

spelling: $(VENV)/.dev
	$(BIN)/codespell

audit: $(VENV)/.dev ## Ask whether a weakness is known of what the locks name
	@$(BIN)/python .ci/audit.py

format: $(VENV)/.dev ## Lay the code out and repair what ruff can
	$(BIN)/ruff check --fix $(CODE) examples workloads .ci
	$(BIN)/ruff format $(CODE) examples workloads .ci

docs: $(VENV)/.dev ## Build the documentation as a site, in build/site
	$(BIN)/python -m sphinx -q -W --keep-going -d build/doctrees docs build/site
	@echo 'Open build/site/index.html'

bench: $(VENV)/.dev ## Run the benchmarks
	$(BIN)/python -m benchmarks

gpu: $(VENV)/.dev ## Measure what only a GPU can tell, in MINUTES=30, into build/gpu.json
	@mkdir -p build
	$(BIN)/python -m benchmarks gpu --minutes $(MINUTES) --save build/gpu.json

causes: $(VENV)/.dev ## Judge first lines on planted faults, RUNS=3 times, in MINUTES=30, or without a GPU by CPU=1
	@mkdir -p build
	$(BIN)/python -m benchmarks causes --minutes $(MINUTES) --runs $(RUNS) --save build/causes.json $(if $(CPU),--cpu)

faults: $(VENV)/.dev ## Inject over a thousand faults into recordings
	$(BIN)/python -m tests.faults --docs docs/faults.md

fuzz: $(VENV)/.dev ## Give broken inputs to all that reads any, for MINUTES=10
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)
	$(BIN)/python -m tests.fuzz.native --without-tests

sanitize: $(VENV)/.dev ## Test the C libraries with AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/python -m tests.fuzz.native

workloads: $(VENV)/.runtime ## Record every framework that can be had on the CPU, and check that
	$(BIN)/gputrace bench workloads/studies/parallel.toml --install --skip-missing --force --backend host
	$(BIN)/gputrace bench workloads/studies/trainers.toml --install --skip-missing --force --backend host
	$(BIN)/gputrace bench workloads/studies/cpu.toml --install --skip-missing --force --backend host

lock: $(VENV)/.made ## Write the locks anew; UPGRADE=--upgrade takes the newest releases
	$(PIP) uv
	$(LOCK) $(UPGRADE) --group build --output-file locks/runtime.lock
	$(LOCK) $(UPGRADE) --group dev --constraint locks/runtime.lock --output-file locks/dev.lock

dist: $(VENV)/.dev ## Build the source archive, and a wheel for this machine, into dist/
	@rm -rf dist build
	$(BIN)/python -m build --no-isolation

wheels: $(VENV)/.dev ## Build manylinux wheels for x86-64 and aarch64 into dist/, with zig's compiler
	@$(PIP) auditwheel ziglang
	@rm -rf dist build
	$(BIN)/python -m build --no-isolation --sdist
	@for machine in x86_64 aarch64; do .ci/wheel $(BIN) $$machine || exit; done

matrix: $(VENV)/.made ## Test with the oldest and newest Pythons and dependencies; takes long
	@$(PIP) uv
	.ci/matrix $(BIN)/uv

clean: ## Remove all that make made
	rm -rf $(VENV) build dist cpu.bench *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.made:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo 'gputrace needs Python 3.11 or newer, "$(PYTHON)" is not: try make PYTHON=python3.12' >&2; \
		exit 1; }
	@echo 'Installing into $(VENV)'
	@"$(PYTHON)" -m venv --clear $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.made locks/runtime.lock pyproject.toml setup.py $(NATIVE)
	@$(PIP) --require-hashes -r locks/runtime.lock
	@$(PIP) $(PACKAGE)
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime locks/dev.lock
	@$(PIP) --require-hashes -r locks/dev.lock
	@touch $@
