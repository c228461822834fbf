"""Settings of hypothesis and torch for all tests, and shared fixtures."""

import os
import signal
import sys
import threading
from unittest.mock import Mock

# Tests run in parallel, and some start processes. Tiny tensors need only one thread.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import tiktoken
import tiny
import torch
from fake_hub import Hub
from hypothesis import settings

from folio.data import dataset
from folio.data.dataset import Dataset, load_dataset
from folio.data.tokenizer import END_OF_TEXT, CharTokenizer, GPT2Tokenizer
from folio.hardware.device import set_up_machine
from folio.inference.trained_model import TrainedModel

# the same examples in every run; no time limit, for loaded machines
settings.register_profile("folio", derandomize=True, deadline=None, database=None, max_examples=30)
settings.load_profile("folio")
SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


@pytest.fixture(scope="session", autouse=True)
def _modules_cache(tmp_path_factory):
    """transformers copies the code of models to a folder, which it reads when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _default_handlers():
    """Tests send signals that may be ignored: SIGHUP by nohup, SIGINT in a background job."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _global_settings(request):
    """Resets signal handlers, and the settings of torch that affect rounding."""
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.enable_cudnn_sdp(True)
    if "torch._dynamo" in sys.modules:  # slow to import
        torch.compiler.set_stance("default")
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


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
def limit_files():
    """A function that limits the size of files in bytes, so that writes fail; -1: no limit."""
    resource = pytest.importorskip("resource")  # which Windows lacks
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def hub():
    """A local server that behaves like the Hugging Face hub."""
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def gpt2():
    """GPT-2's tokenizer. Skips the test if tiktoken's files are not available offline."""
    if not os.environ.get("TIKTOKEN_CACHE_DIR"):
        pytest.skip("TIKTOKEN_CACHE_DIR is not set to a folder with tiktoken's files")
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
    monkeypatch.setattr(GPT2Tokenizer, "vocab_size", 257)
    monkeypatch.setattr(GPT2Tokenizer, "padded_vocab_size", 320)
    monkeypatch.setattr(GPT2Tokenizer, "end", 256)
    return GPT2Tokenizer()


@pytest.fixture
def trained():
    """A model with random weights and a vocabulary of 37 characters."""
    tokenizer = CharTokenizer("abcdefghijklmnopqrstuvwxyz0123456789 ")
    machine = set_up_machine("cpu", "float32", False)
    return TrainedModel(tiny.random_model(), tokenizer, machine)


@pytest.fixture
def text_size(monkeypatch):
    """A function that sets the size of every dataset. Default: that of tiny Shakespeare."""

    def set_size(tokens=1_003_854, vocab_size=65, num_bytes=None, val_tokens=None):
        splits = range(tokens), range(val_tokens or tokens // 9)
        tokenizer = Mock(vocab_size=vocab_size)
        data = Dataset("sized", *splits, tokenizer, {}, num_bytes or tokens)
        monkeypatch.setattr(dataset, "load_dataset", lambda name: data)

    set_size()
    return set_size
