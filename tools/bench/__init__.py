"""Times commands, profiles steps and counts FLOPs. Start reading in `__main__.py`."""
