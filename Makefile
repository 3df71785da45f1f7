# make demo    a minute: a real benchmark on this computer, with a report at the end
# make check   under a minute: lint, types, unit tests, ten simulated runs
# make test    everything: lint, types, all tests, 300 simulated runs
# make test-core, test-pages, test-places, test-gear   a part of the tests: the core, with processes of this computer;
#              what the docs show, the demo, the benchmarks, and the dashboard in a browser; ssh, lab, Slurm, clouds and Windows Agent Arena;
#              the stand-ins of clouds and container engines, also by Microsoft's own `az` and Google's own clients
# make nightly  what takes long: 1,000 simulated runs and as many budgets, ten minutes of fuzzing, every attack on every isolation, tests marked `nightly`, Inspect's own benchmark
# make bench   measure speed and scale
# make clean   remove .venv and caches; your results stay
#
# Python 3.11 or later is all you need. Another one than it finds: make test PYTHON=/path/to/python

SHELL  := bash
JOBS   ?= 6  # most tests wait more than they compute
BIN    := .venv/bin
PYTEST := $(BIN)/python -m pytest -rfEs
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where it is set, every worker of the tests and every process that they start would compile all that it loads.
unexport PYTHONDONTWRITEBYTECODE
# Microsoft's descriptions of Azure's resources, which are not ours to copy (tests/cloud/test_azure_contracts.py)
export AZURE_CONTRACTS ?= $(abspath $(wildcard ../shared/contracts/azure-types))
# Google's description of its API, which is not ours to copy, either (standins/gce/contract.py)
export GOOGLE_CONTRACTS ?= $(abspath $(wildcard ../shared/contracts/google))
# Microsoft's own command line, which the stand-in for Azure is tried with (standins/tests/azure/test_az.py)
export AZ ?= $(abspath $(wildcard .venv/az/bin/az))
# Google's own clients, gsutil among them, which the stand-ins for Compute Engine and Cloud Storage are tried with (standins/tests/gce)
export GOOGLE_CLIENTS ?= $(if $(wildcard .venv/google/with-gsutil),$(abspath .venv/google/bin/python))
# Microsoft's own client of Azure Machine Learning, which its stand-in is tried with (standins/tests/azure_ml)
export AZURE_AI_ML ?= $(if $(wildcard .venv/azure-ai-ml/ready),$(abspath .venv/azure-ai-ml/bin/python))

CORE   := tests/unit tests/sim tests/contract tests/integration tests/e2e
PAGES  := tests/docs tests/demo tests/bench tests/web
PLACES := tests/ssh tests/lab tests/cloud tests/slurm tests/waa
GEAR   := standins/tests

.PHONY: help demo test test-core test-pages test-places test-gear system-packages check nightly bench clean lint
.NOTPARALLEL:

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

demo: .venv/core
	$(BIN)/evalfleet demo

check: lint
	$(PYTEST) -q -n $(JOBS) -m 'not slow and not nightly' tests/unit
	$(BIN)/python -m sim --seeds 10

# Types are checked twice. The second one takes minutes of one core, so all else goes on beside it.
test: .venv/dev system-packages
	@[ "$(AZURE_CONTRACTS)" ] || echo "!!!!!!!! NO CHECK AGAINST AZURE'S CONTRACTS: there is no ../shared/contracts" >&2
	@[ "$(GOOGLE_CONTRACTS)" ] || echo "!!!!!!!! NO CHECK AGAINST GOOGLE'S CONTRACTS: there is no ../shared/contracts" >&2
	@[ "$(AZ)" ] || echo "!!!!!!!! NO TEST BY MICROSOFT'S OWN az: \`make test-gear\` installs it, 700 MB" >&2
	@[ "$(GOOGLE_CLIENTS)" ] || echo "!!!!!!!! NO TEST BY GOOGLE'S OWN CLIENTS: \`make test-gear\` installs them, 320 MB" >&2
	@[ "$(AZURE_AI_ML)" ] || echo "!!!!!!!! NO TEST BY MICROSOFT'S OWN azure-ai-ml: \`make test-gear\` installs it, 140 MB" >&2
	$(BIN)/pyright & pyright=$$!; \
	$(MAKE) -s lint && $(BIN)/python -m sim --seeds 300 && $(PYTEST) -n $(JOBS) --dist worksteal; tests=$$?; \
	wait $$pyright && exit $$tests

