# `make train` and `make test` start from nothing: they find a Python, make .venv and install requirements.lock.
# Variables: PYTHON (to make .venv with), WORKDIR (of `make train`), WORKERS (of `make test`), ARGS (for pytest).
SHELL   = /bin/sh
WORKDIR = runs/tiny
WORKERS = 2
ARGS    =

BIN    = .venv/bin
STAMP  = .venv/.complete
PYTEST = $(BIN)/python -m pytest

# An environment cannot move, and its interpreter may have been removed: then it is made anew.
ifneq ($(shell cat $(STAMP) 2>/dev/null && $(BIN)/python -c ""),$(CURDIR))
$(shell rm -f $(STAMP))
endif

.PHONY: help venv train test test-fast test-slow test-aot aot-facts lint clean

help:
	@echo "make train      install, train the tiny K3 in $(WORKDIR), write its loss picture and generated text"
	@echo "make test       install, then the test suite (under 15 minutes on 2 cores)"
	@echo "make test-fast  the tests to run while editing (under 2 minutes, no TPU compiler)"
	@echo "make test-slow  the long sweeps"
	@echo "make test-aot   compile every TPU program and compare with tests/aot/facts (up to 50 minutes)"
	@echo "make aot-facts  compile every TPU program and write tests/aot/facts"
	@echo "make lint       ruff"
	@echo "make clean      remove .venv, caches and build products; runs/ stays"

venv: $(STAMP)

$(STAMP): requirements.lock setup.cfg pyproject.toml
	@sh .ci/make-venv

train: $(STAMP)
	$(BIN)/k3 train --config configs/tiny.py --workdir $(WORKDIR)
	@$(BIN)/k3 generate --checkpoint $(WORKDIR) --prompt "def " --max-tokens 1000 --temperature 0.8 --seed 0 --ignore-eos \
		> $(WORKDIR)/sample.txt
	@cat $(WORKDIR)/sample.txt
	@echo
	@echo "checkpoint  $(WORKDIR)/checkpoints"
	@echo "loss        $(WORKDIR)/loss.png, $(WORKDIR)/metrics.jsonl"
	@echo "text        $(WORKDIR)/sample.txt"

# By file: a file's fixtures and traces are made once. (--dist loadgroup does nothing in pytest 9.2 with pytest-xdist 3.8.)
test: $(STAMP)
	$(PYTEST) -q -m "not slow and not aot_compile" -n $(WORKERS) --dist loadfile $(ARGS)

test-fast: $(STAMP)
	$(PYTEST) -q -m "not slow and not aot and not multiprocess" $(ARGS)

test-slow: $(STAMP)
	$(PYTEST) -q -m "slow" -n $(WORKERS) --dist worksteal $(ARGS)

# One process: the TPU compiler uses every core by itself.
test-aot: $(STAMP)
	$(PYTEST) -q -m "aot" --aot compile $(ARGS)

aot-facts: $(STAMP)
	$(PYTEST) -q -m "aot and not aot_compile" --aot refresh $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .

clean:
	rm -rf .venv .cache build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
