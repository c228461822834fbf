"""Print which models config/own_text.py chooses for texts, machines and times.

    python -m tools.sizes

A cell has the parameters in matrix products, in millions, and the steps that the time allows, at
most those of ten passes over the text.
"""

from folio.cli import process
from folio.training.model_size import choose_model_size, count_possible_tokens
from prepare import MIN_BPE_CHARACTERS, bpe_vocab_size
from tools.table import format_table

SIZES = 150_000, 1_000_000, 3_000_000, 20_000_000, 100_000_000  # of texts, in characters
MACHINES = {  # peak in FLOP/s
    "two laptop cores": 1e11,
    "two server cores, float32": 1.9e11,
    "two server cores, bfloat16": 3.7e11,
    "T4": 6.5e13,
    "H100": 9.89e14,
}


def main(argv=None):
    rows = [["machine, time", *(f"{size / 1e6:g} MB" for size in SIZES)]]
    for machine, speed in MACHINES.items():
        for minutes in (2, 10):
            cells = [describe(size, speed * 60 * minutes) for size in SIZES]
            rows.append([f"{machine}, {minutes} minutes", *cells])
    print(*format_table(rows), sep="\n")


def describe(size, flops):
    """Returns the parameters and steps for a text of about three characters per BPE token."""
    vocab_size, tokens = 65, size
    if size >= MIN_BPE_CHARACTERS:
        vocab_size, tokens = bpe_vocab_size(size, 65), size // 3
    model = choose_model_size(tokens, size, vocab_size, flops)
    possible_tokens = count_possible_tokens(model, vocab_size, flops)
    steps = min(possible_tokens, 10 * tokens) / model.step_tokens
    return f"{model.parameters(vocab_size) / 1e6:.1f} M, {steps:,.0f}"


if __name__ == "__main__":
    process.run(main)
