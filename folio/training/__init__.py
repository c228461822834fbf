"""What train.py calls: setup, time budget, optimizers, distillation, log and trackers.

Start reading in `setup.py`, which reads and checks what a run needs.
"""
