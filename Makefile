# Every target does its own set-up: a virtual environment in .venv, installed with pip against constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DATA ?=
# Number of processes that share the tests. Three on two cores: tests of daemons mostly wait, and four are not faster.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
FOLDERS := swarm compression collectives node sims

# DEMO=pipeline: two peers that hold the model, and three weak ones that hold it together.
DEMO_plain = --local 4 --chaos examples/demo.toml
DEMO_pipeline = --local 2 --weak 3 --memory 7MiB --chaos --up 20Mbit/s examples/pipeline.toml

# Tests start hundreds of processes. Without stored bytecode each of them would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test trial check lint lowest soak mutants bench docs clean

# The checkout is installed in place. setuptools' editable finder cannot serve compression/ (it has no __init__.py), so a
# folder of links, which mypy reads too, stands in front of it.
$(VENV)/ready: pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	rm -rf build/links && mkdir -p build/links/thinwire
	ln -s "$(CURDIR)/node/public/__init__.py" "$(CURDIR)/node/public/__main__.py" "$(CURDIR)/node/public/py.typed" build/links/thinwire/
	for d in $(FOLDERS); do ln -s "$(CURDIR)/$$d" build/links/thinwire/$$d; done
	echo "$(CURDIR)/build/links" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/thinwire-links.pth"
	$(BIN)/python -m compileall -q $(FOLDERS)
	touch $@

# Four peers, one of them killed on the way, one that joins late. DATA= names a file or a folder to train on.
demo: $(VENV)/ready
	$(BIN)/thinwire start $(DEMO_$(or $(DEMO),plain)) $(if $(DATA),--data "$(DATA)")

test: $(VENV)/ready
	$(PYTEST)

# What continuous integration plays besides: tests of more than a second of CPU time, and more seeds.
trial: $(VENV)/ready
	$(PYTEST) -m "trial and not soak"

# Both of them in one go, as continuous integration does: the tests are collected once.
check: $(VENV)/ready
	$(PYTEST) -m "not soak"

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p thinwire
	$(BIN)/mypy benchmarks examples

# A run with the lowest versions that pyproject.toml allows, except that of torch.
lowest: $(VENV)/ready
	$(BIN)/python tests/tools/lowest.py build/lowest

# The pages of docs/ as a site in build/site; a broken link is an error.
docs: $(VENV)/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Some 75 minutes on two cores with nothing beside it, and then the mutants. PART=3/8: the third of eight parts, without the mutants.
soak: $(VENV)/ready $(if $(PART),,mutants)
	$(PYTEST) -m soak --timeout 3600 $(if $(PART),--part $(PART))

# Small changes of the code, of which the unit tests must notice 95 %.
mutants: $(VENV)/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[mutation]"
	$(BIN)/python tests/tools/mutants.py

# Figures of this machine (docs/measured/ has some). FULL=1: every size. HIVEMIND=DIR: beside hivemind, which gets an
# environment of its own in DIR; TORCHFT=DIR: beside torchft likewise. PCCL=DIR: beside PCCL, which has to be there
# (docs/benchmarks.md). benchmarks/training/loss.py and overlap.py need root and half an hour.
bench: $(VENV)/ready
	$(BIN)/python -m benchmarks.exchange.allreduce $(if $(FULL),--full) $(if $(HIVEMIND),--hivemind "$(HIVEMIND)") $(if $(PCCL),--pccl "$(PCCL)")
	$(BIN)/python -m benchmarks.exchange.tiny
	$(BIN)/python -m benchmarks.exchange.outerstep $(if $(TORCHFT),--torchft "$(TORCHFT)")
	$(BIN)/python -m benchmarks.exchange.kill $(if $(TORCHFT),--torchft "$(TORCHFT)")
	$(BIN)/python -m benchmarks.exchange.wan
	$(BIN)/python -m benchmarks.exchange.relay
	$(BIN)/python -m benchmarks.daemon.memory
	$(BIN)/python -m benchmarks.daemon.largemodels --only 124M $(if $(FULL),124M-sparse 350M 350M-sparse 1.3B 1.3B-sparse)
	$(BIN)/python -m benchmarks.daemon.idle
	$(BIN)/python -m benchmarks.daemon.monitoring
	$(BIN)/python -m benchmarks.swarms.linkcost
	$(BIN)/python -m benchmarks.compression.codecspeed

clean:
	rm -rf build $(VENV) *.egg-info
