"""Programs around the scripts, run as `python -m tools.NAME`."""
