# demo and test need Python 3.11 or later and nothing else; the README spells both as plain commands.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: demo test clean

demo: .venv/run
	$(BIN)/python prepare.py --dataset=pydocs
	$(BIN)/python train.py config/shakespeare_char.py --dataset=pydocs --out_dir=out-pydocs
	$(BIN)/python sample.py --out_dir=out-pydocs --num_samples=3

test: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis

.venv/run: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements.txt
	touch $@

.venv/dev: .venv/run requirements-dev.txt
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	touch $@
