"""The classes of transformers that a GPT can be written as and read from.

GPT2LMHeadModel and Qwen3ForCausalLM compute the same function as some GPTs. FolioForCausalLM is any
GPT: its folder has the model's code, which transformers executes and folio does not.
"""

from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path

import torch

import model
from folio.checkpoint.format import HEAD_WEIGHT
from model import GPTConfig, swiglu_widths

DEFAULTS = asdict(GPTConfig())
WITHOUT_EFFECT = ("dropout", "ngram_rows")  # on the logits of a GPT without ngrams


class Architecture(ABC):
    """A class of transformers.

    model_type: its name in config.json.
    names: {field of GPTConfig: its name in config.json}.
    allowed: {field of GPTConfig: values that a model of the class can have}. A field that is
        neither here nor in `names` must have its default.
    transposed: ends of the names of matrices that are transposed.
    """

    model_type: str
    class_name: str
    names: dict[str, str]
    allowed: dict[str, tuple] = {}
    transposed: tuple[str, ...] = ()

    def misfits(self, config: GPTConfig):
        """Returns the switches of a GPT that the class does not have, such as ["window=64"]."""
        found = []
        for name, value in asdict(config).items():
            if name in self.allowed:
                fits = value in self.allowed[name]
            else:
                fits = name in self.names or name in WITHOUT_EFFECT or value == DEFAULTS[name]
            if not fits:
                found.append(f"{name}={value}")
        return found

    def to_fields(self, config: GPTConfig):
        """Returns the content of config.json."""
        own = {"architectures": [self.class_name], "model_type": self.model_type}
        own |= {name: getattr(config, field) for field, name in self.names.items()}
        return own | self.fixed_fields(config)

    def from_fields(self, values) -> GPTConfig:
        """Returns the GPTConfig for the content of a config.json. Raises ValueError."""
        fields = {field: allowed[0] for field, allowed in self.allowed.items()}
        # GPT-2's default of a missing field is also that of GPTConfig.
        fields |= {field: values[name] for field, name in self.names.items() if name in values}
        config = GPTConfig(**fields)
        for name, value in self.fixed_fields(config).items():
            if values.get(name, value) != value:
                raise ValueError(f"{name}={values[name]!r}, not {value!r}")
        return config

    def fixed_fields(self, config: GPTConfig):
        """Returns the fields of config.json that follow from the others."""
        return {}

    @abstractmethod
    def to_tensors(self, weights, config: GPTConfig):
        """Returns the tensors of model.safetensors for GPT.state_dict()."""

    @abstractmethod
    def from_tensors(self, tensors, config: GPTConfig):
        """Returns GPT.state_dict() for the tensors of a file. Unknown tensors keep their names."""


class GPT2(Architecture):
    """OpenAI's GPT-2. A GPT without biases has zeros there."""

    model_type, class_name = "gpt2", "GPT2LMHeadModel"
    names = {
        "block_size": "n_positions",
        "vocab_size": "vocab_size",
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
        "bias": "bias",  # GPT2Config keeps it, although GPT2LMHeadModel always has biases
        "activation": "activation_function",
        "tie_weights": "tie_word_embeddings",
    }
    allowed = {"activation": ("gelu", "gelu_tanh", "relu", "relu2")}
    tanh_names = "gelu_new", "gelu_pytorch_tanh"  # here gelu_tanh; other names are the same
    transposed = "c_attn.weight", "c_fc.weight", "c_proj.weight"
    masks = ".attn.bias", ".attn.masked_bias"  # constant tensors in older files

    def to_fields(self, config):
        fields = super().to_fields(config) | {"n_ctx": config.block_size}  # for older programs
        if config.activation == "gelu_tanh":
            fields["activation_function"] = "gelu_new"
        return fields | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)  # not 0.1

    def from_fields(self, values):
        if values.get("activation_function", "gelu_new") in self.tanh_names:
            values = values | {"activation_function": "gelu_tanh"}
        return super().from_fields(values)

    def fixed_fields(self, config):
        return {
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        }

    def to_tensors(self, weights, config):
        tensors = dict(weights)
        for name, weight in weights.items():
            if name.startswith(("transformer.h.", "transformer.ln_f.")):
                tensors.setdefault(name.replace(".weight", ".bias"), torch.zeros(len(weight)))
            if name.endswith(self.transposed):
                tensors[name] = weight.T.contiguous()
        return tensors

    def from_tensors(self, tensors, config):
        weights = {}
        for name, tensor in tensors.items():
            if not name.startswith(("transformer.", HEAD_WEIGHT)):  # in files without a head
                name = f"transformer.{name}"
            is_zero_bias = not config.bias and name.endswith(".bias") and not tensor.float().any()
            if not (is_zero_bias or name.endswith(self.masks)):
                weights[name] = tensor.mT if name.endswith(self.transposed) else tensor
        return weights


