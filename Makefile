PYTHON ?= python3
BIN := .venv/bin
PROFILE ?= local

.PHONY: help install demo demo-pools test test-fast lint up down bench clean

help: # Prints the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*##/ {printf "  make %-10s %s\n", $$1, $$2}' Makefile

install: ## make both environments (the first time: minutes)
	@$(PYTHON) -m infra.install

demo: up ## train a small model to add, from nothing, with a Prefect UI to watch
	@$(BIN)/rollbook launch addition

demo-pools: PROFILE = pools
demo-pools: up ## the same as a deployment, on work pools of this machine
	@$(BIN)/python -m flows.follow addition

test: lint ## lint, then all tests, real engines included
	@$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test-fast: install ## the tests that take seconds
	@$(BIN)/pytest -m "not slow and not e2e"

lint: install ## ruff, import law, types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/pyright
	@$(BIN)/pyright -p infra/pyright-engines.json

up: install ## start the local S3 and Prefect servers; PROFILE=pools adds work pools
	@$(BIN)/python -m infra.services up --profile $(PROFILE)

down: ## stop them; runs stay
	@test ! -x $(BIN)/python || $(BIN)/python -m infra.services down

bench: up ## where a step's time goes
	@$(BIN)/python tests/benchmarks/step.py

clean: down ## remove environments and caches; runs stay in .rollbook
	rm -rf .venv .venv-engines .rollbook/cache .rollbook/scratch .pytest_cache .ruff_cache *.egg-info
