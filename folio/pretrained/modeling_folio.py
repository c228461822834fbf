"""A folio model as a class of transformers 5. `python -m tools.export` copies this file.

In a folder with folio's model.py, config.json and the weights, it is what
`AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)` loads.
"""

from contextlib import ExitStack
from dataclasses import fields

import torch
import torch.nn.functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .model import GPT, GPTConfig, causal_mask

# What forward() accepts of other arguments. A cache is used if it is passed.
ACCEPTED = {"use_cache": (None, False, True), "return_dict": (None, True)}
PASSED = ("output_attentions", "output_hidden_states", "logits_to_keep")  # from generate()


class FolioConfig(PretrainedConfig):
    """The fields of GPTConfig, some of them also under the names that transformers uses."""

    model_type = "folio"
    attribute_map = {
        "num_hidden_layers": "n_layer",
        "hidden_size": "n_embd",
        "tie_word_embeddings": "tie_weights",
    }

    def __init__(self, **values):
        for field in fields(GPTConfig):
            setattr(self, field.name, values.pop(field.name, field.default))
        super().__init__(tie_word_embeddings=self.tie_weights, **values)


class FolioForCausalLM(PreTrainedModel, GenerationMixin):
    """A GPT. Beyond block_size tokens, generate() continues the last block_size of them."""

    config_class = FolioConfig
    accepts_loss_kwargs = False  # for Trainer: the loss is the mean over the tokens of a call
    _tied_weights_keys = {"gpt.lm_head.weight": "gpt.transformer.wte.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.gpt = GPT(GPTConfig(**{f.name: getattr(config, f.name) for f in fields(GPTConfig)}))
        if not self.gpt.lm_head.weight.is_meta:  # else from_pretrained reads them
            self.gpt.init_weights()
        self.post_init()

    def initialize_weights(self):
        """Computes the rotary tables, which are not in the file. Called after loading, too."""
        if self.gpt.rotary is not None:
            self.gpt.rotary.reset_parameters()

    def get_input_embeddings(self):
        return self.gpt.transformer.wte

    def set_input_embeddings(self, value):
        if self.config.ngrams:  # their rows depend on the size of the vocabulary
            raise ValueError("the embedding of a model with n-grams cannot be replaced")
        self.gpt.transformer.wte = value

    def get_output_embeddings(self):
        return self.gpt.lm_head

    def set_output_embeddings(self, value):
        self.gpt.lm_head = value

    def forward(
        self,
        input_ids,
        labels=None,
        attention_mask=None,
        past_key_values=None,
        output_hidden_states=False,
        logits_to_keep=0,
        **others,
    ):
        """Returns the logits, (B, T', vocab_size), and the loss if there are labels.

        Args:
            input_ids: (B, T), T <= block_size. The keys and values of its first T - T' tokens are
                in the cache past_key_values.
            labels: input_ids, with -100 for tokens to ignore; only without a cache.
            attention_mask: may only exclude tokens at the end, which causal attention does anyway.
            output_hidden_states: also return n_layer + 1 states, (B, T', n_embd) each: those before
                each block, and those after the final norm.
            logits_to_keep: number of last tokens to compute the logits of, 0: all; or an index.

        Raises ValueError for other arguments, and for a mask that excludes tokens at the start.
        """
        for name, value in others.items():
            if not any(value is accepted for accepted in ACCEPTED.get(name, (None, False))):
                raise ValueError(f"folio models do not support {name}={value}")
        if attention_mask is not None and (attention_mask[:, 1:] > attention_mask[:, :-1]).any():
            raise ValueError("folio models do not support padding on the left")
        T, past = input_ids.shape[1], past_key_values.get_seq_length() if past_key_values else 0
        positions = torch.arange(T, device=input_ids.device)
        mask = causal_mask(positions[past:], positions, self.config.window)

        def attend_to_cache(layer, q, k, v):
            k, v = past_key_values.update(k, v, layer)
            return F.scaled_dot_product_attention(q, k, v, mask.to(q.dtype))

        def keep_input(block, inputs):
            states.append(inputs[0])

        states: list[torch.Tensor] = []
        attend = attend_to_cache if past_key_values is not None else None
        with ExitStack() as hooks:
            for block in self.gpt.transformer.h if output_hidden_states else ():
                hooks.enter_context(block.register_forward_pre_hook(keep_input))
            x = self.gpt.trunk(input_ids, positions[past:], attend)
        if isinstance(logits_to_keep, int):
            logits_to_keep = slice(-logits_to_keep, None)
        logits = self.gpt.lm_head(x[:, logits_to_keep])
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].mT, labels[:, 1:])
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values,
            hidden_states=(*states, x) if output_hidden_states else None,
        )

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, **kwargs):
        """Returns the arguments of forward(), without a cache if the first tokens are dropped."""
        size, mask = self.config.block_size, kwargs.get("attention_mask")
        cache = past_key_values if input_ids.shape[1] <= size else None
        inputs = {"input_ids": input_ids[:, -size:], "past_key_values": cache}
        passed = {name: kwargs[name] for name in PASSED if name in kwargs}
        return inputs | passed | {"attention_mask": mask}
