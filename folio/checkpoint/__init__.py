"""What a run leaves on disk: its folder, and the checkpoints in it.

Start reading in `format.py`, which defines the keys of a checkpoint file, and reads and writes it.
`run_dir.py` names the files of the folder, and reads and writes them.
"""
