"""Models on the Hugging Face hub, through huggingface_hub, which keeps them in its cache.

Its variables apply: HF_HOME (cache), HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

import re
from contextlib import contextmanager
from pathlib import Path

from folio.errors import UserError

MODELS = {  # nanoGPT's names: ids on the hub
    name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
}
# never pytorch_model.bin, a pickle that can execute code
FILES = ("*.json", "model.safetensors", "model-*-of-*.safetensors")
ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


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
    model, _, revision = name.partition("@")
    with client(name, "huggingface_hub safetensors tokenizers") as huggingface_hub:
        folder = huggingface_hub.snapshot_download(
            MODELS.get(model, model),
            revision=revision or None,
            allow_patterns=list(FILES),
            ignore_patterns=["*/*"],  # variants in subfolders
        )
    return Path(folder)


@contextmanager
def client(name, packages):
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
