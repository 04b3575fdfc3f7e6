# `make demo` and `make test` do all the set-up; both may be called again and again.
# Everything they install goes to .venv. PYTHON=... picks the interpreter that .venv is made from.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-rest test-fast test-native test-ranks test-parity test-clients build docs lint typecheck format bench clean test-faults build-cuda test-cuda sanitize-cuda bench-cuda analyze test-asan test-debug-python test-versions simulated-gpu test-simulated-gpu test-cuda-build wheel test-wheel test-aarch64

VENV := .venv
BIN := $(VENV)/bin
CANDIDATES := python3 python3.14 python3.13 python3.12 python3.11 python3.10
C_FILES = $(shell find csrc tests -name "*.[ch]" -o -name "*.cpp" -o -name "*.cu")
PY_FILES := fsdp_c tests benchmarks examples docs setup.py
PYTEST := $(BIN)/python -m pytest
# How many tests run beside each other; for how many seconds each fuzzer draws at random, and from where: SEED=7, by default elsewhere
# each time.
WORKERS ?= 2
AT_RANDOM ?= 60
SEED ?=

RANKS ?= 2
DEMO_OUT ?= runs/demo
DEMO_FLAGS ?=
VERSIONS ?= 2.10.0 2.15.0@3.12
PYTHONS ?=
VERSIONS_FLAGS ?= --discard
ENVIRONMENTS ?= build/versions
ASAN := build/asan
ASAN_TESTS ?= tests/unit tests/native tests/distributed tests/faults/test_every_point.py tests/faults/test_allocations.py \
    tests/faults/test_threads.py --ignore tests/native/test_cuda.py \
    --deselect tests/unit/test_checkpoint_export.py::test_memory_is_that_of_the_largest_tensor_whatever_the_total
DEBUG_PYTHON ?= python3.11-dbg
MINOR := 'import sys; print(sys.version_info[:2])'
RAISING := tests/unit/test_types.py tests/unit/test_threads.py tests/unit/test_callbacks.py tests/unit/test_arguments.py \
    tests/unit/test_errors.py
RAISING_ON_RANKS := tests/distributed/test_recover.py tests/faults/test_threads.py
DEBUG_TESTS ?= $(RAISING) $(RAISING_ON_RANKS)

help:
	@echo 'make demo          train the example language model on $(RANKS) ranks (DEMO_FLAGS="--strategy shard_grad_op ...")'
	@echo 'make test          the tests: all that take no ranks, and a part of the others that meets every file'
	@echo 'make test-all      all tests, with the libraries that people use and the wheel'
	@echo 'make test-fast     unit tests and the architecture test; no ranks'
	@echo 'make test-native   the C programs under tests/native'
	@echo 'make test-ranks    tests on several ranks'
	@echo 'make test-parity   bitwise comparison with torch'\''s FSDP1'
	@echo 'make test-faults   every fault that tests/faults knows, at every point, and a million random layouts'
	@echo 'make test-clients  train with the libraries that people use, which it installs'
	@echo 'make test-simulated-gpu  tests on a simulated GPU: those of test-cuda, and those on ranks and of parity with device "cuda"'
	@echo 'make test-cuda-build  tests on a CUDA build of torch without a GPU, in an environment of its own: 5 GB (CUDA_BUILD_TORCH=2.13.0)'
	@echo 'make test-cuda     tests on a GPU (needs one, nvcc, and a torch with CUDA, perhaps that of CUDA_PYTHON=python3)'
	@echo 'make sanitize-cuda the CUDA kernels under compute-sanitizer (needs the same)'
	@echo 'make test-versions the suite on other torch and Python (VERSIONS="$(VERSIONS)" PYTHONS="3.10 3.13"): 5 to 7 GB each'
	@echo 'make test-asan     unit, native and rank tests under AddressSanitizer and UBSan, in $(ASAN) (ASAN_TESTS="tests/unit ...")'
	@echo 'make test-debug-python  programs that raise, under CPython'\''s debug build ($(DEBUG_PYTHON), for a .venv of the same version)'
	@echo 'make test-aarch64  a module and its tests for aarch64, cross-compiled and emulated, in build/aarch64; see tests/aarch64/run'
	@echo 'make wheel         sdist and wheel with CUDA kernels, tried without a compiler, in dist (make test-wheel: by a part of the tests)'
	@echo 'make build         compile the extension in place'
	@echo 'make analyze       gcc -fanalyzer over the C sources'
	@echo 'make docs          the pages of docs/ and the API reference as a site, in build/site'
	@echo 'make lint format   check, or write, the formatting of C and Python; lint checks types too'
	@echo 'make typecheck     compare what the extension has with _C.pyi, which says what it has'
	@echo 'make bench         host overhead beside FSDP1 and FSDP2'
	@echo 'make bench-cuda    kernels and steps on a GPU, into runs/cuda'
	@echo 'make clean         remove what was built; .venv and runs/ stay'

