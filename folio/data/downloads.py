"""Texts that folio provides, and datasets of the Hugging Face hub.

The files of a dataset are kept in the cache of the hub's client; its variables apply: HF_HOME
(cache), HF_TOKEN, HF_ENDPOINT. Files are listed first, which HF_HUB_OFFLINE prevents.
"""

import hashlib
import math
import os
import platform
import re
from collections import Counter
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from folio.cli.errors import UserError, as_user_error, import_optional
from folio.cli.files import lock_folder, write_atomically
from folio.data.dataset import DATA_FOLDER
from folio.data.sources import TABLE_SUFFIXES, Source, table_suffix

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_BYTES = 1_115_394
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TIMEOUT_S = (10, 30)  # to connect, and between received bytes

OPENWEBTEXT = "hf:Skylion007/openwebtext@79d93d786212f7344586290adb811d4ae6a1762c"
FINEWEB_EDU = "hf:HuggingFaceFW/fineweb-edu@87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
SPLIT_WORDS = {  # {split: words for it in names of files}
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
METADATA = re.compile(r"dataset_infos?\.json|state\.json|cache-.*\.arrow")  # names of files
SPLIT_NAMES = set().union(*SPLIT_WORDS.values())
MAX_CHARACTERS_PER_TOKEN = 6  # of a text; GPT-2's tokens have 4.5 in English


def load_shakespeare():
    """Returns the Source of tiny Shakespeare, which is downloaded if its file is missing."""
    path = DATA_FOLDER / "shakespeare_char" / "input.txt"  # for all tokenizers
    if os.path.isfile(path):
        return Source(path)
    others = "your own text with --input=FILE --dataset=NAME, or --dataset=pydocs"
    refusal = f"cannot download tiny Shakespeare: save {SHAKESPEARE_URL} as {path}, or use {others}"
    with as_user_error(refusal, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        content = _download(SHAKESPEARE_URL, SHAKESPEARE_BYTES)
        if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
            raise OSError("wrong sha256")  # such as the page of a proxy
    return _write(path, content)


def _download(url, size):
    """Returns the bytes of a file of `size` bytes. Raises OSError with the cause in words."""
    import requests  # imported here because other datasets do not need it

    content = b""
    try:
        response = requests.get(url, timeout=TIMEOUT_S, stream=True)
        if not response.ok:
            raise OSError(f"HTTP {response.status_code}")
        for part in response.iter_content(2**16):
            content += part
            if len(content) > size:
                raise OSError(f"more than {size:,} bytes")
    except (requests.RequestException, ValueError) as error:  # ValueError: a wrong redirect
        is_slow, host = "timed out" in str(error), urlsplit(url).hostname
        raise OSError("timed out" if is_slow else f"the connection to {host} failed") from error
    return content


def load_pydocs():
    """Returns the Source of the language reference that Python includes for help()."""
    from pydoc_data import topics

    version = platform.python_version()
    path = DATA_FOLDER / "pydocs" / f"python-{version}.txt"  # input.txt can be a text of the user
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return _write(path, text.encode(), f"pydoc_data.topics of Python {version}")


def _write(path, content, name=None):
    """Writes the file of a Source, which is returned."""
    with lock_folder(path.parent), write_atomically(path) as [file]:
        file.write(content)
    return Source(path, name=name)


def load_hub(address, subset, split, text_key, encoding="utf-8", max_tokens=None):
    """Downloads the tables of a split of a dataset. Returns their Sources, sorted by path.

    Raises UserError if the hub cannot be reached or has no such dataset, subset or split.

    Args:
        address: such as hf:ORG/NAME or hf:ORG/NAME@REVISION.
        subset: folder of the dataset, usually named after a configuration. None: the only one.
        split: "train" or another word in the names of the files or of their folders.
        max_tokens: download only the first files that together have about as many tokens or more.
            None: all.
    """
    repository, _, revision = address.removeprefix("hf:").partition("@")
    with open_hub(address, "pyarrow") as library:
        hub = library.HfApi()
        commit = find_commit(hub, repository, revision, "dataset")
        options = {"revision": commit, "repo_type": "dataset"}
        entries = list(hub.list_repo_tree(repository, recursive=True, **options))
        sizes = {PurePosixPath(e.path): e.size for e in entries if hasattr(e, "size")}
    sources: list[Source] = []
    num_left = MAX_CHARACTERS_PER_TOKEN * (max_tokens or math.inf)
    paths = select_tables(sizes, address, subset, split)
    for path in paths:
        if num_left <= 0:
            break
        name = f"{repository}/{path}"
        with open_hub(name, "pyarrow") as library:
            local_path = library.hf_hub_download(repository, str(path), **options)
            size, listed = os.path.getsize(local_path), sizes[path]
            if size != listed:
                raise OSError(f"{local_path} has {size:,} bytes instead of {listed:,}: delete it")
        sources.append(Source(Path(local_path), text_key, name, encoding))
        if max_tokens and path != paths[-1]:
            for text, _ in sources[-1].read():
                num_left -= len(text)
                if num_left <= 0:
                    break
    return sources


def select_tables(sizes, address, subset, split):
    """Returns the sorted paths of the tables of a split, by the conventions of the hub.

    The name of a split is a word in the name of a file, or else of its folders, such as
    plain_text/train-00000-of-00002.parquet, or a synonym in SPLIT_WORDS. Without such words, all
    files in the format with the most bytes are training data; those in other formats are metadata.
    Files of a split in several formats are copies of each other, so only one format is used. Raises
    UserError if no table is selected.

    Args:
        sizes: {path: bytes} of all files.
    """
    tables = [p for p in sizes if table_suffix(p) and not METADATA.fullmatch(p.name)]
    if not tables:
        cause = f"{address} has no files with {', '.join(TABLE_SUFFIXES)}"
        copy = f"--input={address.partition('@')[0]}@refs/convert/parquet"
        raise UserError(f"{cause}; the hub has a converted copy of most datasets: {copy}")
    root = subset or ""
    words = {p: _words_of(p.relative_to(root)) for p in tables if p.is_relative_to(root)}
    if not words:
        raise _subset_error(f"{address} has no tables in {subset}", tables)
    split, known_splits = split.lower(), set().union(*words.values()) & SPLIT_NAMES
    synonyms = [group for group in SPLIT_WORDS.values() if split in group]
    chosen = {split} if split in known_splits or not synonyms else synonyms[0]
    selected = [path for path in words if _words_of(path) & chosen]
    if split == "train" and not selected:
        selected = _tables_of_main_format({path: sizes[path] for path in words})
        if any(words[path] & SPLIT_NAMES for path in selected):
            selected = []
    if not selected:
        splits = ", ".join(sorted(known_splits)) or "train"
        advice = f"for --input, choose --split from {splits}"
        raise UserError(f"{address} has no split {split}; {advice}")
    suffix = min(map(table_suffix, selected), key=TABLE_SUFFIXES.index)
    selected = [path for path in selected if table_suffix(path) == suffix]
    if subset is None and len({path.parent for path in selected}) > 1:
        raise _subset_error(f"{address} has several folders", selected)
    return sorted(selected)


def _tables_of_main_format(sizes):
    """Returns the tables, of {path: bytes}, in the format with the most bytes."""
    num_bytes: Counter[str] = Counter()
    for path, size in sizes.items():
        num_bytes[table_suffix(path)] += size
    [(suffix, _)] = num_bytes.most_common(1)
    return [path for path in sizes if table_suffix(path) == suffix]


def _words_of(path):
    """Returns the words in the name of a file and, if none is that of a split, of its folders."""
    *folders, name = (
        # Digits can follow the name of a split, but are a part of other names.
        set(re.split(r"[\W_]+", part)) | SPLIT_NAMES.intersection(re.split(r"[\W\d_]+", part))
        for part in str(path).lower().split("/")
    )
    return name if name & SPLIT_NAMES else name.union(*folders)


def _subset_error(cause, tables):
    """Returns a UserError that lists the folders of tables, without those of splits."""
    folders = {path.parent for path in tables}
    subsets = {str(path.parent if path.name in SPLIT_NAMES else path) for path in folders}
    return UserError(f"{cause}; choose --subset from {', '.join(sorted(subsets)[:20])}")


def find_commit(hub, repository, revision, repo_type):
    """Returns the commit that a branch, a tag or "" means, from the cache if the hub is away.

    Raises OSError if the server names something else, because the client makes a path of it.
    """
    found = hub.resolve_revision(repository, repo_type=repo_type, revision=revision or None)
    if not re.fullmatch("[0-9a-f]{40}", found.resolved):
        raise OSError(f"its server names {found.resolved!r} instead of a commit: check HF_ENDPOINT")
    return found.resolved


@contextmanager
def open_hub(name, others):
    """Yields the package huggingface_hub. Turns its exceptions into UserErrors.

    Their messages name the fix. `others` are the packages that reading the files of `name` needs.
    """
    library = import_optional("huggingface_hub", name, others)
    client = library.get_session()
    client.event_hooks = client.event_hooks | {"response": [_check_hash]}
    try:
        yield library
    except Exception as error:  # the client, its HTTP library and the disk can raise anything
        message = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"cannot download {name}: {message}") from error


def _check_hash(response):
    """Raises OSError if a server names a path as a file's hash, because the client writes there."""
    for header in ("x-linked-etag", "etag"):
        name = response.headers.get(header, "").lstrip("W/").strip('"')
        if ".." in name or os.path.isabs(name):
            raise OSError(f"its server names {name!r} as the hash of a file: check HF_ENDPOINT")


PROVIDED_DATASETS: dict[str, tuple[str, Any]] = {
    # name: (default tokenizer, function that returns the Source, or address and subset on the hub)
    "shakespeare_char": ("char", load_shakespeare),
    "shakespeare": ("gpt2", load_shakespeare),
    "pydocs": ("char", load_pydocs),
    "openwebtext": ("gpt2", (OPENWEBTEXT, "plain_text")),
    "fineweb_edu": ("gpt2", (FINEWEB_EDU, "sample/10BT")),
}
