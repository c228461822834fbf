"""How a script starts and ends: settings, `--help`, one-line errors, signals, atomic files.

Importing it needs the standard library only, so that `--help` does not wait for torch. Start
reading in `settings.py`.
"""
