# Every target sets up what it needs, on a Debian or Ubuntu machine with nothing but Python and make.
#
#   PYTHON   the interpreter the virtual environment is made from, 3.10 or later
#   RANKS    of the demo, under torchrun if there are several: make demo RANKS=2
#   ARGS     passed on to the program of the target: make demo ARGS='--steps 20'
#   ZERO_INFINITY_NO_URING=1   build without liburing, with the thread backend alone

PYTHON ?= python3
RANKS ?= 1
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
TORCHRUN = -m torch.distributed.run --standalone --nproc-per-node $(RANKS)
C_SOURCES := $(wildcard csrc/aio/*.c csrc/aio/*.h)
# A stamp says that the environment is ready, and for which kind of build.
READY := $(VENV)/.ready$(if $(filter-out 0,$(ZERO_INFINITY_NO_URING)),-no-uring)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format docs wheel bench-smoke sanitize clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Make .venv, build the C engine and install the package into it (editable).

$(READY): pyproject.toml constraints.txt setup.py scripts/setup.sh tiering/aio/_build.py $(C_SOURCES)
	@PYTHON='$(PYTHON)' scripts/setup.sh '$(VENV)'
	@rm -f $(VENV)/.ready* && touch $@

demo: $(READY) ## Train a small GPT whose states are on the drive.
	@$(BIN)/python $(if $(filter-out 1,$(RANKS)),$(TORCHRUN)) -m infinity.demo $(ARGS)

test: $(READY) ## Run the tests.
	@$(BIN)/python -m pytest $(ARGS)

lint: $(READY) ## Check style and types; changes nothing.
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/clang-format --dry-run -Werror $(C_SOURCES)

format: $(READY) ## Format Python and C, and mend what ruff can mend.
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .
	$(BIN)/clang-format -i $(C_SOURCES)

docs: $(READY) ## Write docs/config.md anew from the configuration's own fields.
	$(BIN)/python -m infinity.config.reference > docs/config.md.new
	@mv docs/config.md.new docs/config.md

wheel: $(READY) ## Build a stable-ABI wheel with liburing inside, into dist/.
	@PYTHON='$(BIN)/python' scripts/wheel.sh dist

bench-smoke: $(READY) ## Run the smallest sizes of the demo and of step_bench, to see that they run.
	@$(BIN)/python -m infinity.demo --smoke $(ARGS)
	@$(BIN)/python -m bench.step_bench --size tiny --threads 1 --steps 2 --warmup 1 --vs torch --nvme-path .

sanitize: $(READY) ## Run the C engine's tests under the address, undefined and thread sanitizers.
	@csrc/aio/sanitize.sh $(ARGS)

clean: ## Remove what the other targets made.
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f tiering/aio/_native*
