"""Passages of generated texts that stand in the training text, because the model memorized them.

Other texts of the same kind share some with it, too, such as common phrases.
"""

import numpy as np

from folio.checkpoint.format import Checkpoint
from folio.cli.errors import UserError
from folio.data.dataset import load_dataset
from folio.data.tokenizer import UNICODE_CODE_POINTS, code_points

MIN_CHARACTERS = 40  # of a passage that counts as copied
MAX_TOKENS = 2**27  # of the training text, which is searched in memory


def load_texts(checkpoint: Checkpoint):
    """Returns the training and the validation text of a Checkpoint.

    Raises UserError if its dataset is missing, has changed or is too large.
    """
    dataset = load_dataset(checkpoint.settings.get("dataset", ""))
    name, tokenizer = f"data/{dataset.name}", dataset.tokenizer
    if checkpoint.data != dataset.fingerprint:
        raise UserError(f"--copied: {name} has changed since {checkpoint.path} was trained")
    if len(dataset.train) > MAX_TOKENS:
        raise UserError(f"--copied: {name} has over {MAX_TOKENS:,} tokens, too many to search")
    tokens = list(map(tokenizer.token_bytes, range(tokenizer.vocab_size)))
    splits = (map(tokens.__getitem__, ids.tolist()) for ids in (dataset.train, dataset.val))
    return [b"".join(split).decode(errors="replace") for split in splits]


def find_copies(texts, source):
    """Returns (longest passage that stands in the source, share of characters) of each text.

    The share is that of characters in passages of MIN_CHARACTERS or more. Hashes tell where a
    passage may begin, because a search through the source for each would take too long.
    """
    hashes, hashes_of_texts, copies = hash_parts(source), list(map(hash_parts, texts)), []
    is_wanted = np.zeros(2**20, bool)  # by the first bits of a hash
    is_wanted[np.concatenate(hashes_of_texts) >> np.uint64(44)] = True
    positions = np.flatnonzero(is_wanted[hashes >> np.uint64(44)])
    positions = positions[np.argsort(hashes[positions])]
    hashes, codes = hashes[positions], np.append(code_points(source), UNICODE_CODE_POINTS)
    for text, parts in zip(texts, hashes_of_texts, strict=True):
        passage, is_copied = "", np.zeros(len(text), bool)
        firsts, ends = np.searchsorted(hashes, parts), np.searchsorted(hashes, parts, "right")
        for start, (first, end) in enumerate(zip(firsts, ends, strict=True)):
            length = match_length(code_points(text[start:]), codes, positions[first:end])
            passage = max(passage, text[start : start + length], key=len)
            is_copied[start : start + length] |= length >= MIN_CHARACTERS
        copies.append((passage, is_copied.sum() / max(len(text), 1)))
    return copies


def hash_parts(text):
    """Returns a hash of the 8 characters from each position on, (positions,) uint64."""
    hashes, factor = code_points(text).astype(np.uint64), np.full(1, 0x9E3779B97F4A7C15, np.uint64)
    for width in (1, 2, 4):  # a polynomial of twice as many characters, modulo 2^64
        hashes = hashes[:-width] * factor + hashes[width:]
        factor *= factor
    return hashes


def match_length(text, source, positions):
    """Returns how many code points of a text stand in the source at the best of the positions."""
    length = 0
    while length < len(text):
        positions = positions[source[positions + length] == text[length]]
        if not len(positions):
            break
        length += 1
    return length
