# `make demo` and `make test` each do all set-up on a machine that has Python (3.10 to 3.13) and nothing else.
PYTHON ?= python3
VENV ?= .venv
# What pip installs for PyTorch; pip options may follow, as in
#   make demo TORCH="torch==2.12.1 --index-url URL"
# Without TORCH, any supported release is taken where this one has no wheel.
TORCH ?= torch==2.13.0
TORCH_SUPPORTED := torch>=2.11,<2.16

# verl asks for other versions than the rest, and so gets an environment of its own.
VENV_VERL ?= .venv-verl
VERL ?= verl==0.9.1
VERL_TESTS := tests/system/test_verl.py tests/system/test_packed_rows.py

# Pages are tested in a browser where there is one; what drives it takes 165 MB, so that it is no part of `test`.
BROWSER := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
D3 := dta_compile/views/assets/d3

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CODE := dta_compile tests examples benchmarks

N ?= 200
SEED ?= 0

.DEFAULT_GOAL := help
.PHONY: help setup demo rl test test-all test-slow test-verl fuzz fuzz-data fuzz-relations lint format bench bench-all d3 docs clean

help:
	@echo "make demo       install what it needs, then train a small model with eager and with dta side by side"
	@echo "make rl         set up, then train agents by reinforcement learning, dense and dta: 15 minutes on two cores"
	@echo "make test       set up, then ruff, mypy and the whole test suite"
	@echo "make test-all   the same with the tests that take long"
	@echo "make test-slow  set up, then the tests that take long alone"
	@echo "make test-verl  set up verl apart, then what is tested with it and with its transformers"
	@echo "make bench      set up, then the speed floors (benchmarks/floors.py)"
	@echo "make bench-all  set up, then every baseline, with plots; BENCH=\"--suite full\" takes hours"
	@echo "make fuzz       set up, then 200 drawn programs against eager on all cores; more and others by N=2000 SEED=7"
	@echo "make fuzz-data  set up, then 200 damaged files and options for the command line; N and SEED as above"
	@echo "make fuzz-relations  set up, then 200 drawn programs and all models of transformers under metamorphic relations"
	@echo "make docs       set up, then the documentation as pages in build/docs"
	@echo "make lint       set up, then ruff and mypy only"
	@echo "make format     set up, then let ruff rewrite the code"
	@echo "make d3         rebuild the drawing library of plan.to_html from npm, as its package.json says"
	@echo "make clean      remove the environment, caches and build results"

setup: $(STAMP)

# What the demo needs; the rest of set-up is on top of it.
$(VENV)/.demo: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(origin TORCH),file)
	$(BIN)/python -m pip install $(TORCH) || $(BIN)/python -m pip install "$(TORCH_SUPPORTED)"
else
	$(BIN)/python -m pip install $(TORCH)
endif
	$(BIN)/python -m pip install -e ".[hf]"
	touch $@

$(STAMP): $(VENV)/.demo
	$(BIN)/python -m pip install -e ".[test,hf]"
	test -z "$(BROWSER)" || $(BIN)/python -m pip install -e ".[browser]" || echo "tests in a browser are left out"
	touch $@

demo: $(VENV)/.demo
	$(BIN)/dta demo

rl: setup
	$(BIN)/python -m pip install --quiet -e ".[rl]"
	$(BIN)/python -m benchmarks.reinforcement_learning $(RL)

test: lint
	$(BIN)/python -m pytest --durations=10 --numprocesses auto --dist loadfile

test-all: lint
	$(BIN)/python -m pytest -m "" --durations=10 --numprocesses auto --dist loadfile

test-slow: setup
	$(BIN)/python -m pytest -m slow --durations=10 --numprocesses auto --dist loadfile

test-verl: $(VENV_VERL)/.installed
	$(VENV_VERL)/bin/python -m pytest --durations=10 --numprocesses auto --dist loadfile $(VERL_TESTS)

$(VENV_VERL)/.installed: pyproject.toml
	test -x $(VENV_VERL)/bin/python || $(PYTHON) -m venv $(VENV_VERL)
	$(VENV_VERL)/bin/python -m pip install $(TORCH)
	$(VENV_VERL)/bin/python -m pip install -e ".[test]" "$(VERL)" uvicorn fastapi
	touch $@

fuzz: setup
	$(BIN)/python -m tests.fuzz -n $(N) --seed $(SEED)

fuzz-relations: setup
	$(BIN)/python -m tests.fuzz -n $(N) --seed $(SEED) --relations
	$(BIN)/python -m tests.fuzz.families --seed $(SEED)

fuzz-data: setup
	$(BIN)/python -m tests.fuzz.data -n $(N) --seed $(SEED)

lint: setup
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

bench: setup
	$(BIN)/python benchmarks/floors.py

bench-all: setup
	$(BIN)/python -m pip install --quiet -e ".[bench]"
	$(BIN)/python -m benchmarks.run $(BENCH)

d3:
	cd $(D3) && npm install --no-package-lock && npm run build && rm -rf node_modules

docs: setup
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(VENV_VERL) dta_demo.html build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
