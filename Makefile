# Two commands: `make demo` and `make test`. Each sets everything up first (a virtual environment in .venv, the native
# library, the engines); a second run re-uses it.

# The pinned wheels exist for CPython 3.11 (megatron-core, torch's CPU build); other versions need other pins.
PYTHON ?= $(firstword $(foreach p,python3.11 $(wildcard $(HOME)/.pyenv/versions/3.11*/bin/python3.11) python3 python,\
            $(if $(shell $(p) -c 'import sys; print(sys.version_info[:2] == (3, 11) or "")' 2>/dev/null),$(p))))
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
REQUIREMENTS := requirements/torch.txt requirements/engines.txt requirements/dev.txt
KERNELS := $(shell find kernels -type f)

.PHONY: demo demo-moe test test-long lint bench docs native clean

demo: $(VENV)/ready
	$(BIN)/mindspeed-tpi demo --out out

demo-moe: $(VENV)/ready
	$(BIN)/mindspeed-tpi demo-moe --out out/moe

test: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Resumable: out/long remembers what has passed.
test-long: $(VENV)/ready
	@command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64 && test -d /usr/include/simde || \
	  apt-get install -y -q g++-aarch64-linux-gnu qemu-user libsimde-dev
	$(BIN)/python -m tests.native.hashes
	$(BIN)/python -m tests.native.sanitized
	timeout 120m $(BIN)/python -m tests.ops.long --state out/long --jobs 2
	$(BIN)/python -m tests.patches.megatron_core.earlier
	$(BIN)/python -m tests.parallel.wide

lint: $(VENV)/ready
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports && $(BIN)/python docs/gen_tables.py --check

bench: $(VENV)/ready
	$(BIN)/python benchmarks/ops.py --out out/benchmarks && $(BIN)/python benchmarks/parallel.py --out out/benchmarks && $(BIN)/python benchmarks/engines.py --out out/benchmarks

docs: $(VENV)/ready
	$(BIN)/python docs/gen_tables.py

native: $(VENV)/ready

# The kernels compile while pip downloads.
$(VENV)/ready: $(REQUIREMENTS) setup.py pyproject.toml $(KERNELS)
	@$(MAKE) --no-print-directory -j2 $(VENV)/engines $(VENV)/kernels
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/engines: $(REQUIREMENTS) | $(VENV)/python
	$(PIP) -r requirements/torch.txt
	$(PIP) --no-deps -r requirements/engines.txt -r requirements/dev.txt
	@touch $@

$(VENV)/kernels: setup.py $(KERNELS) | $(VENV)/python
	$(BIN)/python setup.py --quiet build_ext
	@touch $@

$(VENV)/python:
	@test -n "$(PYTHON)" || { echo "mindspeed_tpi: the pinned engines need CPython 3.11 and none was found. Install it, or run"; \
	  echo "'make PYTHON=/path/to/python3.11'. The package itself ('pip install .') works from Python 3.10 on."; exit 1; }
	@echo "setting up $(VENV) with $$($(PYTHON) --version): torch, vLLM, Megatron-core (a few minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip setuptools wheel $(shell grep ^apache-tvm-ffi requirements/engines.txt)
	@touch $@

clean:
	rm -rf $(VENV) build mindspeed_tpi/lib mindspeed_tpi.egg-info mindspeed_tpi/*.egg-info out