# The environment: one stamp per step, newer than what the step was made from.
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

$(VENV)/.base: $(VENV)/.made requirements/base.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements/base.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.base requirements/dev.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements/dev.txt
	@touch $@

$(VENV)/.clients: $(VENV)/.dev requirements/clients.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements/clients.txt
	@touch $@

$(VENV)/.release: $(VENV)/.dev requirements/release.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements/release.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.base setup.py pyproject.toml
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-build-isolation --no-deps -e .
	@touch $@

# Always asked, as setup.py knows what is stale, headers and flags included.
build: $(VENV)/.installed
	$(BIN)/python setup.py -q build_ext --inplace

demo: build
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --nproc-per-node $(RANKS) examples/train_lm.py \
	    --out "$(DEMO_OUT)" $(if $(findstring --resume,$(DEMO_FLAGS)),,--overwrite) $(DEMO_FLAGS)

# `make test` meets every file: all of SHORT, and of each file of LONG, and of those on the simulated GPU, one test in PART, always the same
# ones. `make test-all` runs the others too, the libraries, the wheel, and a minute each of what is drawn at random.
SHORT := tests/test_architecture.py tests/unit tests/native tests/parity/test_differences.py --ignore tests/native/test_cuda.py
LONG := tests/distributed tests/parity tests/faults tests/native/test_cuda.py --ignore tests/parity/test_differences.py
ON_GPU := tests/cuda tests/simulated_gpu tests/races
PART := 48
# These start scripts, for many seconds each: `make test` runs them on the CPU alone.
SCRIPTS := $(patsubst %,tests/distributed/test_%.py,checkpoint_kills migrating scripts process_exit resume_elsewhere train_lm weight_sync \
    without_fsdp1)
test: build $(VENV)/.dev
	$(PYTEST) -n $(WORKERS) $(SHORT)
	$(PYTEST) -n $(WORKERS) --part $(PART) $(LONG)
	$(ON_SIMULATED_GPU) -m pytest -n $(WORKERS) --part $(PART) $(ON_GPU)
	$(ON_SIMULATED_GPU) -m pytest -n $(WORKERS) --device cuda --part 1000 $(ON_ANY_DEVICE) $(addprefix --ignore ,$(SCRIPTS))

test-all: test test-rest test-clients test-wheel

test-rest: build $(VENV)/.dev
	$(PYTEST) -n $(WORKERS) --rest $(PART) $(LONG)
	$(ON_SIMULATED_GPU) -m pytest -n $(WORKERS) --rest $(PART) $(ON_GPU)
	$(ON_SIMULATED_GPU) -m pytest -n $(WORKERS) --device cuda --part $(SIMULATED_PART) $(ON_ANY_DEVICE)
	FSDP_C_KERNELS=torch $(ON_SIMULATED_GPU) -m pytest -n $(WORKERS) --device cuda --part $(OPERATORS_PART) tests/distributed tests/parity
	FSDP_C_KERNELS=torch $(ON_SIMULATED_GPU) -m pytest -n $(WORKERS) tests/races/test_waits.py -k test_programs_are_in_order
	FSDP_C_TEST_WIDTH=$(WIDE) $(ON_SIMULATED_GPU) -m pytest -n $(WORKERS) tests/races/test_waits.py tests/races/test_memory.py \
	    -k "test_programs_are_in_order or test_memory"
	$(BIN)/python -m tests.fuzz.checkpoint --seconds $(AT_RANDOM) $(addprefix --seed ,$(SEED))
	$(BIN)/python -m tests.parity.plain_programs --seconds $(AT_RANDOM) $(addprefix --seed ,$(SEED))
	@if [ -f "$$(cc -print-file-name=libasan.so)" ]; then \
	    $(MAKE) test-asan ASAN_TESTS="-n $(WORKERS) --part 4 $(RAISING) $(RAISING_ON_RANKS)"; \
	else echo 'skipped: the compiler has no AddressSanitizer'; fi
	$(MAKE) test-debug-python DEBUG_TESTS="$(RAISING)"

