"""Generate text with another engine on a CPU, for a comparison with sample.py.

    python -m tools.export --out_dir=out --to=out-hf
    python -m tools.bench.engines --engine=onnxruntime --model=out-hf
    python -m tools.bench --script=sample \
        --vs="python -m tools.bench.engines --engine=transformers --model=out-hf" -- --out_dir=out

Every engine draws from all tokens at a temperature of 0.8, and reads the newer half of a full
context again, as sample.py does. The time excludes loading and a warmup of eight tokens.
"""

import json
import re
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np

from folio.cli import process
from folio.cli.errors import UserError
from folio.cli.settings import load_settings, setting

TEMPERATURE = 0.8
PACKAGES = {  # of each engine
    "transformers": "transformers",
    "ctranslate2": "ctranslate2 transformers",
    "onnxruntime": "onnxruntime onnx",
    "llama.cpp": "llama-cpp-python gguf",
}


@dataclass(frozen=True)
class EngineConfig:
    """Measure how fast another engine generates text with a model in GPT-2's format."""

    engine: Literal[*PACKAGES] = setting("transformers", "what computes")
    model: str = setting("out-hf", "folder that tools.export has written")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "data type of the weights")
    num_samples: int = setting(10, "texts", "[1, inf)")
    max_new_tokens: int = setting(500, "tokens of each text", "[1, inf)")
    greedy: bool = setting(False, "print the ids of the most likely tokens instead")


# The same variable as in sample.py, for engines that use torch's threads.
process.start(__name__, EngineConfig, GOMP_SPINCOUNT="10000")

import torch


def main(argv=None):
    settings = load_settings(EngineConfig, argv)
    path = Path(settings.model, "config.json")
    if not path.is_file():
        raise UserError(f"there is no {path}: write it with python -m tools.export")
    shape = json.loads(path.read_text())
    packages = PACKAGES[settings.engine]
    modules = packages.replace("llama-cpp-python", "llama_cpp").split()
    if not all(map(find_spec, modules)):
        raise UserError(f"--engine={settings.engine} needs: pip install {packages}")
    make = {
        "transformers": make_transformers,
        "ctranslate2": make_ctranslate2,
        "onnxruntime": make_onnxruntime,
        "llama.cpp": make_llama,
    }[settings.engine]
    generate = make(settings, shape)
    ids = np.zeros((settings.num_samples, 1), np.int64)
    generate(ids, 8)  # a warmup
    start = time.monotonic()
    context, new = shape["n_positions"], []
    while (left := settings.max_new_tokens - sum(part.shape[1] for part in new)) > 0:
        if ids.shape[1] > context:
            ids = ids[:, -(context // 2 + 1) :]
        new.append(generate(ids, min(left, context + 1 - ids.shape[1])))
        ids = np.concatenate((ids, new[-1]), axis=1)
    seconds, count = time.monotonic() - start, settings.num_samples * settings.max_new_tokens
    if settings.greedy:
        print(np.concatenate(new, axis=1).tolist())
    print(f"{count:,} tokens in {seconds:.2f} s, {count / seconds:,.0f} tokens/s")


# Each function returns generate(ids, count): (B, T) int64 -> the next ids, (B, count) int64.


def make_transformers(settings, shape):
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, settings.dtype)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype)
    options = {"eos_token_id": None, "pad_token_id": 0, "do_sample": not settings.greedy}
    if not settings.greedy:
        options |= {"top_k": 0, "temperature": TEMPERATURE}

    def generate(ids, count):
        prompt = torch.from_numpy(np.ascontiguousarray(ids))
        mask = torch.ones_like(prompt)
        result = model.generate(prompt, attention_mask=mask, max_new_tokens=count, **options)
        return result[:, ids.shape[1] :].numpy()

    return generate


def make_ctranslate2(settings, shape):
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "model")
        TransformersConverter(settings.model).convert(str(folder))
        config = json.loads((folder / "config.json").read_text())
        for name in ("bos_token", "eos_token", "unk_token"):
            config[name] = config.get(name) or "<none>"  # characters have none, but it needs some
        (folder / "config.json").write_text(json.dumps(config))
        vocabulary = json.loads((folder / "vocabulary.json").read_text())
        threads = {"inter_threads": 1, "intra_threads": torch.get_num_threads()}
        model = ctranslate2.Generator(str(folder), compute_type=settings.dtype, **threads)
    numbers = {token: number for number, token in enumerate(vocabulary)}
    sampling = {}
    if not settings.greedy:
        sampling = {"sampling_topk": 0, "sampling_temperature": TEMPERATURE}

    def generate(ids, count):
        prompts = [[vocabulary[token] for token in row] for row in ids]
        lengths = {"max_length": count, "min_length": count, "include_prompt_in_result": False}
        results = model.generate_batch(prompts, **lengths, **sampling)
        return np.array([[numbers[token] for token in row.sequences[0]] for row in results])

    return generate


