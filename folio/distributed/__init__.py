"""Training one model in several processes, which torchrun starts.

`world.py` has the processes and their communication, `sharding.py` what DDP and FSDP distribute.
"""
