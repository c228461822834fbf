"""Convert text to token files: data/<dataset>/{train.bin, val.bin, meta.json}.

    python prepare.py                                        tiny Shakespeare, by characters
    python prepare.py --dataset=shakespeare                  the same with GPT-2's tokenizer
    python prepare.py --dataset=pydocs                       Python's documentation, no network
    python prepare.py --input=FILE_OR_FOLDER --dataset=NAME  your own text
    python prepare.py --input=FILE --dataset=NAME --tokenizer=bpe --vocab_size=4096

The first 90% of the characters are the training split, the rest is the validation split.
folio/dataset.py defines the format.
"""

import hashlib
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from folio import process
from folio.errors import UserError, nearest, os_error
from folio.fields import setting
from folio.settings import load, parse_arguments

KNOWN = {"shakespeare_char": "char", "shakespeare": "gpt2", "pydocs": "char"}  # name: tokenizer

KINDS = ("char", "byte", "bpe", "gpt2")  # of tokenizers

SHAKESPEARE_URLS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "https://storage.googleapis.com/download.tensorflow.org/data/shakespeare.txt",
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TIMEOUT_S = (10, 30)  # to connect, and between received bytes


@dataclass(frozen=True)
class PrepareConfig:
    """Convert text to token files for train.py: data/<dataset>/{train.bin, val.bin, meta.json}."""

    dataset: str | None = setting(
        None,
        "shakespeare_char (default), shakespeare, pydocs, or a name for your own text",
        group="Corpus",
    )
    input: str | None = setting(None, "your own UTF-8 text: a file, or a folder of files")
    tokenizer: str | None = setting(
        None,
        "char (default), byte, bpe (trained on the text), gpt2 (default for shakespeare), or that "
        "of a checkpoint file or Hugging Face folder",
    )
    vocab_size: int | None = setting(
        None, "number of tokens of a bpe tokenizer; None: 2,048", "[257, 1000000]"
    )
    allow_special: bool = setting(False, "bpe and gpt2: <|endoftext|> in a text ends a document")
    url: str | None = setting(None, "alternative download URL for tiny Shakespeare")

    def __post_init__(self):
        if "" in (self.input, self.url):
            raise UserError("--input and --url must not be empty")
        if self.input and self.dataset is None:
            name = Path(self.input).resolve().stem
            raise UserError(f"--input needs a name for the dataset, such as --dataset={name}")
        if self.url and (self.input or self.dataset == "pydocs"):
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

from folio.corpus import Corpus
from folio.dataset import DATA, FILES, dataset_folder
from folio.dataset_writer import write_dataset
from folio.files import Text, is_file, locked, read_text, replacing
from folio.tokenizers import BPE_SIZE, TOKENIZERS, BPETokenizer, CharTokenizer


def main(argv=None):
    settings = load(PrepareConfig, argv)
    name = "shakespeare_char" if settings.dataset is None else settings.dataset
    folder = dataset_folder(name)
    if settings.input:
        check_output(settings.input, folder)
        corpus = read_input(settings.input)
    else:
        corpus = known_corpus(name, settings.url)
    if settings.allow_special:
        corpus = corpus.cut_at_end_of_text()
    tokenizer = tokenizer_for(corpus, settings.kind, settings.vocab_size)
    meta = write_dataset(folder, corpus, tokenizer)
    print(
        f"{folder}: {corpus.characters:,} characters of {corpus.source}, "
        f"vocabulary {meta['vocab_size']:,} ({tokenizer.kind}), "
        f"{meta['train']['tokens']:,} training and {meta['val']['tokens']:,} validation tokens"
    )


def tokenizer_for(corpus, kind, vocab_size=None):
    """Returns a tokenizer for a Corpus, of one of KINDS or from a path.

    A BPE is trained on the training split only.
    """
    if kind == "char":
        return CharTokenizer.from_text(*corpus.documents)
    if kind == "bpe":
        return BPETokenizer.train(corpus.split()[0], vocab_size or BPE_SIZE)
    if kind in KINDS:
        return TOKENIZERS[kind]()
    from folio.completion import checkpoint_tokenizer  # these two import torch, which is slow
    from folio.initial import load_initial

    return checkpoint_tokenizer(load_initial(kind))


# Sources of text


