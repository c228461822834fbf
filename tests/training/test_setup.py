"""What a run needs before its first step: checks of the machine and its memory."""

import pytest
import tiny

from folio.checkpoint.format import empty_model
from folio.cli.errors import UserError
from folio.distributed.world import SINGLE_PROCESS
from folio.training import setup
from model import GPTConfig


def test_weights_gradients_and_moments_that_exceed_the_memory_are_refused(monkeypatch):
    model = empty_model(GPTConfig(vocab_size=65, **tiny.SHAPE), "meta")
    count = model.num_params()
    monkeypatch.setattr(setup, "memory_bytes", lambda device: 16 * count)
    setup.check_memory(model, tiny.settings(), SINGLE_PROCESS)
    monkeypatch.setattr(setup, "memory_bytes", lambda device: 16 * count - 1)
    setup.check_memory(model, tiny.settings(optimizer="muon"), SINGLE_PROCESS)  # one moment less
    setup.check_memory(model, tiny.settings(eval_only=True), SINGLE_PROCESS)
    with pytest.raises(UserError, match="the model needs more than"):
        setup.check_memory(model, tiny.settings(), SINGLE_PROCESS)
