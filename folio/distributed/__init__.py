"""Training one model in several processes, which torchrun starts. All of it is in `world.py`."""
