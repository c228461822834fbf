"""The library of prepare.py, train.py and sample.py, with one subpackage for each concern.

A subpackage imports only from those before it, in this order: cli, model.py, hardware, distributed,
data, checkpoint, pretrained, training, inference, the scripts, tools.
"""

__version__ = "0.2.0"
