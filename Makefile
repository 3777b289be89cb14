# `make demo` and `make test` do all the set-up they need; .venv is made once and kept.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
BENCHMARKS := cli forecasts load model migration placement proofs scheduler simulate prediction tui
export OMP_NUM_THREADS ?= 1
# Hundreds of processes that import the same modules: compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-gpu test-gpus test-slow test-all soak mutants bench figures check docs binary release clean
setup: $(STAMP)

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# Files are tested side by side, two more than there are cores, as many tests wait for something. In their order: sorted by
# how many tests they have, the longest would come last.
TEST_PROCESSES ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n + 2 : 6)))
test: $(STAMP)
	$(BIN)/python -m pytest -m 'not slow and not gpu' -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# On a machine with NVIDIA GPUs, by a Python that has torch, pytest and msgpack: nothing is installed. Packages that it
# lacks can lie, unpacked, in the folder GPU_PACKAGES. What is measured goes to GPU_FIGURES; without a GPU nothing is, and
# tests go on up to their first CUDA call. GPU_STAND_IN=1 takes a CPU for a GPU. test-gpus is for several GPUs. Ranks that
# hang are killed after HANG_S, before the time limits of tests.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_FIGURES ?= $(if $(GPU_STAND_IN),,docs/measured/gpu.json)
GPU_TESTS = PYTHONPATH=$(CURDIR):$(abspath $(GPU_PACKAGES)) GPU_FIGURES=$(GPU_FIGURES) GPU_STAND_IN=$(GPU_STAND_IN) HANG_S=90 \
	$(GPU_PYTHON) -m pytest -c tests/gpu/pytest.ini --rootdir=tests/gpu -p no:cacheprovider tests/gpu $(GPU_OPTIONS)
test-gpu:
	$(GPU_TESTS) -m 'not gpus'

test-gpus:
	$(GPU_TESTS) -m gpus

# The slow scenarios alone: real OpenSSH servers, eight ranks, failures in the middle of moves.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -m 'slow and not gpu'

test-all: test test-slow

# The whole head node in virtual time, under faults drawn from seeds; a failing seed is printed with its replay.
SECONDS ?= 60
SEEDS ?= 1-
soak: $(STAMP)
	$(BIN)/python -m tests.soak --seconds $(SECONDS) --seeds $(SEEDS)

# Changes of one operator each, and those that no test notices; CODE and TESTS name others than the core's.
COUNT ?= 60
SEED ?= 1
CODE ?= clusterd/core
TESTS ?= tests/core tests/simulate
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants --count $(COUNT) --seed $(SEED) --code $(CODE) --tests $(TESTS)

bench: $(STAMP)
	for b in $(BENCHMARKS); do $(BIN)/python tests/benchmarks/$$b.py || exit 1; done

# What charts and tables of the docs are made of: about an hour on two quiet cores, with the data sets in CLUSTERD_DATA.
RIVALS := default,tiresias,optimus,gavel,sia+plans,aiturbo+plans,rubick
SIMULATE := $(BIN)/python tests/benchmarks/simulate.py --json
MIGRATE := $(BIN)/python tests/benchmarks/migration.py --json --turns 0
figures: $(STAMP)
	$(SIMULATE) > docs/measured/completion-1.0.json
	$(SIMULATE) --policies $(RIVALS) --load 0.7 > docs/measured/completion-0.7.json
	$(SIMULATE) --policies $(RIVALS) --load 1.5 > docs/measured/completion-1.5.json
	$(SIMULATE) --policies default --move-cost measured > docs/measured/completion-live.json
	$(BIN)/python tests/benchmarks/accuracy.py --json > docs/measured/accuracy.json
	$(MIGRATE) --sizes 0.06 > docs/measured/migration-0.06.json
	$(MIGRATE) --sizes 0.25 > docs/measured/migration-0.25.json
	$(BIN)/python docs/charts.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/state_machines.py --check
	$(BIN)/python docs/verbs.py --check
	$(BIN)/python docs/charts.py --check

# The documentation as a site, in dist/site; fails on a page that no menu names and on a link that leads nowhere.
docs: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q --strict

binary: dist/clusterd
dist/clusterd: $(STAMP) pyproject.toml $(shell find clusterd plans profiling tui -name '*.py' 2>/dev/null)
	@mkdir -p dist
	SOURCE_DATE_EPOCH=$(COMMITTED_S) $(BIN)/shiv --reproducible --compressed -p '/usr/bin/env python3' \
		-e clusterd.__main__:main -o $@ '.[tui]'

# Sources, wheel and one-file program, the same from the same commit; states that later versions must read.
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
COMMITTED_S = $(shell git log -1 --format=%ct)
release: $(STAMP)
	@git diff --quiet HEAD || { echo "there are changes that no commit has: commit them, then release"; exit 1; }
	rm -rf dist build && umask 022 && SOURCE_DATE_EPOCH=$(COMMITTED_S) $(BIN)/python -m build -q --wheel
	git archive --prefix=clusterd-$(VERSION)/ -o dist/clusterd-$(VERSION).tar.gz HEAD
	$(MAKE) binary
	PYTHONHASHSEED=0 $(BIN)/python -m tests.daemon.journal.kept_states $(VERSION)
	cd dist && sha256sum *

clean:
	rm -rf dist build *.egg-info .mypy_cache .ruff_cache .pytest_cache
