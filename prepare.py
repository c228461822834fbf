"""Convert text to token files: data/<dataset>/{train.bin, val.bin, meta.json}.

    python prepare.py                                        tiny Shakespeare, by characters
    python prepare.py --dataset=shakespeare                  the same with GPT-2's tokenizer
    python prepare.py --dataset=pydocs                       Python's documentation, no network
    python prepare.py --input=FILE_OR_FOLDER --dataset=NAME  your own text
    python prepare.py --input=hf:ORG/NAME --dataset=NAME --tokenizer=gpt2

Files of any size are read in constant memory. A dataset is replaced when the new one is complete.
folio/data/corpus.py defines the validation split, folio/data/dataset.py the format.
"""

import dataclasses
import importlib.util
import itertools
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from folio.cli import process
from folio.cli.errors import UserError, as_user_error, suggest
from folio.cli.settings import load_settings, setting

MIN_GPT2_TOKENS = 10_000_000  # of config/gpt2_fast.py
MAX_BPE_CHARACTERS = 2**24  # training a BPE takes up to 300 bytes of memory for each
MIN_BPE_CHARACTERS = 1_500_000  # of a text for which auto is bpe; docs/own-text.md has why
MIN_BPE_DISTINCT = 32  # distinct characters of such a text; DNA has fewer
MIN_OCCURRENCES = 20  # of a token, on average
MAX_COUNTED_TOKENS = 2**22
FAST_PRESET = "config/shakespeare_char_fast.py"
MIN_SORTED_LINES, SORTED_SHARE = 1000, 0.75  # of a list; in other texts, half are in order


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
        "your own text, JSON lines, CSV, TSV, Parquet or Arrow: a file, folder or glob "
        "pattern, or hf:ORG/NAME[@REVISION], a dataset on the Hugging Face hub",
    )
    val_input: str | None = setting(None, "validation text, like --input; hf: split validation")
    text_key: str = setting(
        "text",
        r"column with the text in a table, or a template such as 'Q: {question}\nA: {answer}'",
    )
    lines: bool = setting(False, "each line of a text is a document, such as a name or a SMILES")
    encoding: str = setting("utf-8", "encoding of text that is not UTF-8, such as cp1252")
    subset: str | None = setting(
        None, "hf: folder of the files, such as that of a configuration; None: the only one"
    )
    split: str = setting("train", "hf: split of the dataset that is read")
    max_tokens: int | None = setting(None, "stop after about as many tokens", "[1, inf)")
    val_fraction: float | None = setting(
        None, "part of the text for validation; None: 0.1, or 20 million characters", "(0, 1)"
    )
    test_fraction: float = setting(
        0.0, "part that follows it, for data/<dataset>/test.txt and sample.py --score", "[0, 1)"
    )
    tokenizer: str | None = setting(
        None,
        "auto (default for your own text: bpe, or char if it is better), char, byte, bpe (trained "
        "on the text), gpt2, or that of a checkpoint file, tokenizer.json or its folder",
    )
    vocab_size: int | None = setting(None, "tokens of bpe; None: by the text", "[257, 1000000]")
    allow_special: bool = setting(False, "bpe and gpt2: read special tokens in a text")

    def __post_init__(self):
        if self.input is not None and self.dataset is None:
            name = "".join(filter(str.isalnum, Path(self.input).resolve().stem)) or "own"
            raise ValueError(f"--input needs a name for the dataset, such as --dataset={name}")
        excludes = self.val_fraction or self.test_fraction
        if self.val_input is not None and (self.input is None or excludes):
            raise ValueError("--val_input needs --input, and no --val_fraction or --test_fraction")
        with as_user_error(f"Python has no encoding {self.encoding}", LookupError, UnicodeError):
            "".encode(self.encoding)
        if not self.text_key or set("{}") & set(re.sub(r"\{[^{}]+\}", "", self.text_key)):
            raise ValueError(f"--text_key={self.text_key} is empty or has an unmatched brace")
        is_hub = (self.input or "").startswith("hf:")
        if self.subset and not (is_hub or (self.val_input or "").startswith("hf:")):
            raise ValueError("--subset applies to hf:ORG/NAME only")
        if self.split != "train" and not is_hub:
            raise ValueError("--split applies to --input=hf:ORG/NAME only")
        if self.training_share <= 0:
            raise ValueError("--val_fraction and --test_fraction leave no training text")

    @property
    def training_share(self):
        """The approximate share of the text that is for training."""
        val_fraction = 0 if self.val_input else self.val_fraction or 0.1
        return 1 - (val_fraction + self.test_fraction)

    @property
    def kind(self):
        """The kind or the path of the tokenizer."""
        name, default = self.dataset or "shakespeare_char", "bpe" if self.vocab_size else "auto"
        if self.input is None and name in PROVIDED_DATASETS:
            default = PROVIDED_DATASETS[name][0]
        return self.tokenizer or default