def make_onnxruntime(settings, shape):
    """A graph of one step whose attention writes to a KV cache in place."""
    import onnxruntime

    if settings.dtype != "float32":
        raise UserError("--engine=onnxruntime computes in float32 here")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(make_graph(settings.model, shape), options)
    draw, width = make_draw(settings.greedy), shape["n_embd"] // shape["n_head"]

    def generate(ids, count):
        binding, batch = session.io_binding(), len(ids)
        cache = batch, shape["n_head"], shape["n_positions"], width
        for layer in range(shape["n_layer"]):
            for part in ("key", "value"):
                value = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(cache, np.float32))
                binding.bind_ortvalue_input(f"past_{part}_{layer}", value)
                binding.bind_ortvalue_output(f"present_{part}_{layer}", value)
        logits = np.zeros((batch, shape["vocab_size"]), np.float32)
        logits = onnxruntime.OrtValue.ortvalue_from_numpy(logits)
        binding.bind_ortvalue_output("logits", logits)
        new, position, result = ids, 0, []
        for _ in range(count):
            end = position + new.shape[1]
            binding.bind_cpu_input("input_ids", np.ascontiguousarray(new))
            binding.bind_cpu_input("positions", np.arange(position, end))
            binding.bind_cpu_input("seqlens_k", np.full(batch, end - 1, np.int32))
            binding.bind_cpu_input("total_length", np.array(end, np.int32))
            session.run_with_iobinding(binding)
            new, position = draw(logits.numpy()), end
            result.append(new)
        return np.concatenate(result, axis=1)

    return generate