test-core test-pages test-places: .venv/dev system-packages
	$(PYTEST) -n $(JOBS) --dist worksteal $($(shell echo $(@:test-%=%) | tr a-z A-Z))

test-gear: .venv/dev system-packages
	@[ "$(AZ)" ] || $(MAKE) -s .venv/az/bin/az || echo "!!!!!!!! NO TEST BY MICROSOFT'S OWN az: it could not be installed" >&2
	@[ "$(GOOGLE_CLIENTS)" ] || $(MAKE) -s .venv/google/with-gsutil || echo "!!!!!!!! NO TEST BY GOOGLE'S OWN CLIENTS: they could not be installed" >&2
	@[ "$(AZURE_AI_ML)" ] || $(MAKE) -s .venv/azure-ai-ml/ready || echo "!!!!!!!! NO TEST BY MICROSOFT'S OWN azure-ai-ml: it could not be installed" >&2
	az=$(abspath .venv/az/bin/az); [ "$$AZ" ] || [ ! -x "$$az" ] || export AZ="$$az"; \
	google=$(abspath .venv/google); [ "$$GOOGLE_CLIENTS" ] || [ ! -e "$$google/with-gsutil" ] || export GOOGLE_CLIENTS="$$google/bin/python"; \
	ml=$(abspath .venv/azure-ai-ml); [ "$$AZURE_AI_ML" ] || [ ! -e "$$ml/ready" ] || export AZURE_AI_ML="$$ml/bin/python"; \
	$(PYTEST) -n $(JOBS) --dist worksteal $(GEAR)

system-packages:
	@tools/system-packages chromium tmux parallel openssh-server openssh-client iproute2 iptables sudo podman runc qemu-utils prometheus slurm-wlm

nightly: .venv/dev .venv/inspect/ready
	$(BIN)/python -m sim --seeds 1000
	$(BIN)/python -m bench hostile
	$(BIN)/python -m bench budget-overshoot
	$(PYTEST) -n $(JOBS) --dist worksteal -m nightly
	INSPECT_PYTHON=$(abspath .venv/inspect/bin/python) $(PYTEST) tests/e2e/test_examples.py

# The newest one, some 700 MB, in an environment of its own; one that came only in part is made anew.
.venv/az/bin/az: | $(BIN)/python
	$(BIN)/python -m venv --clear .venv/az
	.venv/az/bin/pip install -q azure-cli || { rm -rf .venv/az; exit 1; }

.venv/google/with-gsutil: | $(BIN)/python
	$(BIN)/python -m venv --clear .venv/google
	.venv/google/bin/pip install -q google-api-python-client google-cloud-compute gsutil
	touch $@

.venv/azure-ai-ml/ready: | $(BIN)/python
	$(BIN)/python -m venv --clear .venv/azure-ai-ml
	.venv/azure-ai-ml/bin/pip install -q azure-ai-ml azure-identity
	touch $@

.venv/inspect/ready: | $(BIN)/python
	$(BIN)/python -m venv .venv/inspect
	.venv/inspect/bin/pip install -q inspect-evals openai
	touch $@

bench: .venv/dev
	$(BIN)/python -m bench all

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

lint: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# The stamps are redone when pyproject.toml changes.
.venv/core: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e .
	@touch $@

.venv/dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[dev]'
	@touch .venv/core $@

# Debian's python3 comes without ensurepip, so a Python counts only if it can make a working venv.
$(BIN)/python:
	@find_python() { \
	  for p in "$(PYTHON)" python3.13 python3.12 python3.11 python3; do \
	    "$$p" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && return; \
	  done; false; \
	}; \
	find_python || { tools/system-packages python3-venv && find_python; } || \
	  { echo 'make: needs Python 3.11 or later with venv (Debian, Ubuntu: apt install python3-venv)' >&2; exit 1; }; \
	echo "$$p -m venv .venv"; "$$p" -m venv --clear .venv
