"""GGUF files, read by transformers and, where it is installed, by llama-cpp-python."""

import json
from itertools import islice
from pathlib import Path

import gguf
import pytest
import tiny
import torch

from folio.checkpoint.format import Checkpoint
from folio.checkpoint.progress import Progress
from folio.cli.errors import UserError
from folio.cli.files import write_atomically
from folio.data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    GPT2Tokenizer,
    ListTokenizer,
)
from folio.pretrained.gguf import TYPES, write_gguf
from folio.pretrained.huggingface import drop_padding
from model import Block

pytestmark = pytest.mark.usefixtures("folder")
PROMPTS = (
    "Über die „Brücke“: don't you'll  (2024) 12,5 …",
    "日本語 and Ελλάδα\n\n\tif x == 1:  \n    return\n",
    "’twas brillig, and the slithy toves ",
)
TEXT = "".join(PROMPTS)
ARCHITECTURES = {
    "gpt2": {"activation": "gelu_tanh"},
    "nanogpt": {"activation": "gelu", "bias": False},
    "qwen3": tiny.QWEN3,
}


def make_tokenizer(kind):
    if kind == "char":
        return CharTokenizer("".join(sorted(set(TEXT))))
    if kind == "bpe":
        return BPETokenizer.from_texts([20 * TEXT], 400)
    return {"byte": ByteTokenizer, "gpt2": GPT2Tokenizer}[kind]()


def write(tokenizer, dtype="float32", **changes):
    """Writes model.gguf with a random model. Returns it."""
    size = {"n_embd": 64, "block_size": 320, "vocab_size": tokenizer.padded_vocab_size}
    model = tiny.random_model(**(size | changes))
    checkpoint = Checkpoint(model.config, model.state_dict(), Progress(), {}, path=Path("ckpt.pt"))
    checkpoint = drop_padding(checkpoint, tokenizer.vocab_size)
    end = tokenizer.end if tokenizer.end is not None else tokenizer.vocab_size - 1
    with write_atomically("model.gguf") as [file]:  # as tools.export does
        write_gguf(file.name, checkpoint, tokenizer, end, dtype)
    return model


