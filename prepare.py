"""Convert text to token files: data/<dataset>/{train.bin, val.bin, meta.json}.

    python prepare.py                                        tiny Shakespeare, by characters
    python prepare.py --dataset=shakespeare                  the same with GPT-2's tokenizer
    python prepare.py --dataset=pydocs                       Python's documentation, no network
    python prepare.py --input=FILE_OR_FOLDER --dataset=NAME  your own text
    python prepare.py --input=FILE --dataset=NAME --tokenizer=bpe --vocab_size=4096
    python prepare.py --input=hf:ORG/NAME --dataset=NAME --tokenizer=gpt2
    python prepare.py --dataset=fineweb_edu --max_tokens=1000000000

Files of any size are read in constant memory: text, and by suffix .jsonl, .csv (both may be .gz or
.zst) and .parquet. A dataset is replaced when the new one is complete. folio/data/corpus.py
defines the validation split, folio/data/dataset.py the format.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from folio.cli import process
from folio.cli.errors import UserError, suggest
from folio.cli.settings import load_settings, parse_arguments, setting

KNOWN = {  # name: tokenizer
    "shakespeare_char": "char",
    "shakespeare": "gpt2",
    "pydocs": "char",
    "openwebtext": "gpt2",
    "fineweb_edu": "gpt2",
}
KINDS = ("char", "byte", "bpe", "gpt2")  # of tokenizers


@dataclass(frozen=True)
class PrepareConfig:
    """Convert text to token files for train.py: data/<dataset>/{train.bin, val.bin, meta.json}."""

    dataset: str | None = setting(
        None,
        "shakespeare_char (default), shakespeare, pydocs, openwebtext, fineweb_edu, or a name for "
        "your own text",
        group="Corpus",
    )
    input: str | None = setting(
        None,
        "your own UTF-8 text, JSON lines, CSV or Parquet: a file, folder or glob pattern, or "
        "hf:ORG/NAME[@REVISION], a dataset on the Hugging Face hub; the validation split is the "
        "last 10% of a text, or documents chosen by hash (about 20 MB, at most 10%)",
    )
    text_key: str = setting("text", "column or field with the text in JSON lines, CSV or Parquet")
    subset: str | None = setting(
        None, "hf: folder of the files, such as that of a configuration; None: the only one"
    )
    split: str = setting("train", "hf: split of the dataset that is read")
    max_tokens: int | None = setting(None, "stop after about as many tokens", "[1, inf)")
    tokenizer: str | None = setting(
        None,
        "char (default), byte, bpe (trained on the text), gpt2 (default for shakespeare, "
        "openwebtext and fineweb_edu), or that of a checkpoint file or Hugging Face folder",
    )
    vocab_size: int | None = setting(
        None, "number of tokens of a bpe tokenizer; None: 2,048", "[257, 1000000]"
    )
    allow_special: bool = setting(False, "bpe and gpt2: <|endoftext|> in a text ends a document")
    verify: bool = setting(False, "only check the files of an existing dataset")

    def __post_init__(self):
        if self.input is not None and self.dataset is None:
            name = Path(self.input).resolve().stem
            raise ValueError(f"--input needs a name for the dataset, such as --dataset={name}")
        if (self.subset or self.split != "train") and not (self.input or "").startswith("hf:"):
            raise ValueError("--subset and --split apply to --input=hf:ORG/NAME only")
        if self.kind not in KINDS and not os.path.exists(self.kind):
            known = ", ".join(KINDS)
            raise ValueError(f"--tokenizer must be {known} or an existing path, not {self.kind}")
        if self.vocab_size and self.kind != "bpe":
            raise ValueError(f"--vocab_size needs --tokenizer=bpe; the tokenizer is {self.kind}")
        if self.allow_special and self.kind in ("char", "byte"):
            raise ValueError(
                f"--allow_special needs --tokenizer=bpe or gpt2; the tokenizer is {self.kind}"
            )

    @property
    def kind(self):
        """The tokenizer, or if it is None, the default for the dataset."""
        return self.tokenizer or (KNOWN.get(self.dataset, "char") if self.input is None else "char")


if __name__ == "__main__":
    process.start(parse_arguments, PrepareConfig)  # a signal during imports prints no traceback

from folio.data.corpus import Corpus, Extent
from folio.data.dataset import dataset_folder, load_dataset
from folio.data.downloads import ON_THE_HUB, hub_sources, python_docs, shakespeare
from folio.data.encoding import encode_corpus
from folio.data.sources import find_sources
from folio.data.tokenizer import BPE_SIZE, TOKENIZERS, BPETokenizer
from folio.data.writer import dataset_writer


def main(argv=None):
    """Reads a corpus and writes a dataset.

    Where the tokenizer or the boundary of the splits depends on the text, all of it is read once
    before. Then it is read, divided into splits, encoded in threads, and written in order.
    """
    settings = load_settings(PrepareConfig, argv)
    name = "shakespeare_char" if settings.dataset is None else settings.dataset
    folder = dataset_folder(name)
    if settings.verify:
        data = load_dataset(name, verify=True)
        train, val = len(data.train), len(data.val)
        print(f"{folder} is intact: {train:,} training and {val:,} validation tokens")
        return
    corpus = corpus_of(name, settings)
    tokenizer, extent = tokenizer_and_extent(corpus, settings)
    max_tokens = None if corpus.in_order else settings.max_tokens
    with dataset_writer(folder, tokenizer) as writer:
        characters = encode_corpus(corpus, tokenizer, writer, extent, max_tokens)
        meta = writer.finish(corpus.description, corpus.sha256())
    print(
        f"{folder}: {characters:,} characters of {corpus.description}, "
        f"vocabulary {meta['vocab_size']:,} ({tokenizer.kind}), "
        f"{meta['train']['tokens']:,} training and {meta['val']['tokens']:,} validation tokens"
    )


def corpus_of(name, settings):
    """Returns the Corpus of --input or of a dataset that folio provides."""
    sources = find_corpus(name, settings)
    is_single = len(sources) == 1
    label = sources[0].name if is_single else f"{settings.input or name} ({len(sources)} files)"
    return Corpus(sources, label, settings.allow_special)


def find_corpus(name, settings):
    """Returns the Sources of --input or of a dataset that folio provides."""
    key, limit = settings.text_key, settings.max_tokens
    if settings.input is not None and settings.input.startswith("hf:"):
        return hub_sources(settings.input, settings.subset, settings.split, key, limit)
    if settings.input is not None:
        folder = dataset_folder(name)
        is_inside = folder.resolve().is_relative_to(Path(settings.input).resolve())
        if is_inside and os.path.isdir(settings.input):
            raise UserError(f"{folder} is inside the folder of the text: move the text elsewhere")
        return find_sources(settings.input, key)
    if name in ON_THE_HUB:
        return hub_sources(*ON_THE_HUB[name], settings.split, key, limit)
    if name in KNOWN:
        return [python_docs() if name == "pydocs" else shakespeare()]
    hint = suggest(name, KNOWN, f"; datasets that do not need it: {', '.join(KNOWN)}")
    raise UserError(f"dataset {name} needs --input=FILE_OR_FOLDER{hint}")


def tokenizer_and_extent(corpus, settings):
    """Returns the tokenizer of a Corpus, and the Extent to encode.

    A BPE is trained on the training split only.
    """
    kind, extent = settings.kind, Extent()
    size = settings.vocab_size or BPE_SIZE
    tokenizer = None if kind in ("char", "bpe") else existing_tokenizer(kind)
    if corpus.in_order or kind in ("char", "bpe"):
        limit = settings.max_tokens
        if limit and kind != "char":  # estimate the number of characters
            sample = corpus.sample()
            trained = tokenizer or BPETokenizer.train([sample], size)
            limit = limit * len(sample) // max(len(trained.encode(sample)), 1)
        extent, characters = corpus.survey(kind, limit)
        tokenizer = tokenizer or characters
    if kind == "bpe":
        tokenizer = BPETokenizer.train(corpus.training_texts(extent), size)
    return tokenizer, extent


def existing_tokenizer(kind):
    """Returns a tokenizer of one of KINDS, or from a path."""
    if kind in KINDS:
        return TOKENIZERS[kind]()
    from folio.pretrained.load import checkpoint_tokenizer, load_initial  # import torch: slow

    return checkpoint_tokenizer(load_initial(kind))


if __name__ == "__main__":
    process.run(main)
