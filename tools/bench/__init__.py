"""Times commands and profiles steps. Start reading in `__main__.py`."""
