# Everything from nothing: `make train` and `make test` set up .venv first, and skip that when nothing changed.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

EXTRAS ?= dev
CONFIG ?= configs/libero_long.yaml
ARGS ?=
TESTS ?= tests
STAMP := .venv/.ready-$(EXTRAS)
export PYTHONUNBUFFERED := 1
export PYTHONNOUSERSITE := 1
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help env train test lint clean

help: ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 14
	@echo "  variables:  CONFIG=$(CONFIG)  ARGS='--seed=1 ...'  TESTS='tests/test_cli.py -k help'  EXTRAS=dev,text"

$(STAMP): pyproject.toml constraints.txt .ci/setup
	@.ci/setup "$(EXTRAS)"
	@touch $@

env: $(STAMP) ## Set up .venv (Python 3.12 or 3.13, pinned packages)

train: $(STAMP) ## Post-train the shipped policy with WMRL on LIBERO-Long, evaluate before and after, write a report
	.venv/bin/vla-wmrl train --config_path=$(CONFIG) $(ARGS)

test: $(STAMP) ## Run the tests
	.venv/bin/python -m pytest $(TESTS)

lint: $(STAMP) ## Check the style
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

clean: ## Remove .venv and caches (runs under outputs/ are kept)
	rm -rf .venv build .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
