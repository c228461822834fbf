"""Training one model in several processes, which torchrun starts.

Start reading in `world.py`, which has the processes and their communication. `sharding.py` has what
DDP and FSDP distribute.
"""
