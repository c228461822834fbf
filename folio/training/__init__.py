"""What train.py calls: plan and state of a run, optimizers, distillation, log.

Start reading in `setup.py`, which reads and checks what a run needs.
"""
