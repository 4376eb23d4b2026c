# `make demo` and `make test` set everything up by themselves. To use an environment you already have instead of .venv,
# name its Python and no venv:  make test-gpu PYTHON=python3 VENV=
PYTHON ?= python3
VENV ?= .venv
# One more than the two cores that the tests are meant for: they wait for servers and clocks a quarter of their time.
WORKERS ?= 3
PYTEST_ARGS ?=
OUT ?= bench-gpu

ifeq ($(strip $(VENV)),)
RUN := $(PYTHON)
STAMP :=
export PYTHONPATH := $(CURDIR):$(CURDIR)/kernels:$(PYTHONPATH)
else
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
endif

# The tests start some hundred processes: all but the first find the modules compiled.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) -m pytest
SPREAD := $(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder
SOURCES := bladellm_tools bladellm_runtime kernels recipes tests

.PHONY: help setup demo test test-all test-gpu bench-gpu bench-streams lint fmt

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 15

setup: $(STAMP)  ## create .venv and install the tested versions

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup  ## quantize the small model of the repository, serve it, ask it, print TTFT, TBT and tokens a second
	$(RUN) recipes/demo.py

test: setup  ## the tests, expensive ones sampled
	$(SPREAD) -m "not slow and not gpu" $(PYTEST_ARGS)

test-all: setup  ## all tests that need no GPU
	$(SPREAD) -m "not gpu" $(PYTEST_ARGS)

test-gpu: setup  ## tests of the GPU, then the others on it
	$(PYTEST) -m whole_gpu $(PYTEST_ARGS)
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "gpu and not whole_gpu" $(PYTEST_ARGS)
	$(SPREAD) -m "not slow and not gpu" --device cuda $(PYTEST_ARGS)

bench-gpu: setup  ## the tables of speed beside their goals; OUT=folder SHAPES="llama31-8b" PARTS="decode online" PEER="command"
	$(RUN) recipes/benchmarks/bench_gpu.py --device cuda --out $(OUT) $(if $(SHAPES),--shapes $(SHAPES)) \
		$(if $(PARTS),--parts $(PARTS)) $(if $(TOKENIZER),--tokenizer_dir $(TOKENIZER)) $(if $(PEER),--peer '$(PEER)') \
		$(BENCH_ARGS)

bench-streams: setup  ## tokens a second of 64 streams on the GPU, beside transformers
	$(RUN) recipes/benchmarks/concurrent_streams.py --device cuda --dtype bfloat16

lint: setup  ## style and types
	$(RUN) -m ruff check $(SOURCES)
	$(RUN) -m ruff format --check $(SOURCES)
	$(RUN) -m mypy

fmt: setup  ## format the code
	$(RUN) -m ruff check --fix $(SOURCES)
	$(RUN) -m ruff format $(SOURCES)
