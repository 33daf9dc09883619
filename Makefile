# `make demo` on a fresh machine; `make check test` for every change, which is exactly what `.ci/run` calls.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := torch==2.13.0
# Python compiles what is imported, when it is: compiling all that torch brings takes longer than to unpack it.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile

.PHONY: demo check types docs pages pictures test test-slow matrix bench-stall bench-overhead bench-recovery bench-predictor clean

demo: $(STAMP)
	$(BIN)/cpsr demo --run-dir runs/demo

# Without an NVIDIA GPU the CPU build of torch: first where pip finds it by itself, then from PyTorch's own index.
# Plain `torch` would bring gigabytes of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	if command -v nvidia-smi >/dev/null; then $(PIP) $(TORCH); else \
	  $(PIP) "$(TORCH)+cpu" 2>/dev/null \
	  || $(PIP) --index-url https://download.pytorch.org/whl/cpu $(TORCH) || $(PIP) $(TORCH); fi
	$(PIP) --constraint constraints.txt setuptools wheel
	$(PIP) --constraint constraints.txt --no-build-isolation --editable ".[dev,docs]"
	touch $(STAMP)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory --jobs=2 types docs  # each takes one core, and a minute or two

types: $(STAMP)
	$(BIN)/mypy

# The site in build/docs, without network; a warning is an error.
docs: $(STAMP)
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -b html -c docs . build/docs

# The committed pages that are written from the source: commands, configuration, interface and messages.
pages: $(STAMP)
	$(BIN)/python -m docs.site.generated

# The committed picture of the dashboard, with the Chromium of the machine. Diagrams: docs/site/diagrams.py.
pictures: $(STAMP)
	$(BIN)/python -m docs.site.pictures

# With the benchmarks' own tests. Ranks wait for each other and for disks, so that four tests at a time end sooner on
# two cores; those of a file share lives, and stay together.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" --numprocesses 4 --dist loadfile --no-loadscope-reorder \
	  tests benchmarks/tests

test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow tests benchmarks/tests

# By hand: each Python and torch of docs/versions.md, with what pip finds today. PYTHONS="/path/python3.12 ..."
matrix: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.packaging.matrix $(if $(PYTHONS),--python $(PYTHONS))

bench-stall: $(STAMP)
	$(BIN)/cpsr bench stall

bench-overhead: $(STAMP)
	$(BIN)/cpsr bench overhead

bench-recovery: $(STAMP)
	$(BIN)/cpsr bench recovery --quick

bench-predictor: $(STAMP)
	$(BIN)/cpsr bench predictor --methods default,line,vitp

clean:
	rm -rf $(VENV) build dist *.egg-info
