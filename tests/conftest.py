"""Shared fixtures: hypothesis settings, a small dataset, and GPT-2's tokenizer."""

import os
import signal

import pytest
import tiktoken
import tiny
import torch
from hypothesis import settings

from folio.dataset import load_dataset
from folio.tokenizers import END_OF_TEXT, GPT2Tokenizer

# the same examples in every run; no time limit, for loaded machines
settings.register_profile("folio", derandomize=True, deadline=None, database=None)
settings.load_profile("folio")

torch.set_num_threads(1)  # tiny tensors are slower with more threads on a loaded machine


@pytest.fixture(scope="session", autouse=True)
def _sigint():
    """Tests send SIGINT, which is ignored in a background job of a shell without job control."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def verse(folder):
    """A dataset of a few verses, prepared in `folder`."""
    tiny.prepare_verse()
    return load_dataset("verse")


@pytest.fixture
def gpt2():
    """GPT-2's tokenizer; skips the test where tiktoken's files are not at hand."""
    if not os.environ.get("TIKTOKEN_CACHE_DIR"):
        pytest.skip("TIKTOKEN_CACHE_DIR names no folder with tiktoken's files")
    return GPT2Tokenizer()


@pytest.fixture
def gpt2_of_bytes(monkeypatch):
    """GPT2Tokenizer over a vocabulary without merges: ids are bytes, and 256 is END_OF_TEXT."""
    encoding = tiktoken.Encoding(
        "bytes",
        pat_str=r"[\s\S]",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={END_OF_TEXT: 256},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": encoding}.__getitem__)
    return GPT2Tokenizer()
