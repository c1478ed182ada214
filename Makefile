# `make demo` and `make test` do all the set-up themselves; a second run skips it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The MLX back end: that for a CPU and a fast BLAS on Linux, nothing more on a Mac;
# `make demo EXTRA=cuda13` on an NVIDIA GPU.
EXTRA ?= $(if $(filter Linux,$(shell uname -s)),cpu$(COMMA)openblas,)
# Files of tests that run at once; twice as many as cores, for most tests wait for processes.
JOBS ?= $(shell $(PYTHON) -c 'import os; print(2 * (os.cpu_count() or 1))')
COMMA := ,
# The seconds of each test of the last `make test`, and of the last `make test-all`.
SECONDS_RECORD := .pytest_cache/seconds.xml
ALL_SECONDS_RECORD := .pytest_cache/seconds-all.xml
SERVES := $(VENV)/.serves-$(EXTRA)
READY := $(VENV)/.ready-$(EXTRA)
# What draws the diagrams of the site in the reader's browser; mkdocs.yml names the same version.
MERMAID := 11.12.2
MERMAID_FILE := docs/js/mermaid-$(MERMAID).min.js

# Every version that is installed; pip takes them from here, for the packages that build ours too.
CONSTRAINTS := requirements/constraints.txt
PIP := PIP_CONSTRAINT=$(CURDIR)/$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CURDIR)/$(CONSTRAINTS) \
	$(BIN)/python -m pip --quiet --disable-pip-version-check
LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras \
	--no-annotate --no-emit-index-url --custom-compile-command 'make lock' --output-file $(CONSTRAINTS) pyproject.toml

.PHONY: all demo test test-all test-ray slowest budget steady chaos soak check format-check lint types imports conflicts words format pages figures docs demo-model bench lock upgrade licences images audit clean

all: check test

$(SERVES): pyproject.toml $(CONSTRAINTS)  # what a pool needs
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"mlxpool needs Python 3.11 or newer, {sys.executable} is {v[0]}.{v[1]}; use make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@echo 'installing what a pool needs into $(VENV): about a minute'
	$(PIP) install --editable '.$(if $(EXTRA),[$(EXTRA)])'
	@touch $@

# Python compiles what the tests import when they do, pip would compile 240 MB of it.
$(READY): $(SERVES)        # and what its tests need besides
	@echo 'installing what the tests need into $(VENV): about a minute'
	$(PIP) install --editable '.[agents,dev$(if $(EXTRA),$(COMMA)$(EXTRA))]' --no-compile
	$(BIN)/python tests/support/mlx_header.py
	@touch $@

demo: $(SERVES)           ## a broker, a worker and an answer of an embedded model
	@$(BIN)/python examples/demo.py

# A file stays together, for its tests may share a pool. Folders follow each other by name, so that
# the last files are short ones of one process. The processes that tests start read bytecode that
# the first of them has written, whatever the environment says.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: $(READY)            ## tests of every function, in nine minutes of two cores, JOBS files at once
	$(PYTEST) --junitxml=$(SECONDS_RECORD)

test-all: $(READY)        ## all tests: before a change of many files is called done
	$(PYTEST) --full --junitxml=$(ALL_SECONDS_RECORD)

slowest: $(READY)         ## where the time of the last `make test` went: folders, files, tests
	@PYTHONPATH=tests $(BIN)/python -m support.slowest $(SECONDS_RECORD)

budget: $(READY)          ## fails if the last `make test` used more processor time than tests/tiers.toml allows
	@PYTHONPATH=tests $(BIN)/python -m support.slowest $(SECONDS_RECORD) --budget

steady: $(READY)          ## `make test` ten times in a row beside three busy processes
	$(BIN)/python tests/support/steady.py

chaos: $(READY)           ## the chaos suite with its long parts, and 10,000 streams under faults
	$(BIN)/python -m pytest tests/chaos -m ''
	PYTHONPATH=tests $(BIN)/python -m chaos.large_storm --streams 10000 --faults 1000 --step-us 8000

test-ray: $(READY)        ## a pool on several Ray nodes of this machine, some of them killed; installs Ray
	$(PIP) install --editable '.[ray]'
	$(BIN)/python -m pytest tests/cluster/test_ray_pool.py

soak: $(READY)            ## half an hour of faults, 100,000 seeds of the simulator, new random cases
	PYTHONPATH=tests $(BIN)/python -m chaos.soak
	$(BIN)/python tests/broker/core/simulator.py --seeds 100000
	MLXPOOL_HYPOTHESIS=random $(BIN)/python -m pytest -k 'properties or fuzz or prefix or sampler'

check: $(READY)           ## format, lint, types, import rules, and a count of unclear sentences; all at once
	@$(MAKE) --no-print-directory --jobs=5 types imports lint format-check conflicts words

format-check: $(READY)
	$(BIN)/ruff format --check

lint: $(READY)
	$(BIN)/ruff check

# In as many processes as there are cores; where these do not start in mypy's 3 s, in one.
types: $(READY)
	$(BIN)/mypy --num-workers auto || $(BIN)/mypy

words: $(READY)
	@$(BIN)/python tests/support/plain_words.py

imports: $(READY)
	$(BIN)/lint-imports

conflicts:                # what a merge left behind
	@! git grep -nE '^(<{7}|>{7}) '

format: $(READY)          ## put the code in form
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

pages: figures            ## make the pages of docs/ that come from the code again
	$(BIN)/python docs/make_pages.py
	$(BIN)/python docs/make_architecture.py
	$(BIN)/python docs/make_metrics.py

figures: $(READY)         ## write the measured figures of all pages again, from bench/figures/
	$(BIN)/python bench/update_docs.py

$(MERMAID_FILE):
	@mkdir -p $(@D)
	cd $(@D) && npm pack --silent mermaid@$(MERMAID) && tar -xzf mermaid-$(MERMAID).tgz --strip-components 2 package/dist/mermaid.min.js
	rm $(@D)/mermaid-$(MERMAID).tgz
	mv $(@D)/mermaid.min.js $@
	@touch $@

docs: $(READY) $(MERMAID_FILE)  ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

demo-model: $(READY)      ## train the embedded model again
	$(BIN)/python examples/train_demo_model.py

bench: $(READY)           ## measure the embedded model here; `mlxpool bench --help` for the rest
	$(BIN)/mlxpool bench engine
	$(BIN)/mlxpool bench end-to-end

lock: $(READY)            ## pin what pyproject.toml newly asks for; versions that are pinned stay
	$(LOCK)

upgrade: $(READY)         ## the newest version of everything, in a clean .venv; then the whole gate
	$(LOCK) --upgrade
	rm -rf $(VENV)
	$(MAKE) licences check test

licences: $(READY)        ## make docs/licences.md again, from the packages of the images
	$(BIN)/python docs/make_licences.py

images: $(READY)          ## the steps of the images' builds, without Docker
	$(BIN)/python -m pytest tests/deploy/test_image_steps.py -m '' -s

audit: $(READY)           ## known vulnerabilities of the pinned versions; asks pypi.org
	$(BIN)/python -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement $(CONSTRAINTS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist site docs/js
