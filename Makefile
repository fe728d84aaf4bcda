# `make demo` and `make test` are all that a fresh machine needs: they set up by themselves.
# TORCH_ARGS goes to the `pip install` of torch: a machine without an NVIDIA GPU saves a few GB with the --index-url of
# PyTorch's CPU builds (see PyTorch's own installation page).

PYTHON ?= python3
TORCH_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS := 2
# One thread a process: the tests and the demo run several processes on few cores.  Bytecode is kept, also where the
# environment says otherwise, as containers do: compiling the package costs each process 0.6 s.
RUN := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=
# Neighboring tests share models and plans that are made once a process, so each process gets one half, and then what
# is left.  Traces are shared by all processes of a run.
PYTEST = $(RUN) $(BIN)/pytest -q -n $(JOBS) --dist worksteal --durations 15

.PHONY: setup browser check test lint unit slow format docs demo bench matrix clean

setup: $(READY)

# torch comes first and alone, so that whichever build of it was chosen stays when the rest is installed.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt $(TORCH_ARGS) torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# The report's tests open it in a browser, and are skipped where there is none.  This installs one where it may.
browser:
	command -v chromium chromium-browser google-chrome || (timeout 120 apt-get update && timeout 300 apt-get install -y chromium) || true

format: $(READY)
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

unit: $(READY)
	$(PYTEST) -m "not slow"

# Ranks of one test wait for each other, and for timeouts: with two tests at a time two cores are idle in between.
slow: JOBS = 3
slow: $(READY)
	$(PYTEST) -m slow

# The fast part, linters beside tests. The aim is three minutes.
check: $(READY)
	$(MAKE) --jobs 2 lint unit

# Everything. The aim is twenty minutes on two cores.
test:
	$(MAKE) check
	$(MAKE) slow

# The documentation as a site, in site/; a warning is an error.  What it needs is installed by the first call.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/.docs: $(READY)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

demo: $(READY)
	$(RUN) $(BIN)/torchrun --standalone --nproc-per-node 4 examples/train_text.py

bench: $(READY)
	$(RUN) $(BIN)/python benchmarks/planning.py
	$(RUN) $(BIN)/python benchmarks/runtime.py

# The fast tests with other versions of torch and transformers; writes docs/versions.md.
matrix: $(READY)
	$(RUN) $(BIN)/python benchmarks/matrix.py

clean:
	rm -rf $(VENV) .matrix .pytest_cache .hypothesis .ruff_cache .import_linter_cache site