# Handles --help and reports wrong flags before the slow imports. main() parses again.
process.start(__name__, PrepareConfig)

import numpy as np

from folio.cli.files import lock_folder, unescape
from folio.data.corpus import SAMPLE_CHARACTERS, Corpus
from folio.data.dataset import dataset_folder, finish_replacement, read_valid_meta
from folio.data.downloads import PROVIDED_DATASETS, load_hub
from folio.data.sources import TABLE_SUFFIXES, find_sources
from folio.data.tokenizer import TOKENIZERS, BPETokenizer, CharTokenizer, Tokenizer
from folio.data.writer import write_dataset


def main(argv=None):
    """Reads a corpus and writes a dataset: the token ids of both splits, then meta.json."""
    settings = load_settings(PrepareConfig, argv)
    name = "shakespeare_char" if settings.dataset is None else settings.dataset
    folder = dataset_folder(name)
    tokenizer = find_tokenizer(settings)  # a class if it is made from the corpus; None for auto
    corpus = find_corpus(name, settings)
    if tokenizer and settings.allow_special and tokenizer.end is not None:
        corpus.end_text = tokenizer.end_text
    with lock_folder(folder):
        check_folder(folder, corpus, settings)
        tokenizer, reason = scan_corpus(corpus, tokenizer, settings)
        meta = write_dataset(folder, corpus, tokenizer, settings.allow_special)
    ends, num_documents = corpus.split_ends, corpus.num_documents
    print(
        f"{folder}: {ends['test']:,} characters of {process.printable(corpus.description)}, "
        f"vocabulary {meta['vocab_size']:,} ({tokenizer.kind}{reason}), "
        f"{meta['train']['tokens']:,} training and {meta['val']['tokens']:,} validation tokens"
        + (f" including separators of {num_documents:,} documents" if num_documents > 1 else "")
    )
    arguments = training_arguments(name, settings.kind, meta["train"]["tokens"])
    if settings.test_fraction:
        out_dir = "out-shakespeare-char-fast" if arguments == FAST_PRESET else f"out-{name}"
        flags = [f"--out_dir={out_dir}", f"--score={folder / 'test.txt'}"]
        flags += score_flags(settings, has_ends=num_documents > 1 and tokenizer.end is not None)
        command = f"python sample.py {shlex.join(flags)}"
        print(f"test ({ends['test'] - ends['val']:,} of the characters): {command}")
    if num_empty_rows := sum(len(source.empty_rows) for source in corpus.all_sources):
        print(f"left out rows without text: {num_empty_rows:,}")
    ids = np.fromfile(folder / "train.bin", tokenizer.dtype, MAX_COUNTED_TOKENS)
    if settings.kind in ("auto", *TOKENIZERS) and (advice := advice_on_tokens(ids, tokenizer)):
        print(advice)
    is_text = len(corpus.all_sources) == 1 and not corpus.sources[0].suffix
    if is_text and not settings.lines and has_sorted_lines(corpus.sample()):
        print("the lines are sorted, and their end, the validation text, differs: use --lines")
    print(f"train: python train.py {arguments}")


