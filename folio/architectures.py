"""Architectures of transformers that compute the same function as some GPTs here.

Tables translate the fields of config.json and the names of parameters in both directions. The
facts are those of transformers 5: GPT2LMHeadModel, Starcoder2ForCausalLM and ArceeForCausalLM.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from folio.errors import UserError
from model import GPT, GPTConfig

HEAD = "lm_head.weight"
SWITCHES = ["position", "norm", "activation", "qk_norm", "smear", "ngrams", "window"]
MATRICES = ("c_attn.weight", "c_fc.weight", "c_proj.weight")
ACTIVATIONS = {  # transformers' names: names here
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
ROTARY = {
    "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
    "rope_theta": 10_000.0,  # both of these before transformers 5
    "rope_scaling": None,
}


@dataclass(frozen=True)
class Architecture:
    """An architecture of transformers, and the GPTConfigs that it can express."""

    model_type: str
    class_name: str
    base: str  # prefix of the names of all parameters except the head
    settings: dict  # fields of GPTConfig that it has: their names in config.json
    fixed: dict  # values of other fields of GPTConfig; the rest must have their defaults
    constants: Callable  # GPTConfig -> fields of config.json that it must have, if any
    defaults: dict  # values of fields that config.json lacks
    names: dict  # parts of names of parameters here: parts there; * stands for q, k and v
    biases: tuple  # endings of biases that exist there even without `bias`
    transposed: bool = False  # whether it stores the matrices of blocks transposed
    others: Callable = lambda config: {}  # GPTConfig -> further fields to write

    def parts(self, name):
        """Returns the names there of the tensors that make up a parameter here."""
        for ours, theirs in self.names.items():
            name = name.replace(ours, theirs)
        return [name.replace("*", part) for part in "qkv"] if "*" in name else [name]


GPT2 = Architecture(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    base="transformer.",
    settings={
        "block_size": "n_positions",
        "vocab_size": "vocab_size",
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
        "bias": "bias",  # not a field of transformers, which keeps it but always has biases
        "activation": "activation_function",
        "tie_weights": "tie_word_embeddings",
    },
    fixed={"position": "learned", "norm": "layernorm"},
    constants=lambda config: {
        "n_inner": 4 * config.n_embd,
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    defaults={"bias": True, "activation_function": "gelu_new", "tie_word_embeddings": True},
    names={},
    biases=(".bias",),
    transposed=True,
    others=lambda config: {  # n_ctx is llama.cpp's; dropout is 0.1 by default
        "n_ctx": config.block_size,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    },
)
STARCODER2 = Architecture(
    model_type="starcoder2",
    class_name="Starcoder2ForCausalLM",
    base="model.",
    settings={
        "block_size": "max_position_embeddings",
        "vocab_size": "vocab_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_embd": "hidden_size",
        "bias": "use_bias",
        "activation": "hidden_act",
        "tie_weights": "tie_word_embeddings",
        "window": "sliding_window",
    },
    fixed={"position": "rotary", "norm": "layernorm"},
    constants=lambda config: {
        "num_key_value_heads": config.n_head,
        "intermediate_size": 4 * config.n_embd,
        "norm_epsilon": 1e-5,
        **ROTARY,
    },
    defaults={
        "use_bias": True,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 0,
    },
    names={
        "transformer.wte": "model.embed_tokens",
        "transformer.ln_f": "model.norm",
        "transformer.h": "model.layers",
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.c_attn": "self_attn.*_proj",
        "attn.c_proj": "self_attn.o_proj",
    },
    biases=("ln_1.bias", "ln_2.bias", "ln_f.bias"),
)
ARCEE = Architecture(
    model_type="arcee",
    class_name="ArceeForCausalLM",
    base="model.",
    settings={
        **{name: key for name, key in STARCODER2.settings.items() if name != "window"},
        "bias": "attention_bias",
    },
    fixed={"position": "rotary", "norm": "rmsnorm"},
    constants=lambda config: {
        "num_key_value_heads": config.n_head,
        "intermediate_size": 4 * config.n_embd,
        "head_dim": config.n_embd // config.n_head,
        "mlp_bias": config.bias,
        "rms_norm_eps": torch.finfo(torch.float32).eps,  # torch's default
        **ROTARY,
    },
    defaults={
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "relu2",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
    },
    names=STARCODER2.names | {"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"},
    biases=(),
)
ARCHITECTURES = {each.model_type: each for each in (GPT2, STARCODER2, ARCEE)}


def architecture_for(config):
    """Returns the first Architecture that has all switches of a GPTConfig, or raises UserError."""
    for architecture in ARCHITECTURES.values():
        required = vars(GPTConfig()) | architecture.fixed
        free = {*architecture.settings, "dropout"}
        if config.activation not in ACTIVATIONS.values():
            free -= {"activation"}
        if all(getattr(config, name) == required[name] for name in required.keys() - free):
            return architecture
    changed = {f.name for f in fields(config) if getattr(config, f.name) != f.default}
    known = {"activation"} if config.activation in ACTIVATIONS.values() else set()
    names = [name for name in SWITCHES if name in {"position", "norm"} | changed - known]
    switches = ", ".join(f"{name}={getattr(config, name)}" for name in names)
    raise UserError(f"no architecture for export has {switches} together")


def to_fields(architecture, config):
    """Returns the fields of config.json for a GPTConfig."""
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    values = {key: getattr(config, name) for name, key in architecture.settings.items()}
    values[architecture.settings["activation"]] = names[config.activation]
    if "window" in architecture.settings:
        values[architecture.settings["window"]] = config.window or None
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        **values,
        **architecture.constants(config),
        **architecture.others(config),
    }


def from_fields(values):
    """Returns the Architecture and the GPTConfig of config.json; dropout is 0.

    Raises UserError for a field without which the model would compute another function.
    """
    architecture = ARCHITECTURES.get(str(kind := values.get("model_type")))
    if not architecture:
        raise UserError(f"model_type is {kind!r:.100}; folio reads {', '.join(ARCHITECTURES)}")
    values = architecture.defaults | {k: v for k, v in values.items() if v is not None}
    found = {name: values.get(key) for name, key in architecture.settings.items()}
    found["activation"] = ACTIVATIONS.get(str(found["activation"]))
    for name, value in found.items():
        if type(value) is not type(getattr(GPTConfig(), name)):
            key = architecture.settings[name]
            raise UserError(f"{key}={values.get(key)!r:.100} is missing or not supported")
    try:
        config = GPTConfig(**found, **architecture.fixed)
    except ValueError as error:
        raise UserError(str(error)) from error
    for key, value in architecture.constants(config).items():
        if values.get(key, value) != value:
            raise UserError(f"{key}={values[key]!r:.100} is not supported, only {value!r}")
    return architecture, config


@dataclass(frozen=True)
class Parameter:
    """A parameter here and the tensors that it is there, of equal shape, stacked by rows."""

    name: str
    shape: tuple
    parts: list  # names there
    part_shape: tuple
    transposed: bool

    def join(self, tensors):
        """Returns the parameter, contiguous float32; a copy unless it is a part as it is."""
        if tensors[0].dtype == torch.float32 and len(tensors) == 1 and not self.transposed:
            return tensors[0]
        joined = torch.empty(self.shape)
        for target, part in zip(joined.chunk(len(tensors)), tensors, strict=True):
            target.copy_(part.t() if self.transposed else part)
        return joined

    def split(self, tensor):
        """Returns {name: view} of the parts, given the parameter."""
        tensors = tensor.chunk(len(self.parts))
        tensors = [each.t() for each in tensors] if self.transposed else tensors
        return dict(zip(self.parts, tensors, strict=True))


def parameters(architecture, config):
    """Yields the Parameter of each tensor in a file, including biases that `config` lacks."""
    with torch.device("meta"):
        tensors = GPT(replace(config, bias=True)).state_dict()
    for name, tensor in tensors.items():
        absent = name.endswith(".bias") and not name.endswith(architecture.biases)
        if (absent and not config.bias) or (name == HEAD and config.tie_weights):
            continue
        parts, shape = architecture.parts(name), tuple(tensor.shape)
        transposed = architecture.transposed and name.endswith(MATRICES)
        part_shape = shape[::-1] if transposed else (shape[0] // len(parts), *shape[1:])
        yield Parameter(name, shape, parts, part_shape, transposed)
