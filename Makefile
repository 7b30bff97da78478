# Tasks of the project. `make check` is what a change must pass; .ci/run does the same in a fresh environment.
PYTHON ?= python

.PHONY: check test full kernels coverage docs site lint types arrows bench format

check: lint types arrows full

test:  ## the quick run: every feature once
	$(PYTHON) -m pytest

full:  ## the whole suite (docs and doctests are part of it)
	$(PYTHON) -m pytest --full

coverage:  ## the whole suite, and which lines of the package it runs: at least 92 % (exceptions in pyproject.toml)
	$(PYTHON) -m pytest --full --cov --cov-report=term-missing

docs:  ## the code blocks of README.md and docs/, and every doctest
	$(PYTHON) -m pytest --full tests/docs

site:  ## the documentation site in both languages, in build/site
	$(PYTHON) docs/build_site.py build/site

kernels:  ## compile the C++ kernels of regard/ops/cpu again, after a change of them
	$(PYTHON) src/regard/ops/cpu/csrc/build.py

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m mypy

arrows:  ## which package may import which: the contracts in pyproject.toml
	$(PYTHON) -c "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"

bench: full  ## figures count only behind a green gate
	$(PYTHON) -m benchmarks

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
