"""Show in a browser what a model does: generate, inspect and compare.

    python -m tools.playground --out_dir=out-shakespeare-char-fast

It needs gradio and matplotlib, but no network.
"""

import os
import socket
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from folio.cli import process
from folio.cli.errors import UserError
from folio.cli.settings import load_settings, setting

USER_NAME = "folio"
LOCAL_HOSTS = ("127.0.0.1", "localhost")  # only this machine can reach them


@dataclass(frozen=True)
class PlaygroundConfig:
    """Serve a page on which to generate, inspect and compare texts of trained models."""

    out_dir: str = setting("out", "run that is selected first", scope="files")
    host: str = setting("127.0.0.1", "address to listen on; others need a FOLIO_PASSWORD")
    port: int | None = setting(None, "port; None: the first free one from 7860 on", "[1, 65535]")

    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps", group="Machine")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "data type of the weights"
    )

    def __post_init__(self):
        if self.host not in LOCAL_HOSTS and not os.environ.get("FOLIO_PASSWORD"):
            raise ValueError(f"--host={self.host} needs a password: set FOLIO_PASSWORD")


process.start(__name__, PlaygroundConfig, GOMP_SPINCOUNT="10000")  # see sample.py

from folio.checkpoint.run_dir import RunDir
from folio.hardware.device import resolve_device


def main(argv=None):
    settings = load_settings(PlaygroundConfig, argv, {"device": resolve_device})
    run_dir = RunDir(settings.out_dir)
    if not run_dir.exists():
        run_dir.load_best()  # raises an error that lists the runs
    for name in ("gradio", "matplotlib"):
        if not find_spec(name):
            raise UserError(f"the playground needs {name}: pip install gradio matplotlib")
    login = f" as user {USER_NAME}" if os.environ.get("FOLIO_PASSWORD") else ""
    print(f"open {serve(settings)} in a browser{login}; Ctrl-C stops the server", flush=True)
    threading.Event().wait()


def serve(settings):
    """Starts the server in other threads. Returns the URL of the page."""
    # Fails at once if the address is not this machine's; gradio would try 100 ports, 5 s each.
    socket.create_server((settings.host, settings.port or 0)).close()
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"  # gradio calls only its own server
    from starlette.middleware import Middleware, trustedhost

    from tools.playground.page import THEME, build_page
    from tools.playground.texts import make_model_loader

    load_model = make_model_loader(settings.device, settings.dtype)
    page = build_page(load_model, str(RunDir(settings.out_dir).folder))
    password = os.environ.get("FOLIO_PASSWORD")  # others can see the flags of a process
    # Refuses pages of another host whose name is resolved to this machine.
    hosts = Middleware(trustedhost.TrustedHostMiddleware, allowed_hosts=LOCAL_HOSTS)
    page.launch(
        server_name=settings.host,
        server_port=settings.port,
        auth=(USER_NAME, password) if password else None,
        app_kwargs={"middleware": [] if password else [hosts]},
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        footer_links=[],
        run_history=False,
        max_file_size=1,  # nothing is uploaded
        theme=THEME,
    )
    if settings.host == "0.0.0.0":  # all addresses; gradio names localhost
        return page.local_url.replace("localhost", socket.gethostname())
    return page.local_url


if __name__ == "__main__":
    process.run(main, has_threads=True)
