# make demo    compare FSDP1 with FSDP2 in a real sweep        make check   format, lint, types and imports
# make test    the fast tests                                  make docs    build the documentation into site/
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable

INSTALLED := $(VENV)/installed
DEVELOPMENT := $(VENV)/installed-dev
DOCUMENTATION := $(VENV)/installed-docs

.PHONY: demo test test-slow test-sample test-slurm check docs bench clean

demo: $(INSTALLED)
	$(BIN)/meshrunner run -m experiment=fsdp1_vs_fsdp2 activation_checkpoint=none,full steps=8

# Two test processes. Each file of tests stays in one process. tests/dist runs after tests/e2e, not together with it, because its
# processes share a forkserver that would stay alive. SLURM tests mostly wait, so they run together with tests/dist.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(DEVELOPMENT)
	$(PYTEST) -m "not slow" tests/e2e tests/unit
	$(PYTEST) -m "not slow" -rs tests/slurm tests/dist

test-slow: $(DEVELOPMENT)
	$(PYTEST) -m slow tests/e2e tests/unit
	$(PYTEST) -m slow -rs tests/slurm tests/dist

# a fixed eighth of the slow tests, for CI
test-sample: $(DEVELOPMENT)
	$(PYTEST) -m slow --sample 8 tests/e2e tests/unit
	$(PYTEST) -m slow --sample 8 -rs tests/slurm tests/dist

# all tests that need SLURM; as root, slurm/cluster/up.sh installs it and starts a test cluster
test-slurm: $(DEVELOPMENT)
	$(BIN)/python -m pytest -rs tests/slurm

check: $(DEVELOPMENT)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(DOCUMENTATION)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: $(DEVELOPMENT)
	$(BIN)/python -m bench

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) .
	touch $@

$(DEVELOPMENT): $(INSTALLED)
	$(PIP_INSTALL) '.[dev]'
	touch $@

$(DOCUMENTATION): $(INSTALLED)
	$(PIP_INSTALL) '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) runs sweeps site
