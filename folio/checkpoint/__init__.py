"""What a run leaves on disk: its folder, and checkpoints. Start reading in `format.py`."""