test-fast: build $(VENV)/.dev
	$(PYTEST) tests/unit tests/test_architecture.py

test-native: build $(VENV)/.dev
	$(PYTEST) tests/native

test-ranks: build $(VENV)/.dev
	$(PYTEST) tests/distributed

test-parity: build $(VENV)/.dev
	$(PYTEST) tests/parity

test-faults: build $(VENV)/.dev
	FSDP_C_EXHAUSTIVE=1 $(PYTEST) tests/faults tests/native

# A GPU that is simulated: docs/testing.md. Built when stale, into build/simulated_gpu.
# Of each file that runs on any device `make test-all` takes one test in SIMULATED_PART, always the same ones, `make test` one.
# Units of WIDE columns are above 1 MiB: what they gather is cut of the pool's piece, which smaller ones never see.
WIDE := 640
ON_SIMULATED_GPU := $(BIN)/python -m tests.simulated_gpu
ON_ANY_DEVICE := tests/distributed tests/parity tests/faults/test_every_point.py
SIMULATED_PART ?= 24
# The same with torch's operators in place of the kernels.
OPERATORS_PART ?= 96

simulated-gpu: build $(VENV)/.dev
	$(ON_SIMULATED_GPU)

test-simulated-gpu: build $(VENV)/.dev
	FSDP_C_EXHAUSTIVE=1 $(ON_SIMULATED_GPU) -m pytest tests/cuda tests/simulated_gpu tests/races
	FSDP_C_EXHAUSTIVE=1 FSDP_C_TEST_WIDTH=$(WIDE) $(ON_SIMULATED_GPU) -m pytest tests/races
	FSDP_C_TEST_WIDTH=$(WIDE) $(ON_SIMULATED_GPU) -m pytest --device cuda tests/parity/test_random_programs.py
	$(ON_SIMULATED_GPU) -m pytest --device cuda $(ON_ANY_DEVICE)

# torch's own CUDA build over a GPU that is not there: docs/testing.md. Of each file that runs on any device it takes one test in
# CUDA_BUILD_PART. Needs nvcc. The environment is made once, and what stands under torch when stale, into build/real_cuda.
CUDA_BUILD_TORCH ?= 2.13.0
CUDA_BUILD_PART ?= 12
ON_CUDA_BUILD := FAKE_CUDA_TORCH=$(CUDA_BUILD_TORCH) $(BIN)/python -m tests.real_cuda

test-cuda-build: build
	FAKE_CUDA_LATE=1 $(ON_CUDA_BUILD) -m pytest tests/cuda
	$(ON_CUDA_BUILD) -m pytest tests/real_cuda
	$(ON_CUDA_BUILD) -m pytest --device cuda --part $(CUDA_BUILD_PART) $(ON_ANY_DEVICE)
	FAKE_CUDA_CLIENTS=1 FAKE_CUDA_DEVICES=4 $(ON_CUDA_BUILD) -m pytest --device cuda tests/clients

test-clients: build $(VENV)/.clients
	$(PYTEST) tests/clients

# The last commit, in one environment per version, fetched from PyPI into ENVIRONMENTS and, unless VERSIONS_FLAGS is empty, removed
# after its tests.
test-versions: build
	$(BIN)/python -m tests.versions --folder $(ENVIRONMENTS) --out benchmarks/results/versions_$$(date +%F).md \
	    $(VERSIONS) --pythons $(PYTHONS) $(VERSIONS_FLAGS)

