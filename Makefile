# Everything runs in a virtual environment of this checkout; nothing else is needed but Python and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check bench clean

demo: $(STAMP)  ## Answer a prompt on real weights, drafts in green; then plain against drafted, measured.
	$(BIN)/sakiyomi generate --show-drafts --stats -n 160 \
	  "Copy this text, with every 'red' changed to 'grey': The red fox crossed the river. The red fox saw the moon over \
	the river. The red fox went home before the moon was gone."
	$(BIN)/sakiyomi bench --per-category 1 -n 96 -k 5

test: check  ## Every check: style, types, tests.
	$(BIN)/python -m pytest

check: $(STAMP)  ## Style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## The measured figures of the README (about ten minutes).
	$(BIN)/python benchmarks/forward.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/sakiyomi bench --repeats 3

# torch comes first and pinned: a bare requirement may bring builds for accelerators that nobody here uses.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
