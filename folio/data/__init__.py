"""From text to token files to batches.

prepare.py reads a corpus (`sources.py`, `corpus.py`), encodes it (`tokenizer.py`) and writes a
dataset (`writer.py`). train.py reads the dataset (`dataset.py`) in batches
(`batches.py`). Start reading in `dataset.py`, which defines the files.
"""