# In a copy of its own, so that what was built in place stays. The runtimes of the sanitizers come before Python's; libstdc++ with
# them, or exceptions of C++ end the process. nvcc does not bear them, and what memory a command takes is not what they make of it.
# Python's objects come from malloc, where the sanitizers see them. Python and torch keep things for ever:
# tests/faults/test_leaks.py looks for leaks.
test-asan: $(VENV)/.installed $(VENV)/.dev
	@mkdir -p $(ASAN)
	tar -cf - --exclude '*.so' --exclude __pycache__ --exclude .venv --exclude ./build --exclude ./runs --exclude .git . \
	    | tar -xf - -C $(ASAN)
	cd $(ASAN) && rm -f fsdp_c/*.so && FSDP_C_CUDA=0 FSDP_C_SANITIZE=address,undefined FSDP_C_OPT=-O1 \
	    "$(abspath $(BIN))/python" setup.py -q build_ext --inplace
	cd $(ASAN) && LD_PRELOAD="$$(for one in asan ubsan stdc++; do cc -print-file-name=lib$$one.so; done | xargs)" \
	    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	    PYTHONMALLOC=malloc "$(abspath $(BIN))/python" -m pytest $(ASAN_TESTS)

# A debug build checks each result against the exception that is set, references and the interpreter's lock. torch and the extension of
# the .venv load into one of the same version: Debian's python3.11-dbg for 3.11. Without one nothing is run.
test-debug-python: build $(VENV)/.dev
	@if [ "$$($(DEBUG_PYTHON) -c $(MINOR) 2>/dev/null)" = "$$($(BIN)/python -c $(MINOR))" ]; then set -x; \
	    PYTHONPATH=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	        $(DEBUG_PYTHON) -X dev -W ignore -m pytest -p no:cacheprovider $(DEBUG_TESTS); \
	else echo 'skipped: no $(DEBUG_PYTHON), or another version than that of $(VENV)'; fi

# For another processor than this one, emulated. What it needs: tests/aarch64/run.
test-aarch64: $(VENV)/.dev
	PYTHON="$(abspath $(BIN))/python" tests/aarch64/run

# What is released, in dist/, and what a change must keep of it: see .ci/wheel.
wheel: build $(VENV)/.release
	.ci/wheel

test-wheel: build $(VENV)/.release
	.ci/wheel quick

# On a GPU. CUDA_PYTHON=python3 takes that interpreter with its torch, setuptools and pytest: no
# .venv is made, and nothing is fetched.
CUDA_PYTHON ?= $(BIN)/python
CUDA_PYTEST = $(CUDA_PYTHON) -m pytest

build-cuda: export FSDP_C_CUDA = 1
build-cuda: $(if $(filter $(BIN)/python,$(CUDA_PYTHON)),$(VENV)/.installed $(VENV)/.dev)
	$(CUDA_PYTHON) setup.py -q build_ext --inplace

test-cuda: build-cuda
	$(CUDA_PYTEST) tests/cuda

# Every tensor in memory of its own, or an access behind its end would find its neighbour. Races are looked for where shared memory
# is. Without graphs, which bear no such memory, and without what the host must overtake: the sanitizer holds launches up.
sanitize-cuda: build-cuda
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 \
	    $(CUDA_PYTEST) tests/cuda/test_kernels.py -k "not graph and not stream"
	compute-sanitizer --tool racecheck --error-exitcode 1 \
	    $(CUDA_PYTEST) tests/cuda/test_kernels.py -k pack

# The shifts of vectors of 16-bit elements are taken for shifts of 2-bit numbers.
analyze: $(VENV)/.base
	@set -e; include=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["include"])'); \
	for file in $$(find csrc -name '*.c' ! -name '*avx*'); do \
	    gcc -std=c11 -O1 -fanalyzer -Werror -Wno-analyzer-shift-count-overflow -DPy_LIMITED_API=0x030A0000 -Icsrc \
	        -I"$$include" -c -o /dev/null "$$file"; \
	done

# The pages of docs/, and the API reference from the docstrings. A warning is an error: tests/unit/test_reference.py.
docs: build $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -q
	@echo 'build/site/index.html'

lint: $(VENV)/.dev
	$(BIN)/ruff check $(PY_FILES)
	$(BIN)/ruff format --check $(PY_FILES)
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)
	$(BIN)/mypy

typecheck: build $(VENV)/.dev
	$(BIN)/python -m mypy.stubtest fsdp_c._C --mypy-config-file tests/stubtest.ini --allowlist tests/stubtest_allowlist.txt

format: $(VENV)/.dev
	$(BIN)/ruff check --fix $(PY_FILES)
	$(BIN)/ruff format $(PY_FILES)
	$(BIN)/clang-format -i $(C_FILES)

bench: build
	$(BIN)/python -m benchmarks.host_overhead

bench-cuda: build-cuda
	@mkdir -p runs/cuda
	$(CUDA_PYTHON) -m benchmarks.cuda_kernels --json runs/cuda/kernels.json
	$(CUDA_PYTHON) -m benchmarks.cuda_steps --json runs/cuda/steps.json

clean:
	rm -rf build dist *.egg-info fsdp_c/*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
	rm -f $(VENV)/.installed
	find csrc fsdp_c tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
