"""What train.py calls: inputs and state of a run, evaluations, optimizers, distillation, log.

Start reading in `run.py`, which has the state that steps change.
"""
