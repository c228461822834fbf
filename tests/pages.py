"""The playground's server and page, for tests in a browser."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

from folio.settings import ROOT

SECONDS = 15  # for anything on the page, on a loaded machine


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A process that serves the playground of the runs in a folder."""

    def __init__(self, folder, *flags, port=None):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}/"
        command = [sys.executable, "-m", "tools.playground", "--out_dir=out-a"]
        self._process = subprocess.Popen(
            [*command, f"--port={self.port}", *flags],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self):
        line = self._process.stdout.readline()
        assert line.startswith("open "), self.end()

    def end(self, number=None, seconds=30):
        """Sends a signal, if any; returns the status and stderr of the process after its end."""
        if number:
            self._process.send_signal(number)
        try:
            _, errors = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        return self._process.returncode, errors

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process.poll() is None:
            self.end(signal.SIGKILL)


class Playground:
    """The page in a tab of a browser."""

    def __init__(self, browser, url):
        self.tab = browser.new_page()
        self.tab.set_default_timeout(1000 * SECONDS)
        self.hosts, self.problems = set(), []
        self.tab.on("request", lambda request: self.hosts.add(host_of(request.url)))
        self.tab.on("pageerror", lambda error: self.problems.append(str(error)))
        self.tab.on("console", self._note)
        self.tab.goto(url)
        self.button("Generate").wait_for()

    def _note(self, message):
        if message.type == "error":
            self.problems.append(message.text)

    def button(self, name):
        return self.tab.get_by_role("button", name=name, exact=True)

    def field(self, name):
        """Returns the input whose label starts with `name`, of the tab that is open."""
        return self.tab.get_by_label(re.compile(rf"^\s*{name}")).locator("visible=true").first

    def open(self, name):
        self.tab.get_by_role("tab", name=name, exact=True).click()

    def fill(self, **settings):
        if not self.field("top_k").count():
            self.button("more settings ▼").click()
            self.field("top_k").wait_for()
        for name, value in settings.items():
            self.field(name).fill(str(value))

    def generate(self, **settings):
        self.fill(**settings)
        self.button("Generate").click()

    def stop(self):
        """Stops a text. Until the server has answered, gradio ignores the button Generate."""
        with self.tab.expect_response("**/cancel"):
            self.button("Stop").click()

    def choose(self, label, name):
        """Selects a model in the list `label`, as soon as it is there."""
        option = self.tab.get_by_role("option", name=name, exact=True)

        def is_listed():
            self.field(label).click()
            return option.count()

        eventually(is_listed, self.tab)
        option.click()

    def text(self, number=0):
        """Returns the text in a view of tokens."""
        view = self.tab.locator(".tokens").locator("visible=true").nth(number)
        script = "nodes => nodes.map(node => node.textContent).join('')"
        return view.locator(".token").evaluate_all(script)

    def shows(self, text, number=0):
        """Waits until a view of tokens has a text; fails with both."""
        with contextlib.suppress(TimeoutError):
            eventually(lambda: self.text(number) == text, self.tab)
        assert self.text(number) == text, f"{self.text(number)!r} is not {text!r}"

    def says(self, message):
        """Waits until the page has a message that starts so; returns all of it."""
        found = self.tab.get_by_text(re.compile(f"^{re.escape(message)}")).locator("visible=true")
        found.first.wait_for()
        return found.first.inner_text()

    def select_token(self, index):
        """Selects a token of the text; returns the labels of the alternatives."""
        self.tab.locator(".tokens .token").nth(index).click()
        self.says("likely tokens in place of")
        labels = self.tab.locator("label:has([type=radio]) >> visible=true")
        return [each.strip() for each in labels.all_inner_texts()]


def host_of(url):
    return url.split("/")[2] if url.startswith(("http", "ws")) else "none"


def eventually(condition, tab):
    """Waits until condition() is true, while the browser goes on. Raises TimeoutError."""
    end = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the condition did not become true")
        tab.wait_for_timeout(50)
