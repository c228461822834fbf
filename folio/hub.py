"""Models on the Hugging Face hub, through huggingface_hub, which keeps them in its cache.

Its variables apply: HF_HOME (cache), HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

import hashlib
import re
import time
from contextlib import contextmanager
from pathlib import Path

from folio.errors import UserError, cause_of

MODELS = {  # nanoGPT's names: ids on the hub
    name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
}
FILES = (  # never pytorch_model.bin, a pickle that can execute code
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
SHA256_DIGITS = 64


def is_model_id(name):
    """Whether `name` is one of MODELS or has the form org/name, with or without @revision."""
    model = name.partition("@")[0]
    return model in MODELS or bool(ID.fullmatch(model))


def pretrained_folder(name):
    """Returns the Path of a local folder with a model's files; downloads those not in the cache.

    Args:
        name: one of MODELS or an id such as org/name, with or without @revision.

    Raises UserError if the model cannot be downloaded.
    """
    huggingface_hub = client(name, "huggingface_hub safetensors tokenizers")
    model, _, revision = name.partition("@")
    started = time.time()
    with explained(name, MODELS.get(model, model), revision):
        folder = huggingface_hub.snapshot_download(
            MODELS.get(model, model),
            revision=revision or None,
            allow_patterns=list(FILES),
            ignore_patterns=["*/*"],  # variants in subfolders
        )
    for path in Path(folder).glob("*.safetensors"):
        check_download(path, started)
    return Path(folder)


def client(name, packages):
    """Returns the module huggingface_hub. Raises UserError if it is missing.

    Args:
        packages: those that are needed for `name`.
    """
    try:
        import huggingface_hub  # imported here because it is optional
    except ImportError as error:
        raise UserError(f"{name} needs: pip install {packages}") from error
    return huggingface_hub


@contextmanager
def explained(name, repository, revision):
    """Turns the exceptions of huggingface_hub into UserErrors.

    Args:
        repository: id of a model, or datasets/ and the id of a dataset.
    """
    try:
        yield
    except Exception as error:  # the client, its HTTP library and the disk can raise anything
        raise UserError(
            f"cannot download {name}: {_explanation(error, repository, revision)}"
        ) from error


def _explanation(error, repository, revision):
    """Returns cause and fix of an exception of huggingface_hub."""
    from huggingface_hub import constants, errors

    cause, kind = error.__cause__, "dataset" if repository.startswith("datasets/") else "model"
    if isinstance(error, errors.GatedRepoError):
        url = f"{constants.ENDPOINT}/{repository}"
        return f"it is gated; request access at {url} and set HF_TOKEN to your access token"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the hub has no such {kind}; if it is private, set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the {kind} has no revision {revision}; omit @{revision} for the newest"
    if errors.OfflineModeIsEnabled in (type(error), type(cause)):
        return "it is not in the cache; unset HF_HUB_OFFLINE to download it once"
    if isinstance(error, errors.LocalEntryNotFoundError):
        reason = cause_of(cause or error)
        return f"{constants.ENDPOINT} cannot be reached ({reason}); check the network and try again"
    reason = getattr(error, "strerror", None) or cause_of(error)  # such as a full disk
    return f"{reason}; try again; complete files are kept"


def check_download(path, started):
    """Raises UserError if a file downloaded since `started` differs from the hub's.

    The client checks its size only. The cache stores large files under their sha256.
    """
    blob = path.resolve()
    if len(blob.name) != SHA256_DIGITS or blob.stat().st_mtime < started:
        return
    with open(blob, "rb") as file:
        is_intact = hashlib.file_digest(file, "sha256").hexdigest() == blob.name
    if not is_intact:
        for damaged in (path, blob):
            damaged.unlink()
        raise UserError(f"{path.name} was damaged in the download (wrong sha256); try again")
