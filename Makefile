# Two commands for everybody: `make demo` and `make test`. The rest serves development.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test lint unit oldest soak browser clean

$(BIN)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): several gigabytes the first time, most of them PyTorch; some minutes"
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(BIN)/testable: $(BIN)/installed
	@echo "installing what the tests need"
	$(BIN)/python -m pip install --quiet -e '.[test,plot]'
	touch $@

# The oldest supported transformers, with kvpress to compare against. It sees the packages of $(VENV) and puts its own before them.
$(OLDEST)/installed: pyproject.toml $(BIN)/testable
	test -x $(OLDEST)/bin/python || $(BIN)/python -m venv $(OLDEST)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$($(OLDEST)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/newest.pth
	$(OLDEST)/bin/python -m pip install --quiet 'transformers==5.2.*' 'kvpress>=0.5.5'
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

# The long trials: 30 kills, 2,000 videos, 8 seeds of a faulty object store.
soak: $(BIN)/testable
	$(BIN)/python -m pytest -m slow -s tests/integration

clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info demo