def score_flags(settings, has_ends):
    """Returns the flags that score test.txt; `has_ends`: an end token separates its documents."""
    flags = ["--by_line"] * (has_ends and settings.lines)
    is_special = has_ends and not settings.lines  # the file has end tokens between documents
    return flags + ["--allow_special"] * (settings.allow_special or is_special)


def training_arguments(name, kind, tokens):
    """Returns the arguments of train.py that fit a dataset: its tokenizer and training tokens."""
    if (name, kind) == ("shakespeare_char", "char"):
        return FAST_PRESET
    preset = "own_text.py --minutes=2"
    if kind == "gpt2":
        is_large = tokens >= MIN_GPT2_TOKENS
        preset = "gpt2_fast.py" if is_large else "finetune_shakespeare.py --init_from=gpt2"
    flags = [f"--dataset={name}", f"--out_dir=out-{name}"]
    if os.path.isfile(kind) and not kind.endswith(".json"):  # a checkpoint
        flags.append(f"--init_from={kind}")
    return f"config/{preset} {shlex.join(flags)}"


# What the user names, and what may not be replaced


def find_corpus(name, settings) -> Corpus:
    """Returns the Corpus of a dataset. Raises UserError if its files do not fit the settings."""
    sources, val_sources = select_sources(name, settings.input, settings.split, settings), []
    if settings.val_input is not None:
        whole = dataclasses.replace(settings, max_tokens=None)
        val_sources = select_sources(name, settings.val_input, "validation", whole)
    paths = {os.path.realpath(source.name) for source in sources}
    if common := [s.name for s in val_sources if os.path.realpath(s.name) in paths]:
        raise UserError(f"{common[0]} is in --input and in --val_input: leave it out of one")
    if settings.text_key != "text" and not any(s.suffix for s in sources + val_sources):
        names = ", ".join(TABLE_SUFFIXES)
        raise UserError(f"--text_key applies to tables only, whose names end with {names}")
    is_file = settings.input is None and callable(PROVIDED_DATASETS[name][1])
    name = sources[0].name if is_file else settings.input or name
    options = f", subset {settings.subset}" if settings.subset else ""
    options += f", split {settings.split}" if settings.split != "train" else ""
    val_name = settings.val_input
    if name.startswith("hf:"):
        name += options
    elif options:  # of --val_input
        val_name += options
    corpus = Corpus(sources, name, val_sources, val_name, lines=settings.lines)
    tables = [source.name for source in corpus.all_sources if source.suffix]
    if settings.lines and tables:
        raise UserError(f"--lines applies to texts only: the rows of {tables[0]} are documents")
    corpus.val_fraction, corpus.test_fraction = settings.val_fraction, settings.test_fraction
    return corpus


def select_sources(name, address, split, settings):
    """Returns the Sources of a value of --input, or of a dataset that folio provides for None."""
    text_key, subset = unescape(settings.text_key), settings.subset
    if address is None:
        if name not in PROVIDED_DATASETS:
            known = ", ".join(PROVIDED_DATASETS)
            hint = suggest(name, PROVIDED_DATASETS, f"; datasets that do not need it: {known}")
            raise UserError(f"dataset {name} needs --input=FILE_OR_FOLDER{hint}")
        origin = PROVIDED_DATASETS[name][1]
        if callable(origin):
            return [origin()]
        address, subset = origin
    if address.startswith("hf:"):
        return load_hub(address, subset, split, text_key, settings.encoding, settings.max_tokens)
    if "://" in address:
        raise UserError(f"--input reads files: download {address}, and use the file's name")
    folder = dataset_folder(name)
    if os.path.isdir(address) and folder.resolve().is_relative_to(Path(address).resolve()):
        raise UserError(f"{folder} is inside the folder of the text: move the text elsewhere")
    sources = find_sources(address, text_key, settings.encoding)
    for path in (source.path for source in sources if source.path.name == "test.txt"):
        if read_valid_meta(path.with_name("meta.json")).get("test_fraction"):
            raise UserError(f"{path} is the test text of a dataset: leave it out")
    return sources


