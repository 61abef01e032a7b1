# make demo | make test | make docs | make check: each from a bare clone, doing its own set-up.
PYTHON ?= python3
TORCH ?= torch
BIN := .venv/bin

.PHONY: demo test check integrations lint walls types docs prose clean

demo: .venv/ready
	$(BIN)/hdet demo

# Two files at a time; one thread each, or they wait for each other's.
test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

check: lint walls types docs prose test

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Every trainer and tracker in full; the gate has one short test of each.
integrations: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.integrations

# Which package may import which: the contracts of pyproject.toml.
walls: .venv/ready
	$(BIN)/lint-imports --no-cache --no-logo

types: .venv/ready
	$(BIN)/mypy

# A broken link, anchor or reference is an error. The site is written to site/.
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# How readable the pages are.
prose: .venv/ready
	$(BIN)/python tools/prose.py README.md docs

# torch first: a package that needs it must find it, and not fetch another build.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv runs site .mypy_cache .pytest_cache .ruff_cache .hypothesis
