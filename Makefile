# Two commands for everybody: `make demo` and `make test`. The rest serves development.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
OLDEST_TRANSFORMERS := 5.2.*
NEWEST := .venv-newest
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test lint unit oldest newest constraints soak browser clean

# constraints.txt names the releases that were tested; pyproject.toml has the ranges that are allowed.
PIP := $(BIN)/python -m pip --quiet
TESTED := --no-build-isolation --constraint constraints.txt

$(BIN)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): several gigabytes the first time, most of them PyTorch; some minutes"
	$(PIP) install --constraint constraints.txt pip setuptools
	$(PIP) install $(TESTED) -e .
	touch $@

$(BIN)/testable: $(BIN)/installed
	@echo "installing what the tests need"
	$(PIP) install $(TESTED) -e '.[test,plot]'
	touch $@

# The oldest supported transformers, with kvpress to compare against. It borrows from $(VENV) what constraints-oldest.txt names at the same
# release, PyTorch above all, and sees nothing else of it.
$(OLDEST)/installed: pyproject.toml constraints-oldest.txt $(BIN)/testable
	test -x $(OLDEST)/bin/python || $(BIN)/python -m venv $(OLDEST)
	rm -rf $(OLDEST)/borrowed
	$(BIN)/python -m tests.support.oldest $(OLDEST)/borrowed constraints-oldest.txt
	echo $(CURDIR)/$(OLDEST)/borrowed > $$($(OLDEST)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/borrowed.pth
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints.txt pip setuptools
	$(OLDEST)/bin/python -m pip install --quiet --no-build-isolation --constraint constraints-oldest.txt transformers kvpress
	touch $@

demo: $(BIN)/installed
	$(BIN)/python -m jobs.demo

test: lint unit oldest

lint: $(BIN)/testable
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A headless browser for the tests of the report's page; only fetched where none is found.
browser:
	command -v chromium || command -v chromium-browser || command -v google-chrome || command -v google-chrome-stable || \
	  (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium > /dev/null)

unit: $(BIN)/testable browser
	$(BIN)/python -m pytest

oldest: $(OLDEST)/installed
	$(OLDEST)/bin/python -m pytest -m 'equivalence and not gpu'

# What the newest releases that pyproject.toml allows do to the tests: run before `make constraints UPGRADE=--upgrade` takes them over.
newest: browser
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade pip
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager -e '.[test,plot]'
	$(NEWEST)/bin/python -m pytest

# What was tested, for every supported Python: constraints.txt for `make` and the image's requirements.lock, which adds hashes, and
# constraints-oldest.txt. Releases stay as they are unless UPGRADE=--upgrade (or --upgrade-package NAME) asks for newer ones.
COMPILE := $(BIN)/uv pip compile --quiet --no-annotate --custom-compile-command 'make constraints'
constraints: $(BIN)/installed
	$(PIP) install uv
	$(COMPILE) $(UPGRADE) pyproject.toml infra/requirements.in --extra test --extra plot --universal --python-version 3.10 --output-file constraints.txt
	cp constraints.txt constraints-oldest.txt
	echo 'transformers==$(OLDEST_TRANSFORMERS)' | $(COMPILE) pyproject.toml - --extra test --extra peers --universal --python-version 3.10 --output-file constraints-oldest.txt
	$(COMPILE) pyproject.toml infra/requirements.in --constraint constraints.txt --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	  --generate-hashes --no-strip-markers --output-file infra/requirements.lock

# The long trials: 30 kills, 2,000 videos, 8 seeds of a faulty object store.
soak: $(BIN)/testable
	$(BIN)/python -m pytest -m slow -s tests/integration

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) build dist *.egg-info demo
