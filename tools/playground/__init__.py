"""A page in the browser to generate and score texts. Start reading in `__main__.py`."""
