"""How a script starts and ends. Start reading in `settings.py`.

Importing it needs the standard library only, so that `--help` does not wait for torch.
"""
