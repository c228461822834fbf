"""What train.py calls: the state of a run, evaluations, optimizers, log. Start in `run.py`."""
