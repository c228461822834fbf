"""How a script starts and ends, with the standard library only. Start reading in `settings.py`."""
