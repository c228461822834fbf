"""Texts that folio provides: tiny Shakespeare, which it downloads, and Python's documentation."""

import hashlib
import io
import platform
import re

from folio.dataset import DATA
from folio.errors import UserError
from folio.files import is_file, locked, replacing
from folio.sources import Source, spooled

SHAKESPEARE_URLS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "https://storage.googleapis.com/download.tensorflow.org/data/shakespeare.txt",
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TIMEOUT_S = (10, 30)  # to connect, and between received bytes


def python_docs():
    """Returns a Source of the language reference that Python includes for help()."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    label = f"pydoc_data.topics of Python {platform.python_version()}"
    return spooled(io.BytesIO(text.encode()), label)


def shakespeare(url=None):
    """Returns a Source of tiny Shakespeare, which is downloaded if it is missing or has a URL."""
    path = DATA / "shakespeare_char" / "input.txt"  # for all tokenizers
    if url or not is_file(path):
        raw = download((url,) if url else SHAKESPEARE_URLS, path)
        with locked(path.parent), replacing(path) as [file]:
            file.write(raw)
    source = Source(path)
    if (sha256 := source.sha256()) != SHAKESPEARE_SHA256:
        raise UserError(
            f"{path} is not tiny Shakespeare (sha256 {sha256[:8]}…, expected "
            f"{SHAKESPEARE_SHA256[:8]}…): move it away, or use --input={path} --dataset=NAME"
        )
    return source


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
