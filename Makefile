# make train | sweep | test | faults | lint | bench | clean      Hydra overrides: make train ARGS="max_steps=200 model.n_head=4"

# The first Python ≥ 3.11 on PATH; override: make train PYTHON=/path/to/python
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV = .venv
IN_VENV = $(VENV)/bin/python
PIP = $(IN_VENV) -m pip install --quiet --disable-pip-version-check -c constraints.txt

# The recipe for a GPU if one is available, else for a CPU; override: make train ARGS="experiment=nanogpt_cpu"
RECIPE = $(if $(shell nvidia-smi -L 2>/dev/null),fast_gpu,fast_cpu)

# Arguments to which nothing is added, because they only print or choose another configuration file; those that bring a
# model or a recipe; and those that do not after all: resume=auto repeats the arguments that its run began with.
ALONE = ^(--(help|hydra-help|version|info|shell-completion|experimental-rerun)|-[hi]|-sc)(=|$$)
OWN_FILE = ^(--config-(name|path)|-c[np])(=|$$)
OWN_RECIPE = ^[+~]*(experiment|sweep|model|minutes|init_from|resume)(=[^{]|$$)
NO_RECIPE = ^[+]*((minutes|init_from|resume)=(null|None)|resume=auto)$$
# Those of ARGS, as the shell splits them, that match a pattern.
given = $(shell printf '%s\n' $(ARGS) | grep -Ev -e '$(NO_RECIPE)' | grep -E -e '$(1)')

.PHONY: train sweep test faults lint format bench clean check-venv
.DEFAULT_GOAL = train

train: $(VENV)/.train
	@$(IN_VENV) scripts/train.py $(if $(call given,$(ALONE)|$(OWN_FILE)|$(OWN_RECIPE)),,experiment=$(RECIPE)) $(ARGS)

sweep: $(VENV)/.train
	@$(IN_VENV) scripts/train.py $(if $(call given,$(ALONE)|^(--cfg|-c)(=|$$)),,-m) \
		$(if $(call given,$(ALONE)|$(OWN_FILE)|^[+~]*sweep=),,+sweep=heads_by_width) $(ARGS)

test: $(VENV)/.dev
	@$(IN_VENV) -m pytest $(ARGS)

faults: $(VENV)/.dev
	@PYTHONPATH=tests $(IN_VENV) -m robustness.faults $(ARGS)

lint: $(VENV)/.dev
	@$(IN_VENV) -m ruff check . && $(IN_VENV) -m ruff format --check . && $(IN_VENV) -m mypy

format: $(VENV)/.dev
	@$(IN_VENV) -m ruff check --fix . ; $(IN_VENV) -m ruff format .

bench: $(VENV)/.train
	@$(IN_VENV) scripts/bench $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

# Install torch first and alone, so that pip keeps this version and looks for no other build.
$(VENV)/.train: pyproject.toml constraints.txt | check-venv
	@echo "installing minigpt into $(VENV) (once; torch is large) ..." >&2
	@$(PIP) torch && $(PIP) -e . && touch $@

$(VENV)/.dev: $(VENV)/.train
	@echo "installing the test dependencies into $(VENV) (once) ..." >&2
	@$(PIP) -e ".[dev]" && touch $@

check-venv:
	@if [ -e $(VENV) ] && ! $(IN_VENV) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		echo "$(VENV) is broken or older than Python 3.11; remove it with 'make clean' and try again" >&2; exit 2; fi
	@if [ ! -e $(VENV) ]; then \
		if [ -z "$(PYTHON)" ]; then echo "minigpt needs Python 3.11 or newer, which is not on PATH; set PYTHON=/path/to/python" >&2; exit 2; fi; \
		if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
			echo "$(PYTHON) is older than Python 3.11; set PYTHON=/path/to/python" >&2; exit 2; fi; \
		$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
			echo "$(PYTHON) cannot create a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }; fi
