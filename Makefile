# What people run and what CI runs are the same commands.
PYTHON ?= python3
VENV ?= .venv
VERSIONS ?= -c constraints.txt
BIN := $(VENV)/bin
# Tests start thousands of processes: what they import is compiled once, though the environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE
STAMP := $(VENV)/.installed

.PHONY: help install demo test test-values test-processes test-alone test-newest test-oldest check format lint types contracts mutate families soak bench bench-peers site clean

help:  ## show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=..."; exit 1; }
	@echo "1 of 2: making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "2 of 2: downloading and installing PyTorch and what else is needed; depending on the network, that takes minutes"
	@$(BIN)/python -m pip install --disable-pip-version-check $(VERSIONS) -e '.[dev]'
	@touch $@
	@echo "done: $$($(BIN)/holdfast --version) is in $(BIN)"

install: $(STAMP)  ## make the virtual environment

site: $(STAMP)  ## make a site of the documentation, in build/site
	$(BIN)/python -m sphinx -q -W --keep-going -d build/trees docs build/site
	@echo "written to build/site/index.html"

demo: $(STAMP)  ## train, kill a worker in mid-step, and end with the same bits as without
	$(BIN)/python examples/demo.py

PYTEST := $(BIN)/python -m pytest --durations 20 --durations-min 1
test: $(STAMP)  ## run the tests, side by side but for those that need the machine alone; or what PYTEST_ARGS says
ifdef PYTEST_ARGS
	$(BIN)/python -m pytest $(PYTEST_ARGS)
else
	$(MAKE) -k test-values test-processes test-alone
endif

test-values: $(STAMP)  ## those that start no processes
	$(PYTEST) -n auto -m "not dist" $(PYTEST_FLAGS)

test-processes: $(STAMP)  ## those of real processes, two at a time
	$(PYTEST) -n 2 --dist worksteal -m "dist and not alone" tests/dist $(PYTEST_FLAGS)

test-alone: $(STAMP)  ## those beside which nothing runs
	$(PYTEST) -m "dist and alone" tests/dist $(PYTEST_FLAGS)

test-newest:  ## all of them, with the newest versions of what is needed, in an environment of its own
	$(MAKE) test VENV=.venv-newest VERSIONS=--upgrade

test-oldest:  ## all of them, with the oldest PyTorch that is promised, in an environment of its own
	$(MAKE) test VENV=.venv-oldest VERSIONS='torch==2.6.*'

# What benchmarks may do that the package may not: it is theirs to know which job they have made.
LOOSE := $(addprefix --disable-error-code=,operator arg-type list-item assignment import-not-found)
check: $(STAMP)  ## format, lint, types, import contracts
	$(MAKE) -k format lint types contracts

format: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy
	$(BIN)/mypy tools/ci.py
	MYPYPATH=benchmarks $(BIN)/mypy --explicit-package-bases --implicit-reexport --allow-untyped-calls $(LOOSE) benchmarks

contracts: $(STAMP)
	$(BIN)/lint-imports

mutate: $(STAMP)  ## change the code in 300 places, one at a time: does any test notice?
	$(BIN)/python -m tools.mutate $(MUTATE_ARGS)

families: $(STAMP)  ## which of transformers' causal language models can be cut: docs/families.md
	$(BIN)/python -m tools.families

soak: $(STAMP)  ## what `make test` leaves out; five rounds of real processes, 20,000 inputs per parser, 2,000 seeds, 5,000 orders of a device, 300 real faults in one run, 50 pauses
	$(BIN)/python -m pytest -n auto --soak --timeout 7200 tests/property tests/fuzz tests/unit tests/contract tests/golden
	for i in $$(seq 5); do echo "round $$i of 5"; \
	$(MAKE) test-processes PYTEST_FLAGS=--soak && $(MAKE) test-alone PYTEST_FLAGS=--soak || exit 1; done
	HOLDFAST_FUZZ_INPUTS=20000 $(BIN)/python -m pytest -n auto --timeout 7200 tests/fuzz
	HOLDFAST_CARRIER_KILLS=1000 $(BIN)/python -m pytest --timeout 7200 tests/contract/test_carried.py
	HOLDFAST_LATE_ORDERS=5000 $(BIN)/python -m pytest -n auto --timeout 7200 tests/unit/numerics/test_late.py
	HOLDFAST_DEVICE=late $(BIN)/python -m pytest -n auto --timeout 7200 tests/unit/numerics
	HOLDFAST_SEEDS=2000 HOLDFAST_AUDITED_STEPS=5000 $(BIN)/python -m pytest -n auto --soak --timeout 7200 tests/sim
	HOLDFAST_SOAK_FAULTS=300 HOLDFAST_HEALTHY_STEPS=5000 $(BIN)/python -m pytest tests/dist/test_soak.py
	HOLDFAST_SOAK_FAULTS=200 $(BIN)/python -m pytest tests/dist/test_struck_scripts.py
	HOLDFAST_SOAK_PAUSES=50 $(BIN)/python -m pytest tests/dist/test_pauses.py

bench: $(STAMP)  ## all benchmarks, with targets and results
	$(BIN)/python benchmarks/healthy_step.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/nodes.py
	$(BIN)/python benchmarks/remainder.py
	$(BIN)/python benchmarks/loop_recovery.py
	$(BIN)/python benchmarks/script_checks.py
	$(BIN)/python benchmarks/simulated_failures.py
	$(BIN)/python benchmarks/replays.py
	$(BIN)/python benchmarks/replays.py --models bert vit
	$(BIN)/python benchmarks/prices.py
	$(BIN)/python benchmarks/joining.py
	$(BIN)/python benchmarks/transfer.py
	$(BIN)/python benchmarks/links.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/memory.py --step-log
	$(BIN)/python benchmarks/checkpoint_stall.py
	$(BIN)/python benchmarks/tensor_logging.py
	$(BIN)/python benchmarks/logged_job.py
	$(BIN)/python benchmarks/audit.py
	$(BIN)/python benchmarks/board.py
	$(BIN)/python benchmarks/coordinator.py
	$(BIN)/python benchmarks/undo_cost.py
	$(BIN)/python benchmarks/undo_accuracy.py
	$(BIN)/python benchmarks/baselines.py
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/templates.py
	$(BIN)/python benchmarks/groups.py
	$(BIN)/python benchmarks/reshaping.py
	$(BIN)/python benchmarks/switching.py
	$(BIN)/python benchmarks/slipstream.py
	$(BIN)/python benchmarks/planned_step.py

reproduce: $(STAMP)  ## the papers' tables and figures beside what they print: docs/reproduction.md, its pictures, and a page in build
	rm -rf build/reproduction
	$(BIN)/holdfast reproduce all --out build/reproduction
	cp build/reproduction/reproduction.md docs/
	cp build/reproduction/pictures/*.svg docs/pictures/

bench-peers: $(STAMP)  ## the same kill in other systems; installs them into an environment of their own
	$(BIN)/python benchmarks/peers.py

clean:  ## remove what the other targets made
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
