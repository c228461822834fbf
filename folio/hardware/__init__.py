"""What the machine can do: devices and data types, memory, faster kernels, compilation.

Start reading in `device.py`, which decides what `auto` means.
"""
