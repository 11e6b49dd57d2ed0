# Two commands matter on a fresh machine: `make demo` and `make test`. Both do all set-up first.
#
# PYTHON     the interpreter that makes .venv (3.11 to 3.14)
# CONNECTOR  the KV connector of the demo, by its name in the entry-point group pdkv.connectors
# ARGS       more arguments for the demo's harness or for pytest

PYTHON    ?= python3
CONNECTOR ?= nixl-pull
ARGS      ?=

PY    := .venv/bin/python
MODEL := build/models/smollm2-135m-instruct
DEMO  := build/demo
# No single test may take longer than its --timeout; those of the launcher start two or three engines, a minute or two
# each on two busy cores.
FAST_TESTS   := $(PY) -m pytest -m "not vllm and not nixl and not gpu" --timeout 300 -n 2 --dist worksteal
NIXL_TESTS   := $(PY) -m pytest -m "nixl and not vllm and not gpu" --timeout 300 --durations 10
ENGINE_TESTS := $(PY) -m pytest -m "vllm and not gpu" --timeout 600 --durations 25

.DEFAULT_GOAL := help
.PHONY: help setup setup-fast model demo demo-sleep test test-fast test-nixl test-engines lint format fuzz lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv with the locked vLLM CPU stack (about 3 GB; does nothing when done)
	@$(call need_python)
	@$(PYTHON) scripts/setup.py all

setup-fast: ## make .venv without vLLM: enough for test-fast and lint
	@$(call need_python)
	@$(PYTHON) scripts/setup.py test

model: setup ## convert the small model, once
	@$(PY) -m pdkv.harness.model $(MODEL)

demo: model ## prefill + decode against one stock vLLM, over 16 word problems; exits 0 only if all tokens are equal
	@mkdir -p $(DEMO)
	$(PY) -m pdkv.harness.gsm8k --model $(MODEL) --data examples/data/grade_school.jsonl \
		--connector $(CONNECTOR) --engine-memory 3GiB --report $(DEMO)/report.json --log-dir $(DEMO)/logs $(ARGS)

# Without a connector that was asked for: nixl-pull and nixl-push.
SLEEPING = $(if $(filter command environment,$(firstword $(origin CONNECTOR))),--connector $(CONNECTOR))
demo-sleep: model ## the demo with sleep, wake and a weight update between problems, pull and push
	@mkdir -p $(DEMO)-sleep
	$(PY) -m pdkv.harness.sleep --model $(MODEL) --data examples/data/grade_school.jsonl \
		--report $(DEMO)-sleep/report.json --log-dir $(DEMO)-sleep/logs $(SLEEPING) $(ARGS)

test: model ## all tests that need no GPU: those of test-fast, of test-nixl and of test-engines
	$(FAST_TESTS) $(ARGS)
	$(NIXL_TESTS) $(ARGS)
	$(ENGINE_TESTS) $(ARGS)

test-fast: setup-fast ## the tests that need neither vLLM nor NIXL, two at a time
	$(FAST_TESTS) $(ARGS)

test-nixl: setup-fast ## the tests with real transports in processes of their own, which have deadlines
	$(NIXL_TESTS) $(ARGS)

test-engines: model ## the tests with real vLLM engines, one after the other: engines would take the cores from each other
	$(ENGINE_TESTS) $(ARGS)

lint: setup-fast ## ruff, mypy, import-linter
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports

format: setup-fast ## let ruff correct what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Not locked: it has wheels for few Pythons (3.11 to 3.13 with atheris 3.0).
ATHERIS := build/atheris
fuzz: setup-fast ## fuzz all that a peer can say for ten minutes, guided by coverage (ARGS="--minutes 1"; see its --help)
	@test -d $(ATHERIS) || $(PY) -m pip install --quiet --target $(ATHERIS) --no-deps atheris
	PYTHONPATH=$(ATHERIS) $(PY) tests/fuzz/fuzz_messages.py $(ARGS)

lock: ## write the lock files anew from requirements/*.in
	@$(call need_python)
	$(PYTHON) scripts/lock.py $(ARGS)

clean: ## remove what was built: .venv, the model, reports, caches
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

define need_python
	command -v $(PYTHON) >/dev/null || { \
		echo "setup: error: there is no '$(PYTHON)'; install Python 3.11 to 3.14, or name one: make PYTHON=..." >&2; exit 1; }
endef
