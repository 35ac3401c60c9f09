# Every target sets up what it needs in .venv, once. PYTHON chooses the interpreter; TORCH whether torch is installed: none,
# cpu or cuda, its build (default: what is installed, else cuda on a machine with an NVIDIA GPU, none elsewhere; tests need
# a build); TORCH_INDEX an index to take it from.
PYTHON ?= python3
VENV   := .venv
MINUTES ?= 5
SOAK_MINUTES ?= 20
MODEL  ?= smollm2-135m
PORT   ?= 8000
BIN    := $(VENV)/bin
unexport PYTHONDONTWRITEBYTECODE  # hundreds of test processes import the same sources
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

GPU    := $(strip $(shell nvidia-smi -L 2>/dev/null | grep '^GPU') $(wildcard /proc/driver/nvidia/gpus/*))
TORCH  := $(or $(TORCH),$(patsubst $(VENV)/.torch-%,%,$(firstword $(wildcard $(VENV)/.torch-*))),$(if $(GPU),cuda,none))
$(if $(filter none cpu cuda,$(TORCH)),,$(error TORCH is "$(TORCH)"; it must be none, cpu or cuda))
TESTED := $(if $(filter none,$(TORCH)),$(if $(GPU),cuda,cpu),$(TORCH))  # the build that the tests run with

.DEFAULT_GOAL := help
.PHONY: help serve tour test test-fast test-cluster test-arm test-light flaky mutants soak walks clients screenshots docs docs-site figures growth wheel check format requirements clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

# For this machine alone and beside pip, which would compile all variants first: tests need those.
CPU     := src/tokenmill/backends/cpu
LIBRARY := $(CPU)/libtokenmill.so
KERNELS := $(wildcard $(CPU)/*.c $(CPU)/*.h) $(CPU)/build.py

$(LIBRARY): $(KERNELS)
	-@$(PYTHON) $(CPU)/build.py --native >/dev/null

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) on the PATH; set PYTHON=..." >&2; exit 3; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tokenmill needs Python 3.11 or newer" >&2; exit 3; }
	@$(PYTHON) -m venv --without-pip $(VENV)

$(BIN)/pip: | $(BIN)/python
	@$(BIN)/python -m ensurepip --default-pip >/dev/null

# One stamp for each build, so that another TORCH replaces what is there.
$(VENV)/.torch-%: constraints.txt tools/install_torch.py | $(BIN)/pip
	@echo "setting up $(VENV): torch"
	@rm -f $(VENV)/.torch-*
	@$(BIN)/python tools/install_torch.py $*
	@touch $@

$(VENV)/.torch-none: | $(BIN)/python
	@if ls $(VENV)/.torch-* >/dev/null 2>&1; then $(BIN)/python -m pip uninstall --quiet --yes torch; rm -f $(VENV)/.torch-*; fi
	@touch $@

$(VENV)/.packages: pyproject.toml constraints.txt hatch_build.py | $(BIN)/pip
	@TOKENMILL_PURE=1 $(PIP) --no-compile -e '.[server]'
	@touch $@

$(VENV)/.base: pyproject.toml constraints.txt hatch_build.py $(KERNELS) | $(VENV)/.torch-$(TORCH)
	@echo "setting up $(VENV): what engine and server need, less than a minute"
	@$(MAKE) --no-print-directory --jobs=2 $(LIBRARY) $(VENV)/.packages
	@test ! -e $(LIBRARY) || touch $@

$(VENV)/.dev: $(VENV)/.base | $(VENV)/.torch-$(strip $(TESTED))
	@echo "setting up $(VENV): test and quality tools, a browser, nginx, PostgreSQL, llama.cpp (built if there is no wheel: some minutes)"
	@$(PIP) -e '.[dev,llamacpp]'
	@sh tools/test_packages.sh
	@touch $@

serve: $(VENV)/.base  ## serve MODEL (the default one) on PORT (8000): a web page, and OpenAI's API; TORCH=none|cpu|cuda
	@exec $(BIN)/tokenmill serve $(MODEL) --port $(PORT) $(ARGS)

tour: $(VENV)/.base  ## see the contract and the engine at work on the fake backend, tick by tick
	@$(BIN)/python examples/contract_tour.py
	@$(BIN)/python examples/engine_tour.py

TWO_CORES := -n 2 --dist loadfile --no-loadscope-reorder  # tests/conftest.py orders them

test: $(VENV)/.dev  ## run all tests, on two cores
	@$(BIN)/python -m pytest $(TWO_CORES) --ignore tests/cluster $(ARGS)

test-cluster: $(VENV)/.dev  ## run the tests of several servers on PostgreSQL and on Ray Serve, which are killed: about 12 minutes
	@$(BIN)/python -m pytest tests/cluster $(ARGS)

FAST := contract kv engine session sampling text test_imports.py test_public_names.py test_requirements.py

test-fast: $(VENV)/.dev  ## run the fast tests of contract, engine, sessions, sampling and text: before each commit
	@$(BIN)/python -m pytest $(TWO_CORES) -m "not slow" $(addprefix tests/,$(FAST)) $(ARGS)

# A choice of what needs no torch, since all of it would take as long as the whole suite: ARGS takes other tests. llama.cpp is
# not part of a light install, so that its tests are skipped here even where CI requires them elsewhere.
LIGHT := .venv-light
LIGHT_TESTS := conformance/test_checks.py conformance/test_state_machine.py engine/test_properties.py session/test_properties.py \
    session/test_store.py session/test_kill.py native/test_reference_ids.py server/test_openai.py server/test_session_verbs.py web/test_chat.py

$(LIGHT)/.ready: pyproject.toml constraints.txt hatch_build.py $(KERNELS)
	@echo "setting up $(LIGHT): the light install, and what its tests need"
	@$(PYTHON) -m venv $(LIGHT)
	@$(LIGHT)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@! $(LIGHT)/bin/python -c 'import torch' 2>/dev/null
	@touch $@

test-light: $(LIGHT)/.ready  ## run the tests that need no torch in an environment without it (.venv-light), on two cores
	@TOKENMILL_REQUIRE_LLAMACPP= $(LIGHT)/bin/python -m pytest $(TWO_CORES) $(or $(ARGS),$(addprefix tests/,$(LIGHT_TESTS)))

test-arm: $(VENV)/.dev  ## run the tests of the CPU kernels on ARM, under qemu
	@PYTHON=$(BIN)/python sh tools/test_arm.sh $(ARGS)

flaky: $(VENV)/.dev  ## run all tests beside three busy loops and list those that fail
	@$(BIN)/python -m tests.flaky --busy 3 --allowed 0 make test

mutants: $(VENV)/.dev  ## mutate contract, kv, engine, session, sampling and text at random; list what no test notices
	@$(BIN)/python -m tests.mutants $(ARGS)

soak: $(VENV)/.dev  ## a real server under mixed traffic and faults, for SOAK_MINUTES (20); writes docs/soak.md
	@$(BIN)/python -m tests.soak --minutes $(SOAK_MINUTES) $(ARGS)

walks: $(VENV)/.dev  ## random walks, workloads and sessions with new seeds, for MINUTES (5)
	@$(BIN)/python -m tests.walks --minutes $(MINUTES)

clients: $(VENV)/.dev  ## real clients, each in its own environment
	@$(BIN)/python -m tests.clients $(ARGS)

screenshots: $(VENV)/.dev  ## pictures of the web page, for the README
	@$(BIN)/python -m tests.web.screenshots

docs: $(VENV)/.dev  ## write the generated parts of docs/
	@$(BIN)/python -m tests.generated_docs

docs-site: $(VENV)/.dev  ## build the documentation site into .site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

figures: $(VENV)/.dev  ## measure the figures of the README and of docs/benchmarks.md again: 20 minutes on two quiet cores
	@$(BIN)/tokenmill bench report --quick --json docs/reports/cpu.json --html docs/reports/cpu.html
	@$(BIN)/tokenmill bench report --quick --shape 1b --sections kernels --rounds 3 --json docs/reports/cpu-1b.json --html docs/reports/cpu-1b.html
	@$(BIN)/python -m tests.generated_docs

growth: $(VENV)/.dev  ## measure the growth curves of docs/benchmarks.md again, to their full sizes: 20 minutes of processor time
	@$(BIN)/python -m benchmarks.scaling --full --json docs/reports/scaling.json --plots docs/images || true
	@$(BIN)/python -m tests.generated_docs

wheel:  ## build the sdist and the wheel into dist/, twice, and install the wheel with PYTHON into an empty environment
	@$(PYTHON) tools/build_wheel.py --test $(PYTHON)

check: docs-site  ## lint, format, types, layers, documentation
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev  ## format the code and mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

requirements: $(VENV)/.dev  ## print requirement -> tests; fails if a delivered one has no test
	@$(BIN)/python -m tests.requirements

clean:  ## remove .venv, .venv-light, .clients, .mutants and caches
	rm -rf $(VENV) $(LIGHT) .clients .mutants .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
