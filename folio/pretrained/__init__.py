"""Weights from elsewhere and for elsewhere: checkpoints, Hugging Face folders, the hub, GGUF files.

Start reading in `load.py`, which resolves `--init_from`.
"""
