# make demo: a real sweep of distributed runs.  make test: the tests.  make check: format, lint, types, imports.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test test-slow test-sample test-slurm check bench clean

demo: $(INSTALLED)
	$(BIN)/meshrunner run -m experiment=fsdp1_vs_fsdp2 activation_checkpoint=none,full steps=8

# Two test processes, a file of tests in one of them. tests/dist not beside tests/e2e: the process its ranks come from would
# live on. Those on the cluster wait more than they compute.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test: $(INSTALLED)
	$(PYTEST) -m "not slow" tests/unit tests/e2e
	$(PYTEST) -m "not slow" -rs tests/slurm tests/dist

test-slow: $(INSTALLED)
	$(PYTEST) -m slow tests/unit tests/e2e
	$(PYTEST) -m slow -rs tests/slurm tests/dist

# a fixed fifth of them, for CI
test-sample: $(INSTALLED)
	$(PYTEST) -m slow --sample 5 tests/unit tests/e2e
	$(PYTEST) -m slow --sample 5 -rs tests/slurm tests/dist

# all of those that need SLURM; slurm/cluster/up.sh, as root, installs it and brings a test cluster up
test-slurm: $(INSTALLED)
	$(BIN)/python -m pytest -rs tests/slurm

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(INSTALLED)
	$(BIN)/python -m bench

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv runs sweeps
