"""Trains one run for each combination of settings. Start reading in `__main__.py`."""
