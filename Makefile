# make demo   set up, then analyse the bundled real traces and a simulated PP1 and PP8 into build/demo
# make test   set up, then lint, types and tests
# make lint   the same without the tests     make bench   speed and memory     make clean
# make docs   the documentation as a site, build/site/index.html
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.installed
DEMO    = build/demo

.PHONY: demo test lint bench docs clean
.DEFAULT_GOAL := demo

# Rerun pip only when what it reads has changed.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nsysk3 needs Python 3.11 or newer: make PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# Each trace is a run of its own, so each is analysed alone.
demo: $(STAMP)
	@set -e; for trace in h200/tp2 h200/pp2 sglang-h200/pp2-lw; do \
	  $(BIN)/nsysk3 analyze fixtures/$$trace.sqlite --out $(DEMO)/$$trace; \
	done
	$(BIN)/nsysk3 demo --out $(DEMO)/kimi-k3 --no-open
	@echo "Wrote $(DEMO)/; open $(DEMO)/kimi-k3/compare.html"

lint: $(STAMP)
	$(BIN)/ruff check -q .
	$(BIN)/ruff format -q --check .
	$(BIN)/mypy

# Three processes on two cores, for many tests wait; with bytecode, or each of hundreds of commands compiles nsysk3 anew.
test: lint
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -q -n 3 --dist worksteal

bench: $(STAMP)
	$(BIN)/python benchmarks/bench.py

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q
	@echo "Wrote build/site/; open build/site/index.html"

clean:
	rm -rf build $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
