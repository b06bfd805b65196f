# `make test` and `make demo` need Python 3.11 or later with venv, make and a C++ compiler, and nothing else.
# Another Python (make test PYTHON=python3.13) has an environment of its own.

PYTHON ?= python3
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
NODE_CLIENTS := tests/responses/node/node_modules
CODING_CLIENTS := tests/responses/clients/npm/node_modules
LOOPBACK_ONLY := unshare --map-root-user --net sh -c 'ip link set lo up && exec "$$@"' sh
PYTHONS = $(shell python3 tools/pythons.py)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
NO_INDEX := echo "error: pip could not install what is needed: check the network and pip's settings (pip config list)" >&2

# BUILD=N: with the llama-server of that build number, which is built where it is missing.
ON_BUILD = $(if $(BUILD),server=$$($(BIN)/python -m tools.build_server $(BUILD)) && LLAMA_SERVER=$$server)

unexport PYTHONDONTWRITEBYTECODE  # hundreds of processes are started: each would compile the library anew

.DEFAULT_GOAL := help
.PHONY: help adversary reality test mutants test-two-machines test-all-pythons test-responses test-clients bench-responses demo server test-server unit scenarios simulate record chaos soak docs lint format clean

help: ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

test: $(VENV)/.test server $(if $(shell command -v npm),$(NODE_CLIENTS)/.stamp) ## lint, types, import contracts and every test, on the real server too
	$(MAKE) lint
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-all-pythons: ## the same on every installed Python of 3.11, 3.12 and 3.13, each in an environment of its own
	@set -e; pythons="$(PYTHONS)"; test -n "$$pythons" || { echo "error: none of them is installed" >&2; exit 1; }; \
	for python in $$pythons; do $(MAKE) test PYTHON=$$python; done; echo "passed on $$pythons"

demo: server ## a small real model on a real server, live
	@$(BIN)/python -m tools.demo

server: $(VENV)/.package ## a llama-server and a small model: found or built, and checked
	@$(BIN)/python -m tools.install_server

test-server: $(VENV)/.test $(if $(BUILD),,server) ## the tests that need a real server; BUILD=N: on that build of it
	$(ON_BUILD) $(BIN)/python -m pytest tests/server $(PYTEST_ARGS)

unit: $(VENV)/.test ## the tests of single parts, and of a worker with a scripted server
	$(BIN)/python -m pytest tests/unit tests/actors $(PYTEST_ARGS)

simulate: $(VENV)/.test ## the worker in virtual time: HOURS worker-hours (a year) with FAULTS faults from SEED (a new one), by JOBS processes
	$(BIN)/python -m tests.simulation --jobs $(JOBS) $(if $(filter-out file,$(origin SEED)),--seed $(SEED)) $(if $(HOURS),--hours $(HOURS)) $(if $(FAULTS),--faults $(FAULTS))

record: $(VENV)/.test server ## record what the real server does with several requests, and print what is not as stored; SITUATION=words, BUILD=N
	$(BIN)/python -m tests.recordings $(if $(SITUATION),--situation "$(SITUATION)") $(if $(BUILD),--build $(BUILD))

scenarios: $(VENV)/.test ## hung or only slow? every scenario, with its verdict and time
	$(BIN)/python -m tests.scenarios

test-responses: $(VENV)/.test server $(NODE_CLIENTS)/.stamp ## the Responses layer with every client, those of Node too (needs npm)
	$(BIN)/python -m pytest tests/responses --every-line $(PYTEST_ARGS)

test-clients: $(VENV)/.test $(CODING_CLIENTS)/.stamp ## Codex, OpenCode and a browser in front of a scripted server, without a network (needs npm; installs Debian's chromium)
	@command -v chromium >/dev/null || { apt-get update && apt-get install --yes --no-install-recommends chromium; }
	$(LOOPBACK_ONLY) $(BIN)/python -m tests.responses.clients $(CLIENTS_ARGS)

bench-responses: $(VENV)/.test server $(NODE_CLIENTS)/.stamp ## what those clients get from llama-server itself and through the proxy; PEER='command' for another proxy
	$(BIN)/python -m benchmarks.responses $(if $(PEER),--peer '$(PEER)')

$(NODE_CLIENTS)/.stamp: tests/responses/node/package.json
	npm install --prefix tests/responses/node --no-package-lock --no-audit --no-fund --loglevel=error
	touch $@

$(CODING_CLIENTS)/.stamp: tests/responses/clients/npm/package.json
	npm install --prefix tests/responses/clients/npm --no-package-lock --no-audit --no-fund --loglevel=error
	touch $@

N ?= 2000
SEED ?= 1
BURNERS ?= 0
JOBS ?= 1

chaos: $(VENV)/.test ## random faults and callers: N steps of the plan that SEED makes, BURNERS cores kept busy
	$(BIN)/python -m tests.chaos --steps $(N) --seed $(SEED) --burners $(BURNERS)

mutants: $(VENV)/.test ## N small mistakes in the product, one at a time, and who notices them; SEED=, HOURS= in the simulator for each, JOBS=, BY=unit or simulator or campaign alone, UNDER=paths
	@$(BIN)/python -m tools.mutants $(foreach name,N SEED,$(if $(filter-out file,$(origin $(name))),--$(if $(filter N,$(name)),count,seed) $($(name)))) \
		$(if $(HOURS),--hours $(HOURS)) --jobs $(JOBS) $(BY:%=--by %) $(UNDER:%=--under %)

adversary: $(VENV)/.test ## N generated honest servers and as many wedged ones, in virtual time, by JOBS processes: who is given up, and when
	$(BIN)/python -m tests.adversary --count $(N) --seed $(SEED) --jobs $(JOBS)

reality: $(VENV)/.test server ## random shapes on the real server with tight limits, for MINUTES, BURNERS cores kept busy; BUILD=N: on that build of it
	@$(ON_BUILD) $(BIN)/python -m tests.reality $(if $(filter-out file,$(origin SEED)),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES)) --burners $(BURNERS)

soak: $(VENV)/.test server ## the suite for ROUNDS rounds, each under another condition (cores, burners, order, processes, Pythons): what fails where
	$(BIN)/python -m tools.soak $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(filter-out file,$(origin SEED)),--seed $(SEED)) $(PYTEST_ARGS)

test-two-machines: $(VENV)/.test server ## a fleet on machines that are network namespaces (needs root): dead links, nodes and head, as a table; WRITE=1: into docs/ray.md
	@$(BIN)/python -m tests.two_machines $(if $(WRITE),--write)

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
	rm -rf .venv .venv-* build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis src/*.egg-info *.egg-info
	rm -rf $(NODE_CLIENTS) $(CODING_CLIENTS)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: Python 3.11 or later is needed, and $(PYTHON) is not one; name one: make demo PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); echo "error: Python's venv is needed (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }

$(VENV)/.package: pyproject.toml setup.cfg | $(VENV)/bin/python
	@echo "installing llama_worker into $(VENV) ..."
	@$(PIP_INSTALL) --editable '.[cli]' || { $(NO_INDEX); exit 1; }
	@touch $@

$(VENV)/.test: pyproject.toml setup.cfg | $(VENV)/bin/python
	@echo "installing what the tests need into $(VENV) ..."
	@$(PIP_INSTALL) --editable '.[test]' || { $(NO_INDEX); exit 1; }
	@touch $@ $(VENV)/.package
