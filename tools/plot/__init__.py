"""Compares runs in a table and a plot, and draws attention. Start reading in `__main__.py`."""