class Qwen3(Architecture):
    """Qwen3 (Yang et al. 2025, "Qwen3 Technical Report") with a key head for each query head.

    Its norms of queries and keys have weights, which are 1 for a GPT.
    """

    model_type, class_name = "qwen3", "Qwen3ForCausalLM"
    names = {
        "block_size": "max_position_embeddings",
        "vocab_size": "vocab_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_embd": "hidden_size",
        "tie_weights": "tie_word_embeddings",
    }
    allowed = {
        "position": ("rotary",),
        "norm": ("rmsnorm",),
        "qk_norm": (True,),
        "activation": ("swiglu",),
        "bias": (False,),
    }
    layer_names = {  # {name here: names there, whose tensors are one here}
        "ln_1": ["input_layernorm"],
        "attn.c_attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attn.c_proj": ["self_attn.o_proj"],
        "ln_2": ["post_attention_layernorm"],
        "mlp.c_fc": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.c_proj": ["mlp.down_proj"],
    }
    norm_names = "self_attn.q_norm", "self_attn.k_norm"

    def fixed_fields(self, config):
        return {
            "attention_bias": False,
            "head_dim": config.n_embd // config.n_head,
            "hidden_act": "silu",
            "intermediate_size": swiglu_widths(config.n_embd)[1],
            "num_key_value_heads": config.n_head,
            "rms_norm_eps": torch.finfo(torch.float32).eps,  # PyTorch's default
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "use_sliding_window": False,
        }

    def from_fields(self, values):
        for name in (*self.names.values(), *self.fixed_fields(GPTConfig())):
            if name not in values:
                raise ValueError(f"{name} is missing")
        if scaling := values.get("rope_scaling"):  # which replaces rope_parameters
            raise ValueError(f"rope_scaling={scaling}, not None")
        return super().from_fields(values)

    def to_tensors(self, weights, config):
        tensors: dict[str, torch.Tensor] = {}
        for name, their_names in self._tensor_names(config):
            if name in weights:  # tied weights have no head
                tensors |= zip(their_names, weights[name].chunk(len(their_names)), strict=True)
        return tensors | self._norms(config)

    def from_tensors(self, tensors, config):
        rest, weights = dict(tensors), {}
        for name, norm in self._norms(config).items():
            if name in rest and torch.equal(rest[name].float(), norm):
                del rest[name]
        for name, their_names in self._tensor_names(config):
            if rest.keys() >= set(their_names):
                weights[name] = torch.cat([rest.pop(their_name) for their_name in their_names])
        return weights | rest

    def _tensor_names(self, config):
        """Yields the name of each tensor here, and a list of those there."""
        yield "transformer.wte.weight", ["model.embed_tokens.weight"]
        yield "transformer.ln_f.weight", ["model.norm.weight"]
        yield HEAD_WEIGHT, [HEAD_WEIGHT]
        for layer in range(config.n_layer):
            for name, their_names in self.layer_names.items():
                there = [f"model.layers.{layer}.{their_name}.weight" for their_name in their_names]
                yield f"transformer.h.{layer}.{name}.weight", there

    def _norms(self, config):
        """Returns the weights of the norms of queries and keys."""
        layers, size = range(config.n_layer), config.n_embd // config.n_head
        names = [f"model.layers.{i}.{name}.weight" for i in layers for name in self.norm_names]
        return {name: torch.ones(size) for name in names}


class Folio(Architecture):
    """Any GPT, with the fields of GPTConfig and the code in `code_files`."""

    model_type, class_name = "folio", "FolioForCausalLM"
    names = {name: name for name in DEFAULTS}
    code_files = Path(model.__file__), Path(__file__).with_name("modeling_folio.py")
    prefix = "gpt."  # of tensors

    def to_fields(self, config):
        classes = {"AutoConfig": "FolioConfig", "AutoModelForCausalLM": self.class_name}
        auto_map = {name: f"modeling_folio.{own_name}" for name, own_name in classes.items()}
        return super().to_fields(config) | {"auto_map": auto_map}

    def to_tensors(self, weights, config):
        return {self.prefix + name: weight for name, weight in weights.items()}

    def from_tensors(self, tensors, config):
        return {name.removeprefix(self.prefix): tensor for name, tensor in tensors.items()}


ARCHITECTURES = {kind.model_type: kind for kind in (GPT2(), Qwen3(), Folio())}


def find_architecture(config: GPTConfig) -> Architecture:
    """Returns an Architecture that computes the same function as a GPT, Folio if no other does."""
    return next(kind for kind in ARCHITECTURES.values() if not kind.misfits(config))
