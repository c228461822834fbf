"""A trained model as a web page that runs by itself. Start reading in `__main__.py`."""
