# Everything from a fresh clone: `make demo`, `make test`, `make serve`. Needs Python 3.11, make and g++.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.headrace-installed
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
MODEL ?= smollm2-135m-instruct
CONFIG ?= examples/local.yaml
ARGS ?=

# Free of torch: these are checked with mypy --strict. The rest of the engine and of the workers runs beside torch.
TYPED := protocol transport kvstore router cluster cli engine/config.py engine/model_config.py engine/checkpoint.py engine/gguf_conversion.py worker/config.py

.PHONY: demo serve test test-slow model check lint types layering format proto bench-vllm clean

demo: $(STAMP)
	@$(BIN)/headrace demo --config $(CONFIG) $(ARGS)

serve: $(STAMP)
	@exec $(BIN)/headrace serve --config $(CONFIG) $(ARGS)

test: $(STAMP) model
	@$(BIN)/pytest -q $(ARGS)

test-slow: $(STAMP) model
	@$(BIN)/pytest -q -m slow $(ARGS)

model: $(STAMP)
	@$(BIN)/headrace model fetch $(MODEL)

check: lint types layering

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)
	@$(BIN)/mypy --strict $(TYPED)

layering: $(STAMP)
	@$(BIN)/pytest -q tests/unit/test_layering.py

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# The stubs are committed; the plugin of mypy-protobuf must be on PATH.
proto: $(STAMP)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. protocol/headrace.proto

bench-vllm: $(STAMP) model
	@$(BIN)/python -m bench.vllm $(ARGS)

clean:
	@rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is as new as everything that decides what is installed. torch goes first: it is the largest, and its pin holds for every build of it.
$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard engine/native/*)
	@test -x $(BIN)/python || { echo "creating .venv"; $(PYTHON) -m venv .venv; }
	@echo "installing torch (the first time takes minutes)"
	@$(PIP) install torch==2.13.0
	@echo "installing the other packages and building the native kernels"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@
