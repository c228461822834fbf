"""What train.py calls: setup, optimizers, schedules, distillation, and reports of a run.

Start reading in `setup.py`, which reads and checks everything that a run needs.
"""
