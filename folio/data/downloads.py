"""Texts that folio provides, and datasets of the Hugging Face hub.

The files of a dataset are kept in the cache of the hub's client; its variables apply: HF_HOME
(cache), HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

import hashlib
import platform
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from folio.cli.errors import UserError, cause_of
from folio.cli.files import is_file, lock_folder, write_atomically
from folio.data.dataset import DATA
from folio.data.sources import TABLES, Source

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TIMEOUT_S = (10, 30)  # to connect, and between received bytes

ON_THE_HUB = {  # dataset: (address, subset)
    "openwebtext": (
        "hf:Skylion007/openwebtext@79d93d786212f7344586290adb811d4ae6a1762c",
        "plain_text",
    ),
    "fineweb_edu": (
        "hf:HuggingFaceFW/fineweb-edu@87f09149ef4734204d70ed1d046ddc9ca3f2b8f9",
        "sample/10BT",
    ),
}
SPLIT_WORDS = ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval")
PACKAGES = "huggingface_hub pyarrow"
FILE_BYTES = 6  # per token; no format needs more
SHOWN = 20  # names in a message at most


# Texts that folio provides


def shakespeare():
    """Returns a Source of tiny Shakespeare, which is downloaded if it is missing."""
    path = DATA / "shakespeare_char" / "input.txt"  # for all tokenizers
    is_missing = not is_file(path)
    content = download(path) if is_missing else path.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
        raise UserError(
            f"{SHAKESPEARE_URL if is_missing else path} is not tiny Shakespeare (wrong sha256); "
            f"put that at {path}, or use your own text with --input=FILE --dataset=NAME"
        )
    if is_missing:
        _write(path, content)
    return Source(path)


def download(path):
    """Returns the bytes of tiny Shakespeare; `path` is where a user can put the file otherwise."""
    import requests  # imported here because other datasets do not need it

    try:
        response = requests.get(SHAKESPEARE_URL, timeout=TIMEOUT_S)
        response.raise_for_status()
    except OSError as error:  # the type of all errors of requests
        raise UserError(
            f"cannot download tiny Shakespeare ({cause_of(error)}); put {SHAKESPEARE_URL} at "
            f"{path}, or use your own text with --input=FILE --dataset=NAME, or --dataset=pydocs"
        ) from error
    return response.content


def python_docs():
    """Returns a Source of the language reference that Python includes for help()."""
    from pydoc_data import topics

    path = DATA / "pydocs" / "input.txt"
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    _write(path, text.encode())
    return Source(path, label=f"pydoc_data.topics of Python {platform.python_version()}")


def _write(path, content):
    with lock_folder(path.parent), write_atomically(path) as [file]:
        file.write(content)


# The Hugging Face hub


@dataclass(frozen=True)
class HubSource(Source):
    """A table of a dataset on the hub, which is downloaded when it is first read.

    repository, revision: of the dataset.
    num_bytes, digest: size and hash of the file.
    """

    repository: str = ""
    revision: str = ""
    num_bytes: int = 0
    digest: str = ""

    @property
    def size(self):
        return self.num_bytes

    def sha256(self):
        """Returns the hash of the file's bytes, without a download."""
        return self.digest

    def local_path(self):
        """Returns the path of the file in the cache. Raises UserError if the download fails."""
        with hub_client(self.name, PACKAGES) as library:
            return Path(
                library.hf_hub_download(
                    self.repository, str(self.path), repo_type="dataset", revision=self.revision
                )
            )


def hub_sources(address, subset, split, text_key, max_tokens=None):
    """Returns the HubSources of a split of a dataset, sorted by path.

    Raises UserError if the hub cannot be reached or has no such dataset, subset or split.

    Args:
        address: such as hf:ORG/NAME or hf:ORG/NAME@REVISION.
        subset: folder of the dataset, usually named after a configuration. None: the only one.
        split: "train" or another word in the names of the files or of their folders.
        max_tokens: return the first files only, which contain at least as many tokens. None: all.
    """
    repository, _, revision = address.removeprefix("hf:").partition("@")
    with hub_client(address, PACKAGES) as library:
        hub = library.HfApi()
        commit = hub.dataset_info(repository, revision=revision or None).sha
        found = hub.list_repo_tree(repository, recursive=True, revision=commit, repo_type="dataset")
        files = {PurePosixPath(each.path): each for each in found if hasattr(each, "size")}
    sources, num_bytes = [], 0
    for path in data_files(files, address, subset, split):
        if max_tokens and num_bytes >= FILE_BYTES * max_tokens:
            break
        file, label = files[path], f"{repository}/{path}"
        digest = file.lfs.sha256 if file.lfs else file.blob_id
        sources.append(HubSource(path, text_key, label, repository, commit, file.size, digest))
        num_bytes += file.size
    return sources


def data_files(paths, address, subset, split):
    """Returns the sorted paths of the tables of a split, by the conventions of the hub.

    The name of a split is a word in the name of a file or of its folder, such as
    plain_text/train-00000-of-00002.parquet; without such words, all files are training data. Where
    there are several formats, they are copies of each other. Raises UserError if none is found.
    """
    for suffix in TABLES:
        tables = [path for path in paths if path.name.lower().endswith(suffix)]
        if tables:
            break
    else:
        raise UserError(
            f"{address} has no files with {', '.join(TABLES)}; the hub has a converted copy of "
            f"most datasets: --input={address.partition('@')[0]}@refs/convert/parquet"
        )
    inside = [path for path in tables if path.is_relative_to(subset or "")]
    words = {path: set(re.split(r"[\W_]+", str(path.relative_to(subset or "")))) for path in inside}
    known = {split for split in SPLIT_WORDS if any(split in found for found in words.values())}
    chosen = [path for path in inside if split in words[path] or (split == "train" and not known)]
    if not chosen or (subset is None and len({path.parent for path in chosen}) > 1):
        folders = sorted({str(path.parent) for path in tables})
        raise UserError(
            f"{address} has several or no folders with subset {subset} and split {split}; choose "
            f"--subset from {', '.join(folders[:SHOWN])} and --split from "
            f"{', '.join(sorted(known)) or 'train'}"
        )
    return sorted(chosen)


@contextmanager
def hub_client(name, packages):
    """Yields the module huggingface_hub. Turns its exceptions into UserErrors.

    Their messages name the fix, such as access to a private model or a variable to change.

    Args:
        name: what is downloaded.
        packages: those that are needed for it.
    """
    try:
        import huggingface_hub  # imported here because it is optional
    except ImportError as error:
        raise UserError(f"{name} needs: pip install {packages}") from error
    try:
        yield huggingface_hub
    except Exception as error:  # the client, its HTTP library and the disk can raise anything
        message = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"cannot download {name}: {message}") from error
