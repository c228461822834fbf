"""Models in GGUF, the format of llama.cpp: one file with the weights and the tokenizer.

llama.cpp has the architectures of GPT-2 and Qwen3. Every tokenizer is written as a byte-level BPE,
so that llama.cpp encodes a prompt as folio does.
"""

import json
from dataclasses import replace
from pathlib import Path

from folio.checkpoint.format import EMBEDDING_WEIGHT, HEAD_WEIGHT, Checkpoint, build_model
from folio.cli.errors import UserError, import_optional
from folio.cli.files import write_atomically
from folio.data.bpe import byte_characters, load_encoder
from folio.data.tokenizer import Tokenizer
from folio.pretrained.architectures import GPT2, Architecture, Qwen3
from folio.pretrained.huggingface import check_logits, make_tensors

TYPES = {"float32": "F32", "float16": "F16", "q8_0": "Q8_0"}  # {here: in the format}
TOLERANCES = {"float32": 1e-2, "float16": 1e-2, "q8_0": 1e-1}  # see check_logits
Q8_0_BLOCK = 32  # values of a row that share a scale
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"  # the texts only
GPT2_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


class GPT2InLlamaCpp(GPT2):
    """GPT-2 as llama.cpp computes it, with the approximate gelu only."""

    allowed = {"activation": ("gelu", "gelu_tanh")}

    def to_fields(self, config):
        return super().to_fields(config) | {"activation_function": "gelu_new"}


def write_gguf(path, checkpoint: Checkpoint, tokenizer: Tokenizer, end, dtype):
    """Writes the model of a checkpoint and its tokenizer to a file.

    `end` is the id at which llama.cpp ends a text. `dtype`, one of TYPES, is that of the matrices.
    Raises UserError if llama.cpp has no such model or tokenizer, writing fails, or transformers
    computes other logits with the file. No file is written then.
    """
    gguf = import_optional("gguf", "an export to GGUF", "transformers")
    architecture = _choose_architecture(checkpoint.config)
    model = build_model(_without_padding(checkpoint, tokenizer.vocab_size))
    with write_atomically(path) as [file]:
        writer = gguf.GGUFWriter(file.name, architecture.model_type)
        prefix = "ALL" if dtype == "float32" else "MOSTLY"
        writer.add_file_type(gguf.LlamaFileType[f"{prefix}_{TYPES[dtype]}"])
        _add_config(writer, architecture, model.config)
        _add_tokenizer(writer, tokenizer, end)
        _add_tensors(writer, architecture, model, TYPES[dtype])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        check_logits(model, architecture, Path(file.name), TOLERANCES[dtype])


def _choose_architecture(config) -> Architecture:
    """Returns the Architecture of a GPT in llama.cpp. Raises UserError if there is none."""
    kinds = GPT2InLlamaCpp(), Qwen3()
    closest = min(kinds, key=lambda kind: len(kind.misfits(config)))
    if misfits := closest.misfits(config):
        raise UserError(
            f"a GGUF file cannot have {', '.join(misfits)}: train a model without, as by python "
            "train.py config/own_text.py config/portable.py --dataset=NAME (docs/share.md)"
        )
    return closest


def _without_padding(checkpoint, vocab_size):
    """Returns a Checkpoint without the ids that are not tokens."""
    weights = dict(checkpoint.weights)
    for name in (EMBEDDING_WEIGHT, HEAD_WEIGHT):
        weights[name] = weights[name][:vocab_size]
    config = replace(checkpoint.config, vocab_size=vocab_size)
    return replace(checkpoint, config=config, weights=weights)


def _add_config(writer, architecture, config):
    fields = architecture.to_fields(config)
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_head_count(config.n_head)
    if isinstance(architecture, GPT2):
        writer.add_feed_forward_length(4 * config.n_embd)
        writer.add_layer_norm_eps(fields["layer_norm_epsilon"])
    else:
        writer.add_feed_forward_length(fields["intermediate_size"])
        writer.add_head_count_kv(fields["num_key_value_heads"])
        writer.add_key_length(fields["head_dim"])
        writer.add_value_length(fields["head_dim"])
        writer.add_rope_freq_base(fields["rope_parameters"]["rope_theta"])
        writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])


def _add_tokenizer(writer, tokenizer, end):
    from gguf import TokenType

    definition = json.loads(load_encoder(tokenizer.to_definition()).to_str())
    special_tokens = {token["id"]: token["content"] for token in definition["added_tokens"]}
    tokens, types, characters = [], [], byte_characters()
    for token_id in range(tokenizer.vocab_size):
        token = "".join(characters[byte] for byte in tokenizer.token_bytes(token_id))
        tokens.append(special_tokens.get(token_id, token))
        types.append(TokenType.CONTROL if token_id in special_tokens else TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(_merges(definition) or _merges_of_characters(tokens))
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _merges(definition):
    """Returns the merges of a tokenizer.json. Raises UserError if llama.cpp has no such BPE."""
    model = definition["model"]
    splits = (definition["pre_tokenizer"] or {}).items() >= GPT2_SPLIT.items()
    if model["merges"] and (not splits or definition["normalizer"] or model["ignore_merges"]):
        raise UserError("a GGUF file can hold a tokenizer only if it splits words as GPT-2's does")
    return [" ".join(pair) for pair in model["merges"]]


def _merges_of_characters(tokens):
    """Returns merges that join the bytes of each token, for tokenizers without merges.

    Their results need not be tokens. llama.cpp requires at least one; no text has byte 255.
    """
    merges = []
    for token in tokens:
        merges += [f"{token[:size]} {token[size]}" for size in range(1, len(token))]
    return merges or [" ".join(2 * byte_characters()[255])]


def _add_tensors(writer, architecture, model, kind):
    import gguf

    architecture_id = gguf.MODEL_ARCH[architecture.model_type.upper()]
    names = gguf.get_tensor_name_map(architecture_id, model.config.n_layer)
    for name, tensor in make_tensors(model, architecture).items():
        if isinstance(architecture, GPT2) and name.endswith(GPT2.transposed):
            tensor = tensor.T
        values = tensor.contiguous().numpy()
        is_small = values.ndim == 1 or kind == "Q8_0" and values.shape[1] % Q8_0_BLOCK
        value_type = gguf.GGMLQuantizationType["F32" if is_small else kind]
        quantized = gguf.quants.quantize(values, value_type)
        writer.add_tensor(
            names.get_name(name, (".weight", ".bias")), quantized, raw_dtype=value_type
        )
