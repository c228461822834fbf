# Needs Python 3.11 or later. README.md lists the same commands without make.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: demo test clean

demo: .venv/run
	$(BIN)/python prepare.py --dataset=pydocs
	$(BIN)/python train.py config/own_text.py --dataset=pydocs --out_dir=out-pydocs --minutes=2
	$(BIN)/python sample.py --out_dir=out-pydocs --num_samples=1 --start="The built-in function "
	@echo
	@echo "Next: source .venv/bin/activate, then"
	@echo "  python sample.py --out_dir=out-pydocs --interactive                      your own prompts"
	@echo "  python prepare.py && python train.py config/shakespeare_char_fast.py     Shakespeare"
	@echo "  python prepare.py --input=FILE_OR_FOLDER --dataset=NAME                  your own text"

test: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	if command -v npx >/dev/null; then cd tools/page && npx --yes @biomejs/biome@2.6.8 ci; fi
	$(BIN)/python -m pytest

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/run: requirements.txt constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements.txt -c constraints.txt
	touch $@

.venv/dev: .venv/run requirements-dev.txt
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt -c constraints.txt
	touch $@
