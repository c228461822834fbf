"""Compares commands and counts a model's work. Start reading in `__main__.py`."""
