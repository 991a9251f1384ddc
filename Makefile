# make train: set up, train on embedded real text in minutes, evaluate, show how to translate.
# make test:  set up, lint, test.
# PYTHON=python3.12 chooses the interpreter that .venv is made with.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/quickstart.py
# A worker that dies ends the tests: with loadfile, xdist waits for its files for ever.
TESTS := -q -n 2 --dist loadfile --max-worker-restart 0
WORKDIR ?= runs/$(basename $(notdir $(CONFIG)))
VERSION := $(shell $(PYTHON) -c "import sys; print('%d.%d' % sys.version_info[:2])")
READY := $(VENV)/ready-$(VERSION)

.PHONY: setup train test test-all test-oracles bench plan-tools lint format clean

setup: $(READY)

$(READY): requirements.txt requirements-dev.txt requirements-quickstart.txt
	@$(PYTHON) -c "import sys; ok = (3, 11) <= sys.version_info < (3, 14); \
	    sys.exit(0 if ok else 'PYTHON=$(PYTHON): got Python $(VERSION), allowed: 3.11 to 3.13')"
	test -x $(BIN)/python && $(BIN)/python -c "import sys; \
	    sys.exit('%d.%d' % sys.version_info[:2] != '$(VERSION)')" || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	    -r requirements-quickstart.txt
	rm -f $(VENV)/ready-*
	touch $@

train: $(READY)
	$(BIN)/python train.py --config $(CONFIG) --workdir $(WORKDIR) $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright --level error

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: lint
	$(BIN)/python -m pytest $(TESTS) -m "not slow and not oracle" $(ARGS)

test-all: lint
	$(BIN)/python -m pytest $(TESTS) -m "not oracle" $(ARGS)

test-oracles: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-oracles.txt
	$(BIN)/python -m pytest $(TESTS) tests/oracles $(ARGS)

# The TPU compiler, for plan --topology; apart from the packages, or jax would load it in every run.
plan-tools: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	    --target $(VENV)/plan-tools "$$($(BIN)/python -c "import importlib.metadata as m; \
	    print(next(r.partition(';')[0] for r in m.requires('jax') if r.startswith('libtpu')))")"

# Beside other people's toolkits: make bench NAME=decode ARGS='--rounds 3'
bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-oracles.txt
	PYTHONPATH=. $(BIN)/python benchmarks/$(NAME).py $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
