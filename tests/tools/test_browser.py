"""The playground in a real browser, with the server as its own process."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import tiny

import sample
import train
from folio.cli.settings import ROOT

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not BROWSER, reason="there is no Chromium")]
ENDLESS = 20_000  # tokens, which take longer than the test waits
TIMEOUT_S = 30  # for anything on the page, on a loaded machine


@pytest.fixture
def server(folder):
    """A process that serves the runs out-a and out-b of the current folder, and its URL."""
    pytest.importorskip("gradio")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    tiny.prepare_verse()
    for name, layers in ("out-a", 4), ("out-b", 2):
        train.main(tiny.flags(out_dir=name, n_layer=layers, n_embd=64, block_size=64, max_iters=20))
    command = [sys.executable, "-m", "tools.playground", "--out_dir=out-a", f"--port={port}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            yield process, process.stdout.readline().split()[1]
        finally:
            process.kill()


@pytest.fixture
def browser():
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield chromium
        chromium.close()


class Page:
    """The page in a tab of a browser."""

    def __init__(self, browser, url):
        self.tab, self.hosts, self.problems = browser.new_page(), set(), []
        self.tab.set_default_timeout(1000 * TIMEOUT_S)
        self.tab.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        self.tab.on("pageerror", lambda error: self.problems.append(str(error)))
        self.tab.goto(url)
        self.button("Generate").wait_for()

    def button(self, name):
        return self.tab.get_by_role("button", name=name, exact=True)

    def field(self, name):
        """Returns the visible input whose label starts with `name`."""
        return self.tab.get_by_label(re.compile(rf"^\s*{name}")).locator("visible=true").first

    def open(self, name):
        self.tab.get_by_role("tab", name=name, exact=True).click()

    def generate(self, **settings):
        for name, value in settings.items():
            self.field(name).fill(str(value))
        self.button("Generate").click()

    def tokens(self, number=0):
        """Returns the tokens of one of the texts."""
        return self.tab.locator(".tokens >> visible=true").nth(number).locator(".token")

    def text(self, number=0):
        return "".join(self.tokens(number).all_text_contents())

    def eventually(self, condition):
        """Waits until condition() is true, while the browser goes on."""
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < end, f"still not true; the text is {self.text()!r}"
            self.tab.wait_for_timeout(50)

    def shows(self, text, number=0):
        self.eventually(lambda: self.text(number) == text)

    def says(self, message):
        """Waits until the page has a message that starts so."""
        messages = self.tab.get_by_text(re.compile(f"^{re.escape(message)}"))
        messages.locator("visible=true").first.wait_for()

    def select_token(self, index):
        """Selects a token of the text; returns the labels of its alternatives."""
        self.tokens().nth(index).click()
        self.says("likely tokens in place of")
        labels = self.tab.locator("label:has([type=radio]) >> visible=true").all_inner_texts()
        return [label.strip() for label in labels]


def test_everything_that_the_page_can_do(server, browser, capsys):
    process, url = server
    page = Page(browser, url)

    def run_sample(run="out-a", **settings):
        """Returns what sample.py prints with these settings."""
        capsys.readouterr()
        flags = [f"--{name}={value}" for name, value in settings.items()]
        sample.main([f"--out_dir={run}", "--num_samples=1", *flags])
        return capsys.readouterr().out.removesuffix(f"\n{sample.SEPARATOR}\n")

    # A text is that of sample.py, and continues from an alternative.
    settings = {"max_new_tokens": 40, "seed": 7, "temperature": 1.1, "top_k": 9, "top_p": 0.9}
    settings |= {"min_p": 0.01, "repetition_penalty": 1.1, "context_stride": 3, "stop": "zz"}
    prompt = "Shall I\nmore"
    page.says("out-a/ckpt.pt: step 20")
    page.button("more settings ▼").click()
    page.generate(prompt=prompt, **settings)
    text = run_sample(start=prompt, **settings)
    page.shows(text)
    page.says("40 tokens, ")
    labels = page.select_token(20)
    assert len(labels) == 10
    choice = next(label for label in labels if label[0] not in (text[20], "\\", "␣"))
    page.tab.get_by_text(choice, exact=True).click()
    text = run_sample(start=text[:20] + choice[0], **settings)
    page.shows(text)

    # A mistake is explained and loses nothing.
    page.generate(top_k="many")
    page.says("--top_k must be int or None, not 'many'")
    assert page.text() == text
    page.field("top_k").fill("")

    # Two tabs generate at the same time. A stopped text stays.
    page.generate(max_new_tokens=ENDLESS)
    page.eventually(lambda: len(page.text()) > 60)
    other = Page(browser, url)
    other.generate(max_new_tokens=20, seed=4)
    other.shows(run_sample(max_new_tokens=20, seed=4))
    with page.tab.expect_response("**/cancel"):
        page.button("Stop").click()
    stopped = page.text()
    assert len(page.select_token(20)) == 10
    assert page.text() == stopped
    assert page.tab.locator(".token.selected").all_text_contents() == [stopped[20]]
    other.tab.close()

    # A pasted text is scored, and its attention drawn.
    page.open("Score")
    page.field("text").fill("more lovely\nand")
    page.button("Score").click()
    page.shows("more lovely\nand")
    page.says("loss ")
    page.button("Attention ▼").click()
    draw = page.button("Draw the attention of each head")
    draw.click()
    page.tab.locator(".matplotlib img").wait_for()
    page.field("layer").fill("9")
    draw.click()
    page.says("layer 9: there is no layer 9")

    # Two models continue a prompt. A new run is in the list when it is opened.
    shutil.copytree("out-b", "out-new", ignore=shutil.ignore_patterns("ckpt.pt"))
    page.open("Generate")
    page.generate(max_new_tokens=10, prompt="Shall", top_p="", stop="")
    settings |= {"max_new_tokens": 10, "top_k": 200, "top_p": 1.0, "start": "Shall"}
    del settings["stop"]
    page.shows(run_sample(**settings))
    page.open("Compare")
    page.field("prompt").fill("Thou")
    page.field("second model").click()
    page.tab.get_by_role("option", name="out-new").click()
    page.button("Generate with both").click()
    for number, run in enumerate(("out-a", "out-b")):
        page.shows(run_sample(run, **settings | {"start": "Thou"}), number)

    # Losses are updated while runs are trained.
    def is_listed(*cells):
        name = re.compile("^" + r"\s*".join(cells))
        return page.tab.get_by_role("row", name=name).count()

    page.open("Runs")
    page.eventually(lambda: is_listed("out-a") and is_listed("out-b"))
    image = page.tab.locator(".matplotlib img >> visible=true")
    source = image.get_attribute("src")
    with open("out-b/log.jsonl", "a") as log:
        event = {"event": "val", "step": 30, "tokens": 960, "loss": 0.1234, "elapsed_s": 4.0}
        log.write(f"{json.dumps(event)}\n")
    page.eventually(lambda: is_listed("out-b", "0.1234"))
    page.eventually(lambda: image.get_attribute("src") != source)

    # A model that a run has saved again is loaded again. Ctrl-C ends the server.
    shutil.copy("out-b/ckpt.pt", "out-a/ckpt.pt")
    page.open("Text")
    page.generate()
    page.shows(run_sample("out-b", **settings))
    page.generate(max_new_tokens=ENDLESS)
    page.eventually(lambda: len(page.text()) > 60)
    assert page.problems == []
    assert page.hosts == {url.split("/")[2]}  # nothing is requested from elsewhere
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 130
    assert process.stderr.read() == "tools.playground: interrupted\n"
