# make train | sweep | test | faults | lint | bench | clean      Hydra overrides: make train ARGS="max_steps=200 model.n_head=4"

# uv if it is installed, else pip; make train UV= takes pip. UV and PYTHON are looked for once, when they are needed.
UV ?= $(eval UV := $(shell uv --version >/dev/null 2>&1 && echo uv))$(UV)
# The first Python ≥ 3.11 on PATH, asked in / because pyenv obeys .python-version; uv takes the one of .python-version;
# override: make train PYTHON=/path/to/python
PYTHON ?= $(eval PYTHON := $(if $(UV),,$(shell cd / && for python in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	$$python -c 'import sys; sys.version_info < (3, 11) or print(sys.executable)' 2>/dev/null | grep . && break; done)))$(PYTHON)
VENV = .venv
IN_VENV = $(VENV)/bin/python
INSTALL = $(if $(UV),$(UV) pip install --python $(IN_VENV),$(IN_VENV) -m pip install --disable-pip-version-check) \
	--quiet -c constraints.txt

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

# Systems differ in the standard library alone, so the other two are checked without reading packages, in a tenth of
# the time.
lint: $(VENV)/.dev
	@$(IN_VENV) -m ruff check . && $(IN_VENV) -m ruff format --check . && $(IN_VENV) -m mypy --platform linux && \
		for platform in darwin win32; do \
			$(IN_VENV) -m mypy --platform $$platform --cache-dir .mypy_cache/$$platform --follow-imports skip \
				--allow-subclassing-any --allow-untyped-decorators --no-warn-unused-ignores || exit; done

format: $(VENV)/.dev
	@$(IN_VENV) -m ruff check --fix . ; $(IN_VENV) -m ruff format .

bench: $(VENV)/.train
	@$(IN_VENV) scripts/bench $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

# Install torch first and alone, so that pip keeps this version and looks for no other build.
$(VENV)/.train: pyproject.toml constraints.txt | check-venv
	@echo "installing minigpt into $(VENV) (once; torch is large) ..." >&2
	@$(INSTALL) torch && $(INSTALL) -e . && touch $@

# The pip of Python 3.11 to 3.13 knows no dependency groups.
$(VENV)/.dev: $(VENV)/.train
	@echo "installing the test dependencies into $(VENV) (once) ..." >&2
	@$(if $(UV),,$(INSTALL) "pip>=25.1" &&) $(INSTALL) --group dev && touch $@

check-venv:
	@if [ -e $(VENV) ]; then \
		$(IN_VENV) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
			echo "$(VENV) is broken or older than Python 3.11; remove it with 'make clean' and try again" >&2; exit 2; }; \
		$(if $(UV),:,$(IN_VENV) -c 'import pip' 2>/dev/null) || { \
			echo "$(VENV) has no pip and uv is not on PATH; install uv, or remove $(VENV) with 'make clean'" >&2; exit 2; }; \
	elif [ -n "$(UV)" ]; then \
		$(UV) venv --quiet --seed $(if $(PYTHON),--python $(PYTHON)) $(VENV) || { rm -rf $(VENV); \
			echo "uv cannot create $(VENV); set PYTHON=/path/to/python, or UV= to use pip" >&2; exit 2; }; \
	else \
		if [ -z "$(PYTHON)" ]; then echo "minigpt needs Python 3.11 or newer, which is not on PATH; set PYTHON=/path/to/python" >&2; exit 2; fi; \
		if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
			echo "$(PYTHON) is older than Python 3.11; set PYTHON=/path/to/python" >&2; exit 2; fi; \
		$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
			echo "$(PYTHON) cannot create a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }; fi
