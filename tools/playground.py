"""Show in a browser what a model does: generate, inspect and compare.

    python -m tools.playground --out_dir=out-shakespeare-char-fast

It needs gradio and matplotlib, but no network.
"""

import os
import socket
import sys
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from folio import process
from folio.errors import UserError
from folio.fields import setting
from folio.settings import load, parse_arguments

MODULES = ("gradio", "matplotlib")
USER = "folio"
LOCAL = ("127.0.0.1", "::1", "localhost")  # only this machine can reach them
WARNING = (
    "warning: anyone who can reach this machine can use the page and see its runs; "
    "--password=PASSWORD protects it"
)


@dataclass(frozen=True)
class PlaygroundConfig:
    """Serve a page on which to generate, inspect and compare texts of trained models."""

    out_dir: str | None = setting(
        None, "run that is selected first; None: the most recently saved", scope="files"
    )
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0: all of this machine")
    port: int | None = setting(None, "port; None: the first free one from 7860 on", "[1, 65535]")
    password: str | None = setting(None, f"password of the page; the user name is {USER}")

    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps", group="Machine")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "data type of the weights"
    )

    def __post_init__(self):
        for name in ("host", "password"):
            if getattr(self, name) == "":
                raise UserError(f"the {name} is empty")


if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # see sample.py
    process.start(parse_arguments, PlaygroundConfig)  # --help must not wait for torch

from folio.device import resolve_device
from folio.run_dir import RunDir


def main(argv=None):
    settings = load(PlaygroundConfig, argv, {"device": resolve_device})
    if missing := [name for name in MODULES if not find_spec(name)]:
        raise UserError(f"the playground needs {missing[0]}: pip install {' '.join(MODULES)}")
    check_address(settings.host, settings.port or 0)
    url = serve(settings)
    if settings.host not in LOCAL and settings.password is None:
        print(WARNING, file=sys.stderr)
    print(f"open {url} in a browser; Ctrl-C stops the server", flush=True)
    threading.Event().wait()


def serve(settings):
    """Starts the server in other threads. Returns the URL of the page."""
    for name in [name for name in os.environ if name.startswith("GRADIO_")]:
        del os.environ[name]  # could turn on sharing, for example
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"  # gradio calls only its own server
    from tools.page import THEME, build, checkpoints
    from tools.texts import Models

    path = first_checkpoint(settings.out_dir, checkpoints())
    page = build(Models(settings.device, settings.dtype), path)
    page.launch(
        server_name=f"[{settings.host}]" if ":" in settings.host else settings.host,
        server_port=settings.port,
        auth=(USER, settings.password) if settings.password else None,
        share=False,
        ssr_mode=False,
        quiet=True,
        prevent_thread_lock=True,
        footer_links=[],
        run_history=False,
        max_file_size=1,  # nothing is uploaded
        theme=THEME,
    )
    return page.local_url


def first_checkpoint(out_dir, paths):
    """Returns the path of a run's best checkpoint, or of its newest if it has no best.

    `out_dir` None is the run with the newest of the checkpoints `paths`. Raises UserError if there
    is none.
    """
    if out_dir is None:
        if not paths:
            raise UserError(
                "there is no trained model in this folder: train one (python train.py "
                "config/shakespeare_char_fast.py), or specify the folder of one with --out_dir"
            )
        out_dir = os.path.dirname(max(paths, key=os.path.getmtime))
    run = RunDir(os.path.relpath(out_dir))  # as in the list of checkpoints
    if not run.exists():
        run.load_best()  # whose error lists the runs
    return str(run.best if run.best.is_file() else run.last)


def check_address(host, port):
    """Raises UserError if a server cannot listen on an address. Port 0: on any port."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        reason = f"{host}, port {port or 'any'}: {error.strerror}"
        raise UserError(f"cannot listen ({reason}); choose another --port or --host") from error


if __name__ == "__main__":
    process.run(main, has_threads=True)
