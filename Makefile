# Every target sets up what it needs in .venv, once. PYTHON chooses the interpreter; TORCH the build of torch, cpu or cuda
# (default: the one that is installed, else cuda on a machine with an NVIDIA GPU); TORCH_INDEX an index to take it from.
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
TORCH  := $(or $(TORCH),$(patsubst $(VENV)/.torch-%,%,$(firstword $(wildcard $(VENV)/.torch-*))),$(if $(GPU),cuda,cpu))
$(if $(filter cpu cuda,$(TORCH)),,$(error TORCH is "$(TORCH)"; it must be cpu or cuda))

.DEFAULT_GOAL := help
.PHONY: help serve tour test test-fast flaky mutants soak walks clients screenshots docs check format requirements clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

KERNELS := $(wildcard src/tokenmill/backends/torch/native/*.c src/tokenmill/backends/torch/native/*.h)

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) on the PATH; set PYTHON=..." >&2; exit 3; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tokenmill needs Python 3.11 or newer" >&2; exit 3; }
	@$(PYTHON) -m venv $(VENV)

# One stamp for each build, so that another TORCH replaces what is there.
$(VENV)/.torch-$(TORCH): constraints.txt tools/install_torch.py | $(BIN)/python
	@echo "setting up $(VENV): torch"
	@rm -f $(VENV)/.torch-*
	@$(BIN)/python tools/install_torch.py $(TORCH)
	@touch $@

$(VENV)/.base: pyproject.toml constraints.txt hatch_build.py $(KERNELS) | $(VENV)/.torch-$(TORCH)
	@echo "setting up $(VENV): what engine and server need, about a minute"
	@$(PIP) -e '.[server]'
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo "setting up $(VENV): test and quality tools, a browser, nginx, llama.cpp (built if there is no wheel: some minutes)"
	@$(PIP) -e '.[dev,llamacpp]'
	@sh tools/test_packages.sh
	@touch $@

serve: $(VENV)/.base  ## serve MODEL (the default one) on PORT (8000): a web page, and OpenAI's API; TORCH=cpu|cuda
	@exec $(BIN)/tokenmill serve $(MODEL) --port $(PORT) $(ARGS)

tour: $(VENV)/.base  ## see the contract and the engine at work on the fake backend, tick by tick
	@$(BIN)/python examples/contract_tour.py
	@$(BIN)/python examples/engine_tour.py

TWO_CORES := -n 2 --dist loadfile --no-loadscope-reorder  # tests/conftest.py orders them

test: $(VENV)/.dev  ## run all tests, on two cores
	@$(BIN)/python -m pytest $(TWO_CORES) $(ARGS)

FAST := contract kv engine session sampling text test_imports.py test_public_names.py test_requirements.py

test-fast: $(VENV)/.dev  ## run the fast tests of contract, engine, sessions, sampling and text: before each commit
	@$(BIN)/python -m pytest $(TWO_CORES) -m "not slow" $(addprefix tests/,$(FAST)) $(ARGS)

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

check: $(VENV)/.dev  ## lint, format, types, layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev  ## format the code and mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

requirements: $(VENV)/.dev  ## print requirement -> tests; fails if a delivered one has no test
	@$(BIN)/python -m tests.requirements

clean:  ## remove .venv, .clients, .mutants and caches
	rm -rf $(VENV) .clients .mutants .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