def check_folder(folder, corpus: Corpus, settings):
    """Raises UserError if a folder has files of the user, another program or another text."""
    finish_replacement(folder)
    meta_path, test_path = folder / "meta.json", folder / "test.txt"
    meta = read_valid_meta(meta_path)
    advice = "choose a different --dataset, or delete"
    if meta.get("source_sha256"):
        number = r" \(\d+ files?\)|(?<=^pydoc_data.topics of Python ).*"  # which can change
        names = (re.sub(number, "", name) for name in (meta["source"], corpus.description))
        old_name, name = map(os.path.normpath, names)  # IN/ is IN
        if old_name != name and meta["source_sha256"] != corpus.sha256():
            raise UserError(f"{folder} has a different text, {meta['source']}: {advice} the folder")
    own_paths = meta_path, folder / "train.bin", folder / "val.bin"
    if not meta and any(path.exists() for path in own_paths):
        files = "token files or a meta.json of a different program, or damaged ones"
        raise UserError(f"{folder} has {files}: {advice} them")
    if settings.test_fraction and test_path.exists() and not meta.get("test_fraction"):
        raise UserError(f"--test_fraction writes {test_path}, which exists: move it elsewhere")


# Tokenizers


def find_tokenizer(settings) -> Tokenizer | type[Tokenizer] | None:
    """Returns the class of a kind of tokenizer, or the tokenizer in a path; None for auto.

    Raises UserError if other settings do not fit it.
    """
    kinds = [kind for kind in TOKENIZERS if kind != "list"]  # which is not made from a text
    tokenizer_class = TOKENIZERS[settings.kind] if settings.kind in kinds else None
    is_auto = settings.kind == "auto"
    if not (is_auto or tokenizer_class or os.path.exists(settings.kind)):
        known = ", ".join(["auto", *kinds])
        raise UserError(f"--tokenizer must be {known} or an existing path, not {settings.kind}")
    if settings.allow_special and (is_auto or tokenizer_class and tokenizer_class.end is None):
        raise UserError("--allow_special needs --tokenizer=bpe, gpt2 or a path")
    if settings.vocab_size and settings.kind != "bpe":
        raise UserError(f"--vocab_size needs --tokenizer=bpe; the tokenizer is {settings.kind}")
    return None if is_auto else tokenizer_class or load_tokenizer_of(settings.kind)


def load_tokenizer_of(path) -> Tokenizer:
    """Returns the tokenizer of a checkpoint, of a tokenizer.json or of a folder with one."""
    from folio.pretrained.load import checkpoint_tokenizer, load_initial  # slow: imports torch
    from folio.pretrained.tokenizer_files import TOKENIZER_FILE, read_tokenizer

    if os.path.isdir(path):
        path = os.path.join(path, TOKENIZER_FILE)
    if path.endswith(".json"):
        return read_tokenizer(Path(path))
    return checkpoint_tokenizer(load_initial(path))


def scan_corpus(corpus: Corpus, tokenizer: Tokenizer | type[Tokenizer] | None, settings):
    """Returns the tokenizer of a Corpus, and why auto has chosen it. Finds its splits."""
    reason = ""
    if settings.max_tokens is not None:
        sample = corpus.sample()
        if tokenizer is None:
            is_whole = len(sample) < SAMPLE_CHARACTERS - len(corpus.separator)
            size = len(sample) if is_whole else settings.max_tokens
            tokenizer, reason = choose_tokenizer(set(sample), settings.training_share * size)
        corpus.max_characters = estimate_characters(sample, tokenizer, settings)
    characters = corpus.scan()
    if tokenizer is None:
        tokenizer, reason = choose_tokenizer(characters, corpus.split_ends["train"])
    if isinstance(tokenizer, type):
        tokenizer = build_tokenizer(tokenizer, corpus, characters, settings.vocab_size)
    return tokenizer, reason