def make_graph(folder, shape):
    """Returns an ONNX model of GPT-2, serialized: (B, T) ids -> (B, V) logits of the next token."""
    from onnx import TensorProto, helper, numpy_helper
    from safetensors.numpy import load_file

    weights = load_file(Path(folder, "model.safetensors"))
    C, H, V = shape["n_embd"], shape["n_head"], shape["vocab_size"]
    nodes, constants, int32 = [], [], TensorProto.INT32
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "T"]),
        helper.make_tensor_value_info("positions", TensorProto.INT64, ["T"]),
        helper.make_tensor_value_info("seqlens_k", int32, ["B"]),
        helper.make_tensor_value_info("total_length", int32, []),
    ]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", V])]

    def add(kind, *names, outputs=None, **attributes):
        outputs = outputs or [f"{kind}_{len(nodes)}"]
        nodes.append(helper.make_node(kind, list(names), outputs, **attributes))
        return outputs[0]

    def constant(name, array=None):
        array = weights[f"transformer.{name}"] if array is None else array
        constants.append(numpy_helper.from_array(np.asarray(array, order="C"), name))
        return name

    def linear(x, name):
        return add("Add", add("MatMul", x, constant(f"{name}.weight")), constant(f"{name}.bias"))

    def norm(x, name):
        parts = constant(f"{name}.weight"), constant(f"{name}.bias")
        return add("LayerNormalization", x, *parts, epsilon=1e-5)

    tokens = add("Gather", constant("wte.weight"), "input_ids")
    x = add("Add", tokens, add("Gather", constant("wpe.weight"), "positions"))
    for layer in range(shape["n_layer"]):
        for part in ("key", "value"):
            cache = TensorProto.FLOAT, ["B", H, "S", C // H]
            inputs.append(helper.make_tensor_value_info(f"past_{part}_{layer}", *cache))
            outputs.append(helper.make_tensor_value_info(f"present_{part}_{layer}", *cache))
        qkv = linear(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn")
        past = [f"past_{part}_{layer}" for part in ("key", "value")]
        present = [f"present_{part}_{layer}" for part in ("key", "value")]
        y = add(
            "GroupQueryAttention", qkv, "", "", *past, "seqlens_k", "total_length",
            outputs=[f"attention_{layer}", *present], domain="com.microsoft",
            num_heads=H, kv_num_heads=H,
        )  # fmt: skip
        x = add("Add", x, linear(y, f"h.{layer}.attn.c_proj"))
        y = add(
            "Gelu", linear(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc"), approximate="tanh"
        )
        x = add("Add", x, linear(y, f"h.{layer}.mlp.c_proj"))
    last = add("Gather", x, constant("last", np.array(-1)), axis=1)
    head = constant("head", weights["transformer.wte.weight"].T)
    add("MatMul", norm(last, "ln_f"), head, outputs=["logits"])
    graph = helper.make_graph(nodes, "gpt2", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def make_llama(settings, shape):
    import llama_cpp

    texts, context = settings.num_samples, shape["n_positions"]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "model.gguf"))
        write_gguf(path, settings, shape)
        options = llama_cpp.llama_model_default_params()
        options.use_mmap = False  # the file is deleted
        model = llama_cpp.llama_model_load_from_file(path.encode(), options)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = context * texts
    options.n_seq_max, options.kv_unified = texts, False
    options.n_threads = options.n_threads_batch = torch.get_num_threads()
    state = llama_cpp.llama_init_from_model(model, options)
    batch = llama_cpp.llama_batch_init(context * texts, 0, 1)
    draw = make_draw(settings.greedy)

    def step(ids, position):
        """Processes ids, (B, T), from a position on; returns logits of the next ids, (B, V)."""
        batch.n_tokens = ids.size
        last = []
        for index, (row, column) in enumerate(np.ndindex(ids.shape)):
            batch.token[index], batch.pos[index] = int(ids[row, column]), position + column
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
            batch.logits[index] = column == ids.shape[1] - 1
            if batch.logits[index]:
                last.append(index)
        if llama_cpp.llama_decode(state, batch):
            raise UserError("llama.cpp cannot process the text")
        logits = [llama_cpp.llama_get_logits_ith(state, index) for index in last]
        return np.stack([np.ctypeslib.as_array(row, (shape["vocab_size"],)) for row in logits])

    def generate(ids, count):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(state), True)
        new, position, result = ids, 0, []
        for _ in range(count):
            logits, position = step(new, position), position + new.shape[1]
            new = draw(logits)
            result.append(new)
        return np.concatenate(result, axis=1)

    return generate


def write_gguf(path, settings, shape):
    """Writes a model without a vocabulary in the format of llama.cpp."""
    import gguf
    from safetensors.numpy import load_file

    weights = load_file(Path(settings.model, "model.safetensors"))
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_block_count(shape["n_layer"])
    writer.add_context_length(shape["n_positions"])
    writer.add_embedding_length(shape["n_embd"])
    writer.add_feed_forward_length(4 * shape["n_embd"])
    writer.add_head_count(shape["n_head"])
    writer.add_layer_norm_eps(1e-5)
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("none")
    names = {
        "wte": "token_embd",
        "wpe": "position_embd",
        "ln_f": "output_norm",
        "ln_1": "attn_norm",
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "ln_2": "ffn_norm",
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    }
    kinds = gguf.GGMLQuantizationType
    for name, array in weights.items():
        match = re.fullmatch(r"transformer\.(?:h\.(\d+)\.)?(.+)\.(weight|bias)", name)
        if not match:  # the tied head
            continue
        layer, module, part = match.groups()
        target = f"blk.{layer}.{names[module]}.{part}" if layer else f"{names[module]}.{part}"
        kind = kinds.F32
        if array.ndim == 2 and module != "wpe":
            array = array.T if layer else array  # (in, out) in GPT2LMHeadModel
            kind = kinds.BF16 if settings.dtype == "bfloat16" else kinds.F32
        array = np.ascontiguousarray(array, np.float32)
        writer.add_tensor(target, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_draw(greedy):
    """Returns draw(logits): (B, V) -> (B, 1) ids."""
    random = np.random.default_rng(0)

    def draw(logits):
        if greedy:
            return logits.argmax(axis=1, keepdims=True)
        scores = logits / TEMPERATURE
        sums = np.exp(scores - scores.max(axis=1, keepdims=True)).cumsum(axis=1)
        targets = random.random((len(sums), 1)) * sums[:, -1:]
        return (sums <= targets).sum(axis=1, keepdims=True)

    return draw


if __name__ == "__main__":
    process.run(main)
