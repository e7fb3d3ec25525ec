# Everything runs in a virtual environment of this checkout; nothing else is needed but Python and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check bench clean

demo: $(STAMP)  ## Run the main job on real weights: the same text, plain and reading ahead.
	$(BIN)/python benchmarks/demo.py

test: check  ## Every check: style, types, tests.
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## The measured figures of the README (several minutes).
	$(BIN)/python benchmarks/forward.py
	$(BIN)/sakiyomi bench

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
