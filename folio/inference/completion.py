"""Completions of prompts as text: incremental decoding, stop texts, batches."""

from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from folio.checkpoint.format import empty_model
from folio.cli.process import print_error
from folio.hardware.compile import step_accelerator
from folio.hardware.device import limit_threads
from folio.hardware.kernels import disable_cudnn_attention
from folio.hardware.memory import memory_bytes
from folio.inference.generate import generate
from folio.inference.sampling import Controls
from folio.inference.scoring import check_finite

TOKENS_PER_SYNC = 16  # reading results waits for the device
MAX_BATCH_SIZE = 1024  # more are not much faster, and nothing is printed before they end
BATCH_MEMORY_FRACTION = 1 / 4  # more texts take several batches


@dataclass
class Completion:
    """A prompt and its continuation, which ends at a stop text or the end-of-text token."""

    prompt: str
    prompt_ids: list
    seed: int
    tokenizer: Any
    stop_texts: list = field(default_factory=list)  # texts that end the continuation
    ids: list = field(default_factory=list)  # of the continuation
    logprobs: list = field(default_factory=list)
    pieces: list = field(default_factory=list)  # text added by each token
    text: str = ""  # of the continuation, without the stop text
    stopped: str | None = None  # "length", "end of text", or the stop text
    printed: int = 0  # characters of stable_text() that have been printed

    def __post_init__(self):
        self._decode = self.tokenizer.decoder()
        for token in self.prompt_ids[-4:]:  # it may end within a character
            self._decode(token)

    def add(self, token, logprob):
        """Appends a token, unless the continuation has already ended."""
        if self.stopped:
            return
        is_end = token == self.tokenizer.end
        piece = "" if is_end else self._decode(token)
        self.ids.append(token)
        self.logprobs.append(round(logprob, 6))
        self.pieces.append(piece)
        self._append_text(piece)
        if is_end:
            self.finish("end of text")

    def finish(self, reason):
        """Ends the continuation, unless it has already ended."""
        if not self.stopped:
            self._append_text(self._decode(None))
            self.stopped = self.stopped or reason

    def _append_text(self, piece):
        """Appends to the text, and ends it before the first stop text."""
        self.text += piece
        matches = [(self.text.find(stop), stop) for stop in self.stop_texts if stop in self.text]
        if matches:
            end, self.stopped = min(matches)
            self.text = self.text[:end]

    def stable_text(self):
        """Returns the prompt and the continuation, without an end that may begin a stop text."""
        longest = 0  # length of such an end
        for stop in () if self.stopped else self.stop_texts:
            for length in range(1, len(stop)):
                if self.text.endswith(stop[:length]):
                    longest = max(longest, length)
        return self.prompt + self.text[: len(self.text) - longest]


def complete(trained, completions, controls, stream=False):
    """Generates the continuations of a batch of Completions with a TrainedModel.

    `controls` are Controls or a SampleConfig. Yields whenever tokens were added; after every token
    if `stream`.
    """
    steps = generate(
        trained.model,
        [completion.prompt_ids for completion in completions],
        [completion.seed for completion in completions],
        controls,
        trained.tokenizer.vocab_size,
        step_accelerator(trained.machine),
    )
    # The layers of the model can be packed, and most parameters of n-grams take no multiplication.
    products = empty_model(trained.model.config, "meta").flops_per_token() / 6
    count = 1  # the first token is yielded immediately
    while not all(completion.stopped for completion in completions):
        with limit_threads(len(completions) * products):
            new_tokens = list(islice(steps, count))
            if message := trained.cores.check():
                print_error(message)
        if not new_tokens:
            break
        ids = torch.stack([step_ids for step_ids, _ in new_tokens])  # (steps, B)
        logprobs = torch.stack([step_logprobs for _, step_logprobs in new_tokens])
        check_finite(logprobs)
        for step in zip(ids.tolist(), logprobs.tolist(), strict=True):
            for completion, token, logprob in zip(completions, *step, strict=True):
                completion.add(token, logprob)
        yield  # outside of limit_threads, which changes the whole process
        count = 1 if stream else TOKENS_PER_SYNC
    for completion in completions:
        completion.finish("length")


def max_batch_size(config, device):
    """Returns for how many texts the cache and the logits fit into a share of the memory."""
    cache = 2 * config.n_layer * config.block_size * config.n_embd
    logits = 8 * config.vocab_size  # and the tensors of sampling
    available = memory_bytes(device) or 2**33
    size = int(BATCH_MEMORY_FRACTION * available) // (4 * (cache + logits))
    return min(max(1, size), MAX_BATCH_SIZE)


def sample_text(model, tokenizer, seed):
    """Returns a short sample of a model in training."""
    prompt = tokenizer.encode(tokenizer.start).tolist()
    controls = Controls(temperature=0.8, top_k=200, max_new_tokens=200)
    model.eval()
    device = model.transformer.wte.weight.device
    # Not compiled, because the compiler would run for each length.
    with disable_cudnn_attention(device), torch.compiler.set_stance("force_eager"):
        steps = generate(model, [prompt], [seed], controls, tokenizer.vocab_size)
        text = tokenizer.decode([int(ids) for ids, _ in steps])
    model.train()
    return text.strip()
