"""Convert text to token files: data/<dataset>/{train.bin, val.bin, meta.json}.

    python prepare.py                                        tiny Shakespeare, by characters
    python prepare.py --dataset=shakespeare                  the same with GPT-2's tokenizer
    python prepare.py --dataset=pydocs                       Python's documentation, no network
    python prepare.py --input=FILE_OR_FOLDER --dataset=NAME  your own text
    python prepare.py --input=FILE --dataset=NAME --tokenizer=bpe --vocab_size=4096
    python prepare.py --dataset=fineweb_edu --max_tokens=1000000000

Files of any size are read in constant memory: text, and by suffix .jsonl, .jsonl.gz, .jsonl.zst and
.parquet. If the process is killed, the same command continues. folio/corpus.py defines the
validation split, folio/dataset.py the format.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from folio import process
from folio.errors import UserError, nearest
from folio.fields import setting
from folio.settings import load, parse_arguments

KNOWN = {  # name: tokenizer
    "shakespeare_char": "char",
    "shakespeare": "gpt2",
    "pydocs": "char",
    "openwebtext": "gpt2",
    "fineweb_edu": "gpt2",
}
ON_THE_HUB = ("openwebtext", "fineweb_edu")

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
        "your own UTF-8 text, JSON lines or Parquet: a file, folder or glob pattern; the "
        "validation split is the last 10% of a text, or documents chosen by hash (about 20 MB, at "
        "most 10%)",
    )
    text_key: str = setting("text", "field of JSON lines, or column of Parquet, with the text")
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
    url: str | None = setting(None, "alternative download URL for tiny Shakespeare")
    verify: bool = setting(False, "only check the files of an existing dataset")

    def __post_init__(self):
        if "" in (self.input, self.url):
            raise UserError("--input and --url must not be empty")
        if self.input and self.dataset is None:
            name = Path(self.input).resolve().stem
            raise UserError(f"--input needs a name for the dataset, such as --dataset={name}")
        if self.url and (
            self.input or self.dataset not in (None, "shakespeare_char", "shakespeare")
        ):
            raise UserError("--url applies to tiny Shakespeare only")
        if self.kind not in KINDS and not os.path.exists(self.kind):
            known = ", ".join(KINDS)
            raise UserError(f"--tokenizer must be {known} or an existing path, not {self.kind}")
        if self.vocab_size and self.kind != "bpe":
            raise UserError(f"--vocab_size needs --tokenizer=bpe; the tokenizer is {self.kind}")
        if self.allow_special and self.kind in ("char", "byte"):
            raise UserError(
                f"--allow_special needs --tokenizer=bpe or gpt2; the tokenizer is {self.kind}"
            )

    @property
    def kind(self):
        """The tokenizer, or if it is None, the default for the dataset."""
        return self.tokenizer or ("char" if self.input else KNOWN.get(self.dataset, "char"))


if __name__ == "__main__":
    process.start(parse_arguments, PrepareConfig)  # a signal during imports prints no traceback

from folio.corpus import Corpus, Position
from folio.dataset import dataset_folder, verify_dataset
from folio.dataset_writer import DatasetWriter, unfinished
from folio.encoding import encode_corpus, progress_bar
from folio.known_texts import python_docs, shakespeare
from folio.sources import find_sources
from folio.tokenizers import BPE_SIZE, TOKENIZERS, BPETokenizer


def main(argv=None):
    settings = load(PrepareConfig, argv)
    name = "shakespeare_char" if settings.dataset is None else settings.dataset
    folder = dataset_folder(name)
    if settings.verify:
        print(verify_dataset(name))
        return
    corpus = own_corpus(settings, folder) if settings.input else known_corpus(name, settings)
    key = identity(corpus, settings)
    resumed = unfinished(folder, key)
    if resumed:
        tokenizer, start = resumed.tokenizer, Position(**resumed.position)
    else:
        tokenizer, start = tokenizer_and_start(corpus, settings)
    with DatasetWriter(folder, tokenizer, key, resumed) as writer:
        if start.tokens:
            print(f"continuing {folder} after {start.tokens:,} tokens", flush=True)
        max_tokens = None if corpus.in_order else settings.max_tokens
        end = encode_corpus(corpus, tokenizer, writer, start, max_tokens)
        meta = writer.finish(corpus.description, corpus.sha256(end))
    print(
        f"{folder}: {end.characters:,} characters of {corpus.description}, "
        f"vocabulary {meta['vocab_size']:,} ({tokenizer.kind}), "
        f"{meta['train']['tokens']:,} training and {meta['val']['tokens']:,} validation tokens"
    )


def identity(corpus, settings):
    """Returns plain data that differs if the tokens could differ."""
    stamps = json.dumps([source.stamp() for source in corpus.sources])
    names = ("kind", "vocab_size", "allow_special", "max_tokens", "text_key")
    sources = {"sources": hashlib.sha256(stamps.encode()).hexdigest()}
    return sources | {name: getattr(settings, name) for name in names}


def tokenizer_and_start(corpus, settings):
    """Returns the tokenizer of a Corpus, and the Position from which to encode.

    A BPE is trained on the training split only.
    """
    kind, start = settings.kind, Position()
    size = settings.vocab_size or BPE_SIZE
    tokenizer = None if kind in ("char", "bpe") else existing_tokenizer(kind)
    if corpus.in_order or kind in ("char", "bpe"):
        limit = settings.max_tokens
        if limit and kind != "char":  # estimate the number of characters
            sample = corpus.sample()
            trained = tokenizer or BPETokenizer.train([sample], size)
            limit = limit * len(sample) // max(len(trained.encode(sample)), 1)
        with progress_bar(corpus, "reading") as progress:
            start, characters = corpus.survey(kind, limit, progress)
        tokenizer = tokenizer or characters
    if kind == "bpe":
        tokenizer = BPETokenizer.train(corpus.training_texts(start), size)
    return tokenizer, start


def existing_tokenizer(kind):
    """Returns a tokenizer of one of KINDS, or from a path."""
    if kind in KINDS:
        return TOKENIZERS[kind]()
    from folio.completion import checkpoint_tokenizer  # these two import torch, which is slow
    from folio.initial import load_initial

    return checkpoint_tokenizer(load_initial(kind))


# Sources of text


def own_corpus(settings, folder):
    """Returns the Corpus of --input. `folder` is that of the dataset."""
    check_output([settings.input], folder)
    sources = find_sources(settings.input, settings.text_key)
    check_output([source.path for source in sources], folder)
    return corpus_of(sources, settings, settings.input)


def corpus_of(sources, settings, name):
    description = sources[0].name if len(sources) == 1 else f"{name} ({len(sources)} files)"
    whole_words = settings.allow_special or settings.kind not in ("char", "byte")
    return Corpus(sources, description, settings.allow_special, whole_words)


def check_output(paths, folder):
    """Raises UserError if a dataset in `folder` would replace its text or become part of it."""
    target = Path(os.path.realpath(folder))
    for path in paths:
        real = Path(os.path.realpath(path))
        if target.is_relative_to(real):
            raise UserError(f"{folder} is inside the folder of the text: move the text elsewhere")
        if real.parent == target and real.suffix in (".bin", ".json", ".part"):
            raise UserError(f"{path} would be replaced by the dataset: rename it")


def known_corpus(name, settings):
    """Returns the Corpus of a dataset that folio provides."""
    if name not in KNOWN:
        hint = nearest(name, KNOWN, f"; datasets that do not need it: {', '.join(KNOWN)}")
        raise UserError(f"dataset {name} needs --input=FILE_OR_FOLDER{hint}")
    if name in ON_THE_HUB:
        from folio.hub_corpora import hub_sources  # imported here because it is optional

        sources = hub_sources(name, settings.max_tokens, settings.text_key)
        return corpus_of(sources, settings, name)
    source = python_docs() if name == "pydocs" else shakespeare(settings.url)
    return corpus_of([source], settings, name)


if __name__ == "__main__":
    process.run(main)
