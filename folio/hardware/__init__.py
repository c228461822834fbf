"""Devices and data types, memory, faster kernels, compilation. Start reading in `device.py`."""
