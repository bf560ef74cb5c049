# Two commands do everything on a fresh machine: `make compare` and `make test`.
# Real code of the field is called in an environment of its own: `make conformance` and `make benchmark`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
ARGS ?=

PEERS ?= .venv-peers
ENGINES ?= .venv-engines
DOCS ?= .venv-docs
FIELD = tests/conformance

.PHONY: compare test conformance benchmark engines tiny scaleup docs

compare: $(VENV)/ready  ## the main job: run experiment E1 and write runs/e1/report.html
	$(BIN)/simlab compare $(ARGS)

test: $(VENV)/ready  ## lint, types and the whole test suite
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/pytest -m "" -n auto --dist loadfile $(ARGS)

conformance: $(PEERS)/ready  ## the losses against the code of verl, TRL, polgrad, torchrl and martingale
	$(PEERS)/bin/python -m pytest $(FIELD) $(ARGS)

engines: $(ENGINES)/ready  ## SGLang, Megatron-Core and Ray on a CPU

tiny: $(ENGINES)/ready  ## asynchronous RL end to end on two cores: prints the learning curve
	$(ENGINES)/bin/scaleup run tiny_cpu $(ARGS)

scaleup: $(ENGINES)/ready  ## the real engines on a CPU: SGLang and Megatron-Core under the same losses
	OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest -W ignore tests/scaleup $(ARGS)

docs: $(DOCS)/ready  ## the pages of docs/ as a site that opens offline: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet

benchmark: $(PEERS)/ready  ## speed, as ratios within one process
	$(PEERS)/bin/python benchmarks/simulator.py
	$(PEERS)/bin/python benchmarks/losses.py
	$(PEERS)/bin/python benchmarks/logits.py

# torch first and pinned, as a CPU build if there is one: a resolver left alone takes the newest, with CUDA
define environment
$(PYTHON) -m venv $(1)
$(1)/bin/pip install --quiet "torch==2.13.0+cpu" || $(1)/bin/pip install --quiet "torch==2.13.0"
endef

$(VENV)/ready: pyproject.toml
	$(call environment,$(VENV))
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

$(PEERS)/ready: pyproject.toml $(FIELD)/requirements.txt $(FIELD)/requirements-nodeps.txt
	$(call environment,$(PEERS))
	$(PEERS)/bin/pip install --quiet -r $(FIELD)/requirements.txt
	$(PEERS)/bin/pip install --quiet --no-deps -r $(FIELD)/requirements-nodeps.txt
	$(PEERS)/bin/pip install --quiet --editable ".[dev]"
	touch $@

$(ENGINES)/ready: pyproject.toml scaleup/requirements-cpu.txt scaleup/requirements-cpu-nodeps.txt
	$(call environment,$(ENGINES))
	$(ENGINES)/bin/pip install --quiet -r scaleup/requirements-cpu.txt
	$(ENGINES)/bin/pip install --quiet --no-deps -r scaleup/requirements-cpu-nodeps.txt
	$(ENGINES)/bin/pip install --quiet --editable ".[dev]"
	touch $@

$(DOCS)/ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet $$($(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	touch $@