def read_input(source):
    """Returns the Corpus of a UTF-8 file, or of all files in a folder, sorted by path.

    Hidden files are skipped. Any other file that is not UTF-8 text is an error.
    """
    if "://" in source:
        raise UserError(f"--input takes a local file or folder: download {source} first")
    path = Path(source)
    if not os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        return one_document(read_text(source))
    files = sorted(files_in(path))
    if not files:
        raise UserError(f"{path} contains no files; hidden files are skipped")
    if odd := [f for f in files if not os.path.isfile(f)]:
        raise UserError(f"{odd[0]} is not a regular file; remove it from {path}")
    texts = [read_text(file) for file in files]
    sha256 = hashlib.sha256("".join(text.sha256 for text in texts).encode()).hexdigest()
    return Corpus([text.text for text in texts], f"{path} ({len(files)} files)", sha256)


def one_document(text):
    """Returns the Corpus of a Text."""
    return Corpus([text.text], text.source, text.sha256)


def files_in(folder):
    """Yields the paths of all files in a folder that are not hidden. Links are followed."""

    def fail(error):
        raise os_error("read", error.filename, error) from error

    seen = set()
    for at, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(at)
        is_loop = real in seen  # a link to a folder that was read already
        folders[:] = [] if is_loop else sorted(n for n in folders if not n.startswith("."))
        seen.add(real)
        yield from (Path(at, n) for n in names if not (is_loop or n.startswith(".")))


def check_output(path, folder):
    """Raises UserError if a dataset in `folder` would replace its text or become part of it."""
    path, target = (Path(os.path.realpath(each)) for each in (path, folder))
    if target.is_relative_to(path):
        raise UserError(f"{folder} is inside the folder of the text: move the text elsewhere")
    if path in (target / name for name in FILES):
        raise UserError(f"{path} would be replaced by the dataset: rename it")


def known_corpus(name, url=None):
    """Returns the Corpus of a dataset that folio provides."""
    if name not in KNOWN:
        hint = nearest(name, KNOWN, f"; datasets that do not need it: {', '.join(KNOWN)}")
        raise UserError(f"dataset {name} needs --input=FILE_OR_FOLDER{hint}")
    return one_document(python_docs() if name == "pydocs" else shakespeare(url))


def python_docs():
    """Returns the language reference that Python includes for help()."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    source = f"pydoc_data.topics of Python {platform.python_version()}"
    return Text(text, source, hashlib.sha256(text.encode()).hexdigest())


def shakespeare(url=None):
    """Returns tiny Shakespeare, after downloading it if it is missing or there is a URL."""
    path = DATA / "shakespeare_char" / "input.txt"  # for all tokenizers
    if url or not is_file(path):
        raw = download((url,) if url else SHAKESPEARE_URLS, path)
        with locked(path.parent), replacing(path) as [file]:
            file.write(raw)
    text = read_text(path)
    if text.sha256 != SHAKESPEARE_SHA256:
        raise UserError(
            f"{path} is not tiny Shakespeare (sha256 {text.sha256[:8]}…, expected "
            f"{SHAKESPEARE_SHA256[:8]}…): move it away, or use --input={path} --dataset=NAME"
        )
    return text


def download(urls, path):
    """Returns the bytes of tiny Shakespeare from the first address that provides them.

    Raises UserError with the alternatives if none does; `path` is where a user can put the file.
    """
    import requests  # imported here because it is too slow for --help
    from requests.adapters import HTTPAdapter, Retry

    retry = Retry(2, status_forcelist=(429, 500, 502, 503, 504), respect_retry_after_header=False)
    session, reasons = requests.Session(), []
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry))
    for url in urls:
        shown = re.sub(r"//[^/]*@", "//", url)  # without a password
        try:
            response = session.get(url, timeout=TIMEOUT_S)
            response.raise_for_status()
        except (OSError, ValueError) as error:  # requests' errors are OSErrors
            reasons.append(f"{shown}: {type(error).__name__}")
            continue
        if hashlib.sha256(response.content).hexdigest() == SHAKESPEARE_SHA256:
            return response.content
        reasons.append(f"{shown}: unexpected content")
    raise UserError(
        f"tiny Shakespeare could not be downloaded ({'; '.join(reasons)}). Put the file at {path}, "
        "or use your own text with --input=FILE --dataset=NAME, or --dataset=pydocs"
    )


if __name__ == "__main__":
    process.run(main)
