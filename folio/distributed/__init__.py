"""Training one model in several processes, which torchrun starts.

`world.py` has the processes, their communication, and models that DDP and FSDP distribute.
"""
