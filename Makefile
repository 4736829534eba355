# Two commands: `make demo` sets everything up and runs the quickstart; `make test` runs the tests.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
STAMP := $(VENV)/.compiled
# tests/conftest.py says what each does.
WORKERS := -n 2 --dist loadscope --no-loadscope-reorder
export OMP_NUM_THREADS = 1
export MKL_NUM_THREADS = 1
export NUMBA_NUM_THREADS = 1
export HF_HUB_OFFLINE = 1
export HF_DATASETS_OFFLINE = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help setup install demo test test-slow test-gpu test-page lint format bench bench-loss bench-grid clean

help:
	@echo "make demo       set up, then run the quickstart and draw its figures (about 8 minutes)"
	@echo "make test       set up, then run the tests"
	@echo "make test-slow  the tests that take minutes each"
	@echo "make test-page  the report page in headless Chromium, which must be there (Debian: apt-get install chromium)"
	@echo "make lint       ruff and mypy"
	@echo "make bench      the benchmarks under bench/, JSON on stdout"
	@echo "make bench-grid composed curves against full runs (half an hour)"
	@echo "make bench-loss bytes at equal loss, against both papers' methods (half an hour)"
	@echo "make clean      remove the environment and caches; results/ stays"

setup: $(STAMP)

install: $(INSTALLED)

# torch first, alone and pinned: an open range would fetch a build of several GB for graphics cards.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "thinpipe needs Python 3.11 or newer; set PYTHON=..." >&2; exit 2; }
	@echo "setting up $(VENV): about 2 GB, some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,data]'
	@touch $@

$(STAMP): $(INSTALLED)
	@echo "compiling the CPU kernels, once: a minute or two"
	@$(BIN)/python -m thinpipe.harness.compression.warm_up > /dev/null
	@touch $@

demo: setup
	$(BIN)/thinpipe run quickstart

test: setup
	$(BIN)/python -m pytest $(WORKERS) -m "not slow and not gpu and not chromium" $(PYTEST_ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m "slow and not gpu and not chromium" $(PYTEST_ARGS)

test-gpu: setup
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

test-page: setup
	$(BIN)/python -m pytest -m chromium $(PYTEST_ARGS)

# mypy must see the checkout under the name it is imported by.
lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p .lint && ln -sfn .. .lint/thinpipe
	MYPYPATH=.lint $(BIN)/mypy --config-file pyproject.toml -p thinpipe.harness -p thinpipe.netem -p thinpipe.plots -m thinpipe.cli

format: install
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format --quiet .

bench: setup
	$(BIN)/pip install --quiet -c constraints.txt -e '.[bench]'
	@for name in codec pipeline_vs_stock run_overhead; do $(BIN)/python bench/$$name.py --json || exit 1; done

# Half an hour: trains every arm with five seeds, after the model it starts from.
bench-loss: setup
	$(BIN)/thinpipe pretrain gpt2-tiny-shakespeare >&2
	$(BIN)/thinpipe fetch-data fashion-mnist >&2
	$(BIN)/python bench/bytes_at_equal_loss.py --json

# Half an hour: a grid of links trained once a method, against a sample of its cells in full, five times over.
bench-grid: setup
	$(BIN)/python bench/grid.py --json

clean:
	rm -rf $(VENV) build dist *.egg-info .lint .pytest_cache .mypy_cache .ruff_cache .hypothesis
