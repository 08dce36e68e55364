# Everything runs in .venv, which is made once, and again only when pyproject.toml or constraints.txt change.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test eval lint bench setup package-check clean

demo: $(INSTALLED)
	@if grep -qs '"finished": true' contacts.jsonl.meta; then rm -f contacts.jsonl contacts.jsonl.meta; fi
	$(BIN)/niwaki run examples/extract.py:extract --input examples/data/inbox.txt --record-separator --- --output contacts.jsonl
	@echo
	@echo 'The first three of them (contacts.jsonl has one line per record of examples/data/inbox.txt):'
	@head -n 3 contacts.jsonl
	@echo
	@echo 'Look at examples/extract.py: the program that did it. Then: .venv/bin/python examples/tree.py, .venv/bin/python examples/chat.py'

test: $(INSTALLED)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} $(BIN)/python -m pytest tests -q

eval: $(INSTALLED)
	$(BIN)/python -m niwaki.runtime.bundled.evaluate

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests

bench: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks.bench_prefix --json build/bench_prefix.json

package-check: $(INSTALLED)
	.ci/package-check

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf build dist niwaki.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis contacts.jsonl contacts.jsonl.meta