def choose_tokenizer(characters, size):
    """Returns auto's class for a text of this size with these distinct characters, and why."""
    if len(characters) < MIN_BPE_DISTINCT:
        return CharTokenizer, f", for {len(characters)} distinct characters"
    if size < MIN_BPE_CHARACTERS:
        return CharTokenizer, f", for fewer than {MIN_BPE_CHARACTERS:,} training characters"
    if not importlib.util.find_spec("tokenizers"):
        return CharTokenizer, "; for bpe, which suits it better, python -m pip install tokenizers"
    return BPETokenizer, ", which suits this text better than char"


def build_tokenizer(tokenizer_class, corpus: Corpus, characters, vocab_size) -> Tokenizer:
    """Returns the tokenizer for a Corpus with these characters; `vocab_size` None: by its size.

    Raises UserError if the training text has fewer tokens than `vocab_size`.
    """
    if tokenizer_class is CharTokenizer:
        return CharTokenizer(characters)
    size = corpus.split_ends["train"]
    pieces = (piece.text for piece in corpus.read() if piece.split == "train")
    texts = itertools.islice(pieces, 0, None, 1 + size // MAX_BPE_CHARACTERS)  # evenly spread
    default_size = bpe_vocab_size(size, len(characters))
    tokenizer = tokenizer_class.from_texts(texts, vocab_size or default_size)
    if vocab_size and tokenizer.vocab_size < vocab_size:
        most = tokenizer.vocab_size
        cause = f"the training text has only {most} frequent pieces"
        raise UserError(f"{cause}: use --vocab_size={most} or less, or more text")
    return tokenizer


def bpe_vocab_size(size, num_distinct):
    """Returns the number of tokens for a training text of `size` characters.

    It is about the square root or the number of distinct characters, as a power of 2. More tokens
    are too rare to be learned, or take too much time in the output layer.
    """
    return 2 ** min(11, max(9, size.bit_length() // 2, num_distinct.bit_length()))


def has_sorted_lines(text):
    """Whether the lines of a text are in alphabetical order, like those of a list.

    Digits do not count, because dates and times order the lines of logs and chats.
    """
    lines = re.sub(r"\d", "", text).split("\n")
    in_order = sum(earlier < later for earlier, later in itertools.pairwise(lines))
    return len(lines) > MIN_SORTED_LINES and in_order > SORTED_SHARE * len(lines)


def advice_on_tokens(ids, tokenizer: Tokenizer):
    """Returns what makes training tokens hard to learn from, and the remedy, or None."""
    counts = np.bincount(ids)
    share, token = counts.max() / len(ids), tokenizer.decode([counts.argmax()])
    if share > 0.5:
        return f"{share:.0%} of the tokens are {token!r}: remove most, or little else is learned"
    if tokenizer.kind == "bpe" and len(ids) < MIN_OCCURRENCES * tokenizer.vocab_size:
        often = f"each token occurs {len(ids) / tokenizer.vocab_size:.1f} times on average"
        return f"{often}, too rarely to be learned: use more text or a smaller --vocab_size"
    return None


def estimate_characters(sample, tokenizer: Tokenizer | type[Tokenizer], settings):
    """Returns the number of characters with about max_tokens tokens, as many as in a sample."""
    if isinstance(tokenizer, type):
        size = bpe_vocab_size(settings.max_tokens, len(set(sample)))
        tokenizer = tokenizer.from_texts([sample], settings.vocab_size or size)
    sample = sample[: settings.max_tokens]  # the tokenizer may lack characters after it
    return settings.max_tokens * len(sample) // max(len(tokenizer.encode(sample)), 1)


if __name__ == "__main__":
    process.run(main)
