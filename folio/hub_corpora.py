"""Corpora on the Hugging Face hub: Parquet files of a fixed revision, kept in the client's cache.

The variables in folio/hub.py apply.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from folio.dataset import DATA
from folio.errors import UserError
from folio.hub import check_download, client, explained
from folio.sources import Source

TOKEN_BYTES = 2  # of GPT-2's ids
MARGIN = 1.25  # more text than max_tokens needs, as files and tokenizers differ


@dataclass(frozen=True)
class HubCorpus:
    """A dataset on the hub. `tokens` is its number of GPT-2 tokens, about."""

    repository: str
    revision: str
    folder: str  # of the Parquet files
    tokens: int


CORPORA = {
    "openwebtext": HubCorpus(
        "Skylion007/openwebtext",
        "79d93d786212f7344586290adb811d4ae6a1762c",
        "plain_text",
        9_040_017_095,  # in nanoGPT's preparation
    ),
    "fineweb_edu": HubCorpus(
        "HuggingFaceFW/fineweb-edu",
        "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9",
        "sample/10BT",
        10_000_000_000,
    ),
}


@dataclass(frozen=True)
class HubSource(Source):
    """A Parquet file of a corpus, which is downloaded when it is first read.

    num_bytes: its size.
    digest: its sha256.
    """

    corpus: HubCorpus | None = None
    num_bytes: int = 0
    digest: str = ""

    @property
    def size(self):
        return self.num_bytes

    def stamp(self):
        """Returns plain data that identifies the content."""
        return [self.name, self.num_bytes, self.digest]

    def sha256(self):
        """Returns the hash of the file's bytes, without a download."""
        return self.digest

    def is_cached(self):
        """Whether the file was downloaded before."""
        place = self._place()
        return isinstance(_client(self.name).try_to_load_from_cache(**place), str)

    def local_path(self):
        """Returns the path of the file in the cache. Raises UserError if the download fails."""
        library, started = _client(self.name), time.time()
        with explained(self.name, f"datasets/{self.corpus.repository}", self.corpus.revision):
            path = Path(library.hf_hub_download(**self._place()))
        check_download(path, started)
        return path

    def _place(self):
        """Returns the arguments of the client's functions for a file."""
        corpus = self.corpus
        kind = {"repo_type": "dataset", "revision": corpus.revision}
        return {"repo_id": corpus.repository, "filename": self.path.as_posix()} | kind


def hub_sources(name, max_tokens=None, text_key="text"):
    """Returns the HubSources of one of CORPORA, sorted by path.

    Raises UserError if the hub cannot be reached, or if the disk has no room for the files that
    are not in the cache and for the token files.

    Args:
        max_tokens: return the first files only, which contain at least as many tokens. None: all.
    """
    corpus, library = CORPORA[name], _client(name)
    with explained(name, f"datasets/{corpus.repository}", corpus.revision):
        found = library.HfApi().list_repo_tree(
            corpus.repository, corpus.folder, revision=corpus.revision, repo_type="dataset"
        )
        files = sorted(
            (each for each in found if each.path.endswith(".parquet")), key=lambda each: each.path
        )
    total, sources, tokens = sum(file.size for file in files), [], 0
    for file in files:
        if max_tokens and tokens >= MARGIN * max_tokens:
            break
        tokens += corpus.tokens * file.size / total
        label = f"{corpus.repository}/{file.path}"
        digest = file.lfs.sha256 if file.lfs else file.blob_id
        sources.append(HubSource(Path(file.path), text_key, label, corpus, file.size, digest))
    _check_space(name, sources, min(tokens, max_tokens or tokens))
    return sources


def _client(name):
    return client(name, "huggingface_hub pyarrow")


def _check_space(name, sources, tokens):
    """Raises UserError if a disk has no room for what is downloaded and written."""
    from huggingface_hub import constants

    folder = DATA / name
    written = sum(path.stat().st_size for path in folder.glob("*.part"))  # by a killed process
    needed = {
        Path(constants.HF_HUB_CACHE): sum(each.size for each in sources if not each.is_cached()),
        folder: max(0, int(TOKEN_BYTES * tokens) - written),
    }
    disks = {}  # {device: (an existing folder, names of folders, bytes)}
    for place, size in needed.items():
        absolute = place.absolute()
        existing = next(each for each in (absolute, *absolute.parents) if each.exists())
        device = existing.stat().st_dev
        _, names, sizes = disks.get(device, (None, (), 0))
        disks[device] = existing, (*names, str(place)), sizes + size
    for existing, names, size in disks.values():
        free = shutil.disk_usage(existing).free
        if size > free:
            raise UserError(
                f"{name} needs {size / 1e9:.1f} GB of disk space in {' and '.join(names)}, but "
                f"{free / 1e9:.1f} GB are free; use a smaller --max_tokens, or set HF_HOME to a "
                "folder on another disk for the downloads"
            )
