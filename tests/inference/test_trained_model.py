"""Tests of folio/inference/trained_model.py: the tokenizers of nanoGPT's checkpoints."""

import pytest
import tiny
import torch

from folio.checkpoint.run_dir import RunDir
from folio.cli.errors import UserError
from folio.inference.trained_model import load_trained


def test_nanogpts_checkpoint_uses_the_tokenizer_of_its_dataset(folder):
    size = tiny.write_nanogpt_dataset("nano")
    model = tiny.write_nanogpt_checkpoint(size, dataset="nano").eval()
    trained = load_trained(RunDir("out").load_best())
    ids = torch.from_numpy(trained.tokenizer.encode("Shall I").astype("int64"))[None]
    assert torch.allclose(trained.model.logits(ids), model.logits(ids), atol=1e-5)


def test_nanogpts_checkpoint_without_its_dataset_is_a_user_error(folder):
    tiny.write_nanogpt_checkpoint(65, dataset="nowhere")
    with pytest.raises(UserError, match=r"of 65, .*50,257 .*copy the meta.pkl .* to data/nowhere"):
        load_trained(RunDir("out").load_best())
