"""Passages of generated texts that occur in the training text, because the model memorized them."""

import numpy as np

from folio.checkpoint.format import Checkpoint
from folio.cli.errors import UserError
from folio.data.dataset import load_dataset
from folio.data.tokenizer import UNICODE_CODE_POINTS, code_points

MIN_CHARACTERS = 40  # of a passage that counts as copied
PART = 8  # characters that are compared at once
MAX_TOKENS = 2**25  # of the training text, which is searched in memory


def load_texts(checkpoint: Checkpoint):
    """Returns the training and the validation text of a Checkpoint.

    Raises UserError if its dataset is unknown, missing, changed or too large.
    """
    if not checkpoint.data:
        raise UserError(f"--copied needs a model of folio's train.py; {checkpoint.path} is none")
    dataset = load_dataset(checkpoint.settings["dataset"])
    name, tokenizer = f"data/{dataset.name}", dataset.tokenizer
    if checkpoint.data != dataset.fingerprint:
        cause = f"has changed since {checkpoint.path} was trained"
        raise UserError(f"{name} {cause}: leave out --copied, or prepare the earlier text again")
    if len(dataset.train) > MAX_TOKENS:
        raise UserError(f"{name} has over {MAX_TOKENS:,} tokens: leave out --copied")
    tokens = list(map(tokenizer.token_bytes, range(tokenizer.vocab_size)))
    splits = (map(tokens.__getitem__, ids.tolist()) for ids in (dataset.train, dataset.val))
    return [b"".join(split).decode(errors="replace") for split in splits]


def find_copies(texts, source):
    """Returns (longest passage that occurs in the source, share of characters) of each text.

    The share is that of characters in passages of MIN_CHARACTERS or more. Passages of fewer than
    PART characters are not found. Hashes of PART characters tell where one may begin, because a
    search through the source for each would take too long.
    """
    hashes, hashes_of_texts = hash_parts(source), [hash_parts(text) for text in texts]
    positions = np.flatnonzero(np.isin(hashes, np.concatenate(hashes_of_texts)))
    positions = positions[np.argsort(hashes[positions])]
    hashes = hashes[positions]
    source_codes = np.append(code_points(source), UNICODE_CODE_POINTS)  # no text has the last one
    copies = []
    for text, parts in zip(texts, hashes_of_texts, strict=True):
        codes, passage, is_copied = code_points(text), "", np.zeros(len(text), bool)
        firsts, ends = np.searchsorted(hashes, parts), np.searchsorted(hashes, parts, "right")
        for start, (first, end) in enumerate(zip(firsts, ends, strict=True)):
            length = match_length(codes[start:], source_codes, positions[first:end])
            if length >= PART and length > len(passage):
                passage = text[start : start + length]
            is_copied[start : start + length] |= length >= MIN_CHARACTERS
        copies.append((passage, is_copied.sum() / max(len(text), 1)))
    return copies


def hash_parts(text):
    """Returns a hash of the PART characters from each position on, (positions,) int32 < 2^20."""
    hashes, factor = code_points(text).astype(np.uint64), np.full(1, 0x9E3779B97F4A7C15, np.uint64)
    for width in (1, 2, 4):  # a polynomial of twice as many characters, modulo 2^64
        hashes = hashes[:-width] * factor + hashes[width:]
        factor *= factor
    return (hashes >> np.uint64(44)).astype(np.int32)  # few enough for a table in np.isin


def match_length(codes, source_codes, positions):
    """Returns how many code points of a text occur in the source at the best of the positions."""
    for length, code in enumerate(codes):
        positions = positions[source_codes[positions + length] == code]
        if not len(positions):
            return length
    return len(codes)
