"""Several processes that train one model with torchrun.

`world.py` has the processes and their communication, `sharding.py` what DDP and FSDP distribute.
"""
