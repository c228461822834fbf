"""Completions of prompts as text: incremental decoding, stop texts, batches; loading a model."""

import json
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from folio.checkpoint.format import build_model
from folio.cli.errors import UserError
from folio.cli.files import read_text
from folio.distributed.sharding import unshard
from folio.hardware.compile import optimize_for_inference, step_accelerator
from folio.hardware.device import DTYPES, Machine, choose_machine, device_type, limit_threads
from folio.hardware.kernels import disable_cudnn_attention
from folio.hardware.memory import keep_freed_memory, memory_bytes
from folio.inference.generate import decode_one, generate
from folio.inference.sampling import Controls
from folio.inference.scoring import check_finite
from folio.pretrained.load import checkpoint_tokenizer

TOKENS_PER_SYNC = 16  # tokens generated between reads of the result, which wait for the device
MAX_BATCH_SIZE = 1024  # more are not much faster, and nothing is printed before they end
MEMORY_SHARE = 1 / 4  # of the device, for a batch; more texts take several batches


@dataclass
class TrainedModel:
    """A model with its tokenizer, ready for inference."""

    model: Any  # GPT
    tokenizer: Any
    machine: Machine
    checkpoint: Any  # Checkpoint, without weights
    decode: Any = decode_one  # for a batch of one text


def load_trained(checkpoint, device="cpu", dtype="float32", compile=False):
    """Returns a Checkpoint's model on a device. Raises UserError if it cannot be loaded."""
    tokenizer = checkpoint_tokenizer(checkpoint)
    keep_freed_memory()
    on_cpu = device_type(device) == "cpu"  # where folio/inference/compiled.py compiles
    machine = choose_machine(device, dtype, compile and not on_cpu)
    model = build_model(checkpoint).to(machine.device, DTYPES[machine.dtype])
    checkpoint.weights = {}  # the model has them
    model = optimize_for_inference(model)
    torch.backends.cuda.enable_cudnn_sdp(False)  # see disable_cudnn_attention
    return TrainedModel(model, tokenizer, machine, checkpoint)


@dataclass
class Completion:
    """A prompt and its continuation, which ends at a stop text or the end-of-text token."""

    prompt: str
    prompt_ids: list
    seed: int
    tokenizer: Any
    stops: list = field(default_factory=list)  # texts that end the continuation
    ids: list = field(default_factory=list)  # of the continuation
    logprobs: list = field(default_factory=list)
    pieces: list = field(default_factory=list)  # text added by each token
    text: str = ""  # of the continuation, without the stop text
    stopped: str | None = None  # "length", "end of text", or the stop text

    def __post_init__(self):
        self._decode = self.tokenizer.decoder()
        for token in self.prompt_ids[-4:]:  # it may end within a character
            self._decode(token)

    def add(self, token, logprob):
        """Appends a token, unless the continuation has already ended."""
        if self.stopped:
            return
        is_end = token == self.tokenizer.end
        self.ids.append(token)
        self.logprobs.append(round(logprob, 6))
        self.pieces.append("" if is_end else self._decode(token))
        self._extend(self.pieces[-1])
        if is_end:
            self.finish("end of text")

    def finish(self, reason):
        """Ends the continuation, unless it has already ended."""
        if not self.stopped:
            self._extend(self._decode(None))
            self.stopped = self.stopped or reason

    def _extend(self, more):
        text = self.text + more
        found = [(text.find(stop), stop) for stop in self.stops if stop in text]
        at, stop = min(found, default=(None, self.stopped))
        self.text = text[:at]  # in one step: another thread may call confirmed()
        self.stopped = stop

    def confirmed(self):
        """Returns prompt and continuation without what may be the start of a stop text."""
        stopped, text = self.stopped, self.text  # in this order
        held = [0]  # lengths of such starts
        if not stopped:
            starts = (stop[:n] for stop in self.stops for n in range(1, len(stop)))
            held += [len(start) for start in starts if text.endswith(start)]
        return self.prompt + text[: len(text) - max(held)]


def complete(trained, completions, controls, count, context_stride=None, stream=False):
    """Continues texts in one batch by up to `count` tokens; yields whenever tokens are added.

    Args:
        trained: a TrainedModel.
        context_stride: see folio.inference.generate.stride_of.
        stream: yield after every token.
    """
    tokens = generate(
        trained.model,
        [each.prompt_ids for each in completions],
        [each.seed for each in completions],
        controls,
        count,
        context_stride=context_stride,
        vocab_size=trained.tokenizer.vocab_size,
        accelerate=step_accelerator(trained.machine),
        decode=trained.decode if len(completions) == 1 else decode_one,
    )
    products = len(completions) * trained.model.num_params()  # per step
    size = 1  # to yield the first token immediately
    while True:
        with limit_threads(products):
            batch = list(islice(tokens, size))
        if not batch:
            break
        ids, logprobs = (torch.stack(each, dim=1) for each in zip(*batch, strict=True))
        check_finite(logprobs)
        for each, *row in zip(completions, ids.tolist(), logprobs.tolist(), strict=True):
            for token, logprob in zip(*row, strict=True):
                each.add(token, logprob)
        yield  # other generators may run now, so no context manager may be open
        if all(each.stopped for each in completions):
            return
        size = 1 if stream else TOKENS_PER_SYNC
    for each in completions:
        each.finish("length")


def max_batch_size(model):
    """Returns for how many texts the cache and the logits fit into a share of the memory."""
    config = model.config
    cache = 2 * config.n_layer * config.block_size * config.n_embd
    logits = 8 * config.vocab_size  # and the tensors of sampling
    available = memory_bytes(model.transformer.wte.weight.device) or 2**33
    size = int(MEMORY_SHARE * available) // (4 * (cache + logits))
    return min(max(1, size), MAX_BATCH_SIZE)


def sample_text(model, tokenizer, seed):
    """Returns a short sample of a model in training."""
    prompt = tokenizer.encode(tokenizer.start).tolist()
    controls = Controls(temperature=0.8, top_k=200)
    model.eval()
    tokens = generate(model, [prompt], [seed], controls, 200, vocab_size=tokenizer.vocab_size)
    with unshard(model), disable_cudnn_attention(model.transformer.wte.weight.device):
        text = tokenizer.decode([int(ids) for ids, _ in tokens])
    model.train()
    return text.strip()


# Prompts


def read_prompt(start):
    """Returns the prompt that `start` specifies; None stays None.

    Raises UserError if it is empty or unreadable.
    """
    if start is None:
        return None
    if start.startswith("FILE:") or start == "-":
        start = read_text(start.removeprefix("FILE:"))
    if not start:
        raise UserError("the prompt is empty; omit --start to begin with a newline")
    return start


def stop_texts(stop):
    """Returns the stop texts: `stop`, or the items of the JSON list that it contains."""
    if stop is None:
        return []
    try:
        texts = json.loads(stop)
    except ValueError:
        texts = stop
    texts = texts if isinstance(texts, list) else [stop]
    if not all(isinstance(each, str) and each for each in texts):
        raise UserError(f"--stop={stop}: must be a string, or a JSON list of nonempty strings")
    return texts
