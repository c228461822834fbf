"""What a run needs before its first step: checks of the machine and its memory."""

from unittest.mock import Mock, patch

import pytest
import tiny

import train
from folio.checkpoint.format import empty_model
from folio.distributed.world import SINGLE_PROCESS
from folio.training.setup import make_plan, state_bytes
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


def test_all_processes_compile_or_none(verse):
    plan = make_plan(tiny.settings(compile=True))
    for successes in ([True, True], [True, False]):
        plan.world = Mock(wraps=SINGLE_PROCESS, size=1, rank=0, is_launched=False)
        plan.world.gather = Mock(return_value=successes)
        with patch.object(train, "compile_model", return_value="compiled"):
            run = train.make_run(plan)
        assert run.forward == ("compiled" if all(successes) else run.model)
