"""What a run needs before its first step: checks of the machine and its memory."""

import pytest
import tiny

from folio.checkpoint.format import empty_model
from folio.training.setup import state_bytes
from model import GPTConfig


@pytest.mark.parametrize("switches", [{}, {"n_layer": 0}, tiny.SWITCHES], ids=str)
def test_weights_gradients_and_moments_are_counted(switches):
    config = GPTConfig(vocab_size=65, **(tiny.SHAPE | {"n_layer": 3} | switches))
    model = empty_model(config)
    count = sum(p.numel() for p in model.parameters())
    matrices = sum(p.numel() for p in model.transformer.h.parameters() if p.dim() == 2)
    assert state_bytes(config, tiny.settings()) == 16 * count
    assert state_bytes(config, tiny.settings(optimizer="muon")) == 16 * count - 4 * matrices
    assert state_bytes(config, tiny.settings(eval_only=True)) == 4 * count
    assert state_bytes(config, tiny.settings(parallel="fsdp"), world_size=4) == 4 * count
