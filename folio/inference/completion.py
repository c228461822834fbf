"""Continuations of prompts as text: incremental decoding and stop texts."""

from dataclasses import dataclass, field

import torch

from folio.data.tokenizer import Tokenizer
from folio.distributed.world import is_sharded
from folio.hardware.kernels import disable_cudnn_attention
from folio.inference.generate import generate
from folio.inference.sampling import SamplingParams


@dataclass
class Completion:
    """A prompt and its continuation, which ends at a stop text or the end-of-text token."""

    prompt: str
    prompt_ids: list
    seed: int
    tokenizer: Tokenizer
    stop_texts: list = field(default_factory=list)  # texts that end the continuation
    ids: list = field(default_factory=list)  # of the continuation
    logprobs: list = field(default_factory=list)
    pieces: list = field(default_factory=list)  # text added by each token
    text: str = ""  # of the continuation, without the stop text
    stopped: str | None = None  # "length", "end of text", or the stop text
    returned: int = 0  # characters that new_text() has returned

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

    def new_text(self):
        """Returns what is new, at first with the prompt, but no end that may begin a stop text."""
        kept = 0  # characters of such an end
        for stop in () if self.stopped else self.stop_texts:
            for length in range(1, len(stop)):
                if self.text.endswith(stop[:length]):
                    kept = max(kept, length)
        whole = self.prompt + self.text[: len(self.text) - kept]
        new, self.returned = whole[self.returned :], len(whole)
        return new


def sample_text(model, tokenizer: Tokenizer, seed):
    """Returns a short sample of a GPT in training, sharded or not."""
    prompt = tokenizer.encode_prompt(tokenizer.start)
    params = SamplingParams(temperature=0.8, top_k=200, max_new_tokens=200)
    model.eval()
    device = model.transformer.wte.weight.device
    if is_sharded(model):
        model.unshard()  # the parameters outside of blocks; blocks gather theirs
    # Not compiled, because the compiler would run for each length.
    with disable_cudnn_attention(device), torch.compiler.set_stance("force_eager"):
        steps = generate(model, [prompt], [seed], params, tokenizer.vocab_size)
        text = tokenizer.decode([int(ids) for ids, _ in steps])
    if is_sharded(model):
        model.reshard()
    model.train()
    return text.strip()
