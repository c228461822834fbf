"""Weights from elsewhere and for elsewhere: checkpoints, Hugging Face folders, models on the hub.

Start reading in `load.py`, which resolves `--init_from`.
"""
