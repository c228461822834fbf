"""The library of prepare.py, train.py and sample.py, with one subpackage for each concern.

A subpackage imports only from those to its left: cli, model <- hardware <- distributed <- data,
checkpoint <- pretrained, training <- inference <- scripts <- tools.
"""
