# Each target prepares what it needs: `make test` on a fresh checkout creates .venv and installs the tested set.
PYTHON ?= python3
BIN := .venv/bin
# Ranks of a test wait for each other, and for faults to be found: tests beside it take the processor time that they
# leave. On 2 cores three tests left a quarter of it unused; a fourth one takes that. The tests of a file stay together,
# as they share what is dear to make; files that take longest come first (tests/conftest.py). JOBS=0: one after another.
JOBS ?= 4
PARALLEL = -n $(JOBS) --dist loadfile --no-loadscope-reorder
INSTALLED := .venv/installed.stamp
DOCS := .venv/docs.stamp
# CONSTRAINTS= installs the newest of everything.
CONSTRAINTS ?= constraints.txt
PUBLIC := .venv-public/installed.stamp
# Of `make dist`: the Pythons and the torch that the wheel is tried with, Pythons that it is tried with as far as that
# needs no torch, and the address of the repository, for README's links.
PYTHONS ?= $(PYTHON)
TORCH ?= $(shell grep ^torch== constraints.txt)
BARE_PYTHONS ?= $(wildcard $(foreach minor,10 11 12 13,$(HOME)/.pyenv/versions/3.$(minor).*/bin/python))
REPOSITORY ?=

.DEFAULT_GOAL := help
.PHONY: help demo test quick exhaustive public gpu lint types docs bench dist clean

help:
	@echo "make demo   train on this machine and show what the strategy does"
	@echo "make test   the whole test suite"
	@echo "make quick  the everyday part of the test suite"
	@echo "make exhaustive  every kill, layout and resumed step, beside the test suite"
	@echo "make public  modules of public packages under pipelines, in an environment of their own"
	@echo "make gpu    what is promised on GPUs, on those of this machine, and a page of results (gpu.md);"
	@echo "            SIMULATED=1: on simulated devices"
	@echo "make lint   ruff check, ruff format --check, and the shape of the package"
	@echo "make types  mypy --strict on the package and the benchmarks"
	@echo "make docs   the documentation as a site, in build/docs"
	@echo "make bench  list the benchmark commands"
	@echo "make dist   build wheel and sdist, and try the wheel in new environments; REPOSITORY=https://... for its links;"
	@echo "            PYTHONS='python3.11 python3.13' TORCH=torch==2.15.0: with these"
	@echo "make clean  remove caches and build output (not .venv, .venv-public)"

$(BIN)/python:
	$(PYTHON) -m venv .venv

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install $(addprefix -c ,$(CONSTRAINTS)) -e '.[test,plot]'
	@touch $@

$(DOCS): $(INSTALLED)
	$(BIN)/python -m pip install -c constraints.txt -e '.[docs]'
	@touch $@

$(PUBLIC): pyproject.toml constraints.txt $(wildcard tests/public/*.txt tests/public/*/*.py)
	$(PYTHON) -m venv .venv-public
	.venv-public/bin/python -m pip install -c constraints.txt -r tests/public/requirements.txt -e '.[test]' \
		tests/public/torchvision_on_cpu
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m "not exhaustive"

quick: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not exhaustive"

# The longest of these take a minute by themselves, and have two.
exhaustive: JOBS = 2
exhaustive: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m exhaustive

public: $(PUBLIC)
	.venv-public/bin/python -m pytest tests/public

gpu: $(INSTALLED)
	LIGHTNING_SMDDP_GPU_PAGE=$(if $(SIMULATED),gpu-simulated.md,gpu.md) $(BIN)/python -m pytest tests/gpu \
		-m $(if $(SIMULATED),simulated_cuda,gpus)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/shape.py lightning_smddp

types: $(INSTALLED)
	$(BIN)/mypy

# A link without a target, a page that no list has, a docstring that is no reStructuredText: each ends it.
docs: $(DOCS)
	$(BIN)/python -m sphinx -E -W --keep-going -b html -c docs . build/docs

bench: $(INSTALLED)
	@echo "Each prints its options with --help; benchmarks/README.md says how to read and record the results."
	@for file in $(wildcard benchmarks/[a-z]*.py); do echo "$(BIN)/python $$file"; done

# The wheel is built from the sdist.
dist:
	$(if $(REPOSITORY),,@echo "Without REPOSITORY=https://... README's links are relative, and the metadata has no addresses.")
	rm -rf build/release dist
	$(PYTHON) tests/release.py sources $(REPOSITORY)
	$(PYTHON) -m venv build/release/tools
	build/release/tools/bin/python -m pip install -q -c constraints.txt build twine
	build/release/tools/bin/python -m build --outdir dist build/release/source
	build/release/tools/bin/python -m twine check --strict dist/*
	$(PYTHON) tests/release.py without $(BARE_PYTHONS)
	$(PYTHON) tests/release.py $(TORCH) $(PYTHONS)

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache lightning_logs checkpoints demo_output
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
