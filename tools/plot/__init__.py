"""Compares runs in a table and a plot, and draws models. Start reading in `__main__.py`."""
