"""Models in GGUF, the format of llama.cpp: one file with the weights and the tokenizer.

llama.cpp has the architectures of GPT-2 and Qwen3. Every tokenizer is written as a byte-level BPE,
so that llama.cpp encodes a prompt as folio does.
"""

import json
import os
from dataclasses import replace

import torch

from folio.checkpoint.format import Checkpoint, build_model
from folio.cli.errors import UserError, as_user_error, import_optional
from folio.data.bpe import byte_characters, load_encoder
from folio.data.tokenizer import Tokenizer
from folio.pretrained.architectures import GPT2, Architecture, Qwen3
from folio.pretrained.huggingface import TOLERANCE, check_logits, make_tensors, refuse_misfits
from model import GPTConfig

TYPES = {"float32": "F32", "float16": "F16", "q8_0": "Q8_0"}  # {here: in the format}
TOLERANCES = {"F32": TOLERANCE, "F16": 1e-2, "Q8_0": 1e-1}  # see check_logits
FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "Q8_0": "MOSTLY_Q8_0"}
Q8_0_BLOCK = 32  # values of a row that share a scale
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"  # the texts only
GPT2_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


def choose_architecture(config: GPTConfig) -> Architecture:
    """Returns the Architecture of a GPT in llama.cpp. Raises UserError if there is none."""
    gpt2 = GPT2()
    gpt2.allowed = {"activation": ("gelu", "gelu_tanh")}  # those that llama.cpp has
    closest = min((gpt2, Qwen3()), key=lambda kind: len(kind.misfits(config)))
    if misfits := closest.misfits(config):
        cause = f"a GGUF file holds GPT-2's or Qwen3's architecture, and not {', '.join(misfits)}"
        advice = "python train.py PRESET config/portable.py trains such a model (docs/share.md)"
        raise UserError(f"{cause}: {advice}")
    return closest


def write_gguf(path, checkpoint: Checkpoint, tokenizer: Tokenizer, end, dtype):
    """Writes the model of a checkpoint and its tokenizer to a file.

    `end` is the id at which llama.cpp ends a text. `dtype`, one of TYPES, is that of the matrices.
    Raises UserError if llama.cpp has no such model or tokenizer, or if transformers computes other
    logits with the architecture or with the weights in the file.
    """
    gguf = import_optional("gguf", "an export to GGUF", "transformers accelerate")
    architecture = choose_architecture(checkpoint.config)
    config = checkpoint.config
    if config.activation == "gelu":  # llama.cpp approximates it
        config = replace(config, activation="gelu_tanh")
    model = build_model(replace(checkpoint, config=config))
    kind = TYPES[dtype]
    writer = gguf.GGUFWriter(path, architecture.model_type)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
    _add_config(writer, architecture, model.config)
    _add_tokenizer(gguf, writer, tokenizer, end)
    with refuse_misfits(architecture):
        _add_tensors(gguf, writer, architecture, model, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    with as_user_error(f"cannot write {path}: the disk is full", OSError):  # from NumPy
        writer.write_tensors_to_file()
    writer.close()
    _check_file(path, architecture, model, TOLERANCES[kind])


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


def _add_tokenizer(gguf, writer, tokenizer, end):
    definition = json.loads(load_encoder(tokenizer.to_definition()).to_str())
    characters, added = byte_characters(), {}
    for token in definition["added_tokens"]:
        kind = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
        added[token["id"]] = token["content"], kind
    tokens, types = [], []
    for token_id in range(tokenizer.vocab_size):
        text = "".join(characters[byte] for byte in tokenizer.token_bytes(token_id))
        token, kind = added.get(token_id, (text, gguf.TokenType.NORMAL))
        tokens.append(token)
        types.append(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    own_tokens = [token for token_id, token in enumerate(tokens) if token_id not in added]
    writer.add_token_merges(_merges(definition) or _merges_of_characters(own_tokens))
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


def _add_tensors(gguf, writer, architecture, model, matrix_kind):
    architecture_id = gguf.MODEL_ARCH[architecture.model_type.upper()]
    names = gguf.get_tensor_name_map(architecture_id, model.config.n_layer)
    for name, tensor in make_tensors(model, architecture).items():
        name_in_file = names.get_name(name, (".weight", ".bias"))
        if not name_in_file:
            raise RuntimeError(f"it has no {name}")
        if name.endswith(architecture.transposed):
            tensor = tensor.T
        kind = matrix_kind
        if tensor.ndim == 1 or kind == "Q8_0" and tensor.shape[1] % Q8_0_BLOCK:
            kind = "F32"
        array = gguf.quants.quantize(tensor.contiguous().numpy(), gguf.GGMLQuantizationType[kind])
        writer.add_tensor(name_in_file, array, raw_dtype=gguf.GGMLQuantizationType[kind])


def _check_file(path, architecture, model, tolerance):
    """Raises UserError unless transformers computes a model's logits with the weights in a file.

    Then rounds the weights of the model to those, and compares the logits more exactly.
    """
    import_optional("accelerate", "an export to GGUF")  # with which transformers reads GGUF
    transformers = import_optional("transformers", "an export to GGUF")
    fields = architecture.to_fields(model.config)
    fields |= {"bos_token_id": None, "eos_token_id": None}  # GPT-2's are beyond small vocabularies
    config = transformers.AutoConfig.for_model(**fields)
    folder, name = os.path.split(path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with refuse_misfits(architecture):
        theirs = load(folder or ".", gguf_file=name, config=config, dtype=torch.float32)
    hint = "; a GGUF file cannot have a changed model.py"
    check_logits(model, theirs, tolerance, hint)
    model.load_state_dict(architecture.from_tensors(theirs.state_dict(), model.config))
    check_logits(model, theirs, TOLERANCE, hint)
