# Two commands do everything on a fresh machine: `make compare` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
ARGS ?=

.PHONY: compare test benchmark lint

compare: $(VENV)/ready  ## the main job: run experiment E1 and write runs/e1/report.html
	$(BIN)/simlab compare $(ARGS)

test: $(VENV)/ready  ## lint and the whole test suite
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pytest -n auto --dist loadfile $(ARGS)

benchmark: $(VENV)/ready  ## speed, as ratios within one process
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/losses.py

# torch first and pinned, the CPU build where one is on offer: a resolver left alone takes the newest, with CUDA
$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "torch==2.13.0+cpu" || $(BIN)/pip install --quiet "torch==2.13.0"
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@