def read_fields():
    """Returns the metadata and the types of the tensors in model.gguf."""
    reader = gguf.GGUFReader("model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}


def greedy(model, ids, count, vocab_size):
    """Returns the `count` ids that follow, and by how much each logit exceeds the next one."""
    sequence, margins = torch.tensor([ids]), []
    for _ in range(count):
        logits = model.logits(sequence)[:, -1:, :vocab_size]
        first, second = logits.flatten().topk(2).values
        margins.append((first - second).item())
        sequence = torch.cat((sequence, logits.argmax(-1)), dim=1)
    return sequence[0, len(ids) :].tolist(), margins


@pytest.mark.slow
@pytest.mark.parametrize("changes", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("kind", ["char", "byte", "bpe", "gpt2"])
def test_llama_cpp_encodes_prompts_and_continues_them_like_sample_py(kind, changes, request):
    llama_cpp = pytest.importorskip("llama_cpp")
    if kind == "gpt2":
        request.getfixturevalue("gpt2")
    tokenizer = make_tokenizer(kind)
    model = write(tokenizer, **changes)
    llama = llama_cpp.Llama(
        "model.gguf",
        n_ctx=0,
        n_threads=1,
        verbose=False,
        flash_attn=False,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
    )
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).tolist()
        assert llama.tokenize(prompt.encode(), add_bos=False) == ids
        llama.reset()
        found = list(islice(llama.generate(ids, temp=0, top_k=1, repeat_penalty=1.0), 200))
        expected, margins = greedy(model, ids, 200, tokenizer.vocab_size)
        assert len(found) == 200
        rows = zip(found, expected, margins, strict=True)
        different = next((margin for theirs, ours, margin in rows if theirs != ours), 0)
        assert different < 2e-3  # of logits of about 5: rounding, and the table of gelu


def test_the_ids_of_a_bpe_file_are_the_same_in_transformers():
    from transformers import AutoTokenizer

    tokenizer = make_tokenizer("bpe")
    write(tokenizer, **tiny.QWEN3)
    theirs = AutoTokenizer.from_pretrained(".", gguf_file="model.gguf")
    for prompt in PROMPTS:
        assert theirs(prompt)["input_ids"] == tokenizer.encode(prompt).tolist()


def test_characters_are_joined_from_their_bytes():
    write(CharTokenizer("a\u00e9\u65e5 "), **tiny.QWEN3)
    fields, _ = read_fields()
    assert fields["tokenizer.ggml.tokens"] == ["a", "\u00c3\u00a9", "\u00e6\u0139\u00a5", "\u0120"]
    merges = ["\u00c3 \u00a9", "\u00e6 \u0139", "\u00e6\u0139 \u00a5"]
    assert fields["tokenizer.ggml.merges"] == merges
    assert (fields["tokenizer.ggml.eos_token_id"], fields["qwen3.context_length"]) == (3, 320)


@pytest.mark.parametrize("changes", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_types_of_tensors(changes):
    sizes = []
    for dtype, name in TYPES.items():
        write(make_tokenizer("byte"), dtype, n_embd=48 if dtype == "float16" else 64, **changes)
        _, types = read_fields()
        assert types["blk.0.ffn_norm.weight"] == "F32"
        assert types["blk.1.ffn_down.weight"] == types["token_embd.weight"] == name
        sizes.append(Path("model.gguf").stat().st_size)
    assert sizes[0] > sizes[1] > sizes[2]


def split_otherwise():
    """Returns a BPE tokenizer that does not split a text into words."""
    definition = json.loads(make_tokenizer("bpe").definition)
    definition["pre_tokenizer"]["use_regex"] = False
    return BPETokenizer(json.dumps(definition))


@pytest.mark.parametrize(
    ("tokenizer", "changes", "words"),
    [
        (
            make_tokenizer("byte"),
            tiny.SWITCHES,
            "smear=2, ngrams=3, window=3: .*config/portable.py",
        ),
        (make_tokenizer("byte"), {"activation": "relu2"}, "activation=relu2"),
        (ListTokenizer(["ab", "c"]), tiny.QWEN3, "kind list"),
        (split_otherwise(), tiny.QWEN3, "splits words"),
    ],
    ids=["own", "relu2", "list", "split"],
)
def test_what_the_format_cannot_hold_is_refused(tokenizer, changes, words):
    with pytest.raises(UserError, match=f"^[^\n]*{words}[^\n]*$"):
        write(tokenizer, **changes)
    assert not list(Path().iterdir())


@pytest.mark.parametrize("changes", [{}, tiny.QWEN3], ids=["gpt2", "qwen3"])
def test_a_changed_model_is_refused(changes, monkeypatch):
    monkeypatch.setattr(Block, "forward", tiny.post_norm)
    with pytest.raises(
        UserError, match="other logits than model.py.*cannot have a changed model.py"
    ):
        write(make_tokenizer("byte"), **changes)
    assert not list(Path().iterdir())


def test_a_small_change_is_found_with_rounded_weights(monkeypatch):
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda block, x, *rest: forward(block, x, *rest) + x / 50)
    with pytest.raises(UserError, match="relative difference of 0.00.*changed model.py"):
        write(make_tokenizer("byte"), "q8_0")


def test_wrong_weights_in_the_file_are_found(monkeypatch):
    quantize = gguf.quants.quantize
    monkeypatch.setattr(gguf.quants, "quantize", lambda data, kind: quantize(1.01 * data, kind))
    with pytest.raises(UserError, match="other logits than model.py"):
        write(make_tokenizer("byte"))


def test_added_tokens_keep_their_kind():
    tokenizer = make_tokenizer("bpe")
    definition, size = json.loads(tokenizer.definition), tokenizer.vocab_size
    token = definition["added_tokens"][0]
    definition["added_tokens"].append(token | {"id": size, "content": "<b>", "special": False})
    write(BPETokenizer(json.dumps(definition)), **tiny.QWEN3)
    fields, _ = read_fields()
    types = fields["tokenizer.ggml.token_type"]
    assert (types[0], types[1], types[size]) == (3, 1, 4)  # control, normal, user defined
    assert fields["tokenizer.ggml.tokens"][size] == "<b>"
