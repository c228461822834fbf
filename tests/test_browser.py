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
from folio.settings import ROOT

pytest.importorskip("gradio")
sync_api = pytest.importorskip("playwright.sync_api")
NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not BROWSER, reason="there is no Chromium")]
ENDLESS = 1_000_000  # tokens, which take many minutes
SECONDS = 30  # for anything on the page, on a loaded machine


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A process that serves the runs out-a and out-b of the current folder, and its URL."""
    steps = {"max_iters": 20, "eval_iters": 2, "eval_interval": 10, "learning_rate": 3e-3}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("browser"))
        tiny.prepare_verse()
        for name, layers in ("out-a", 4), ("out-b", 2):
            train.main(tiny.flags(out_dir=name, n_layer=layers, n_embd=64, block_size=64, **steps))
        command = [sys.executable, "-m", "tools.playground", "--out_dir=out-a", f"--port={port}"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environment, **pipes) as process:
            try:
                yield process, process.stdout.readline().split()[1]
            finally:
                process.kill()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(server, browser):
    """A function that opens the page in a new tab. At the end, checks what the tabs did."""
    pages = []

    def open_one():
        pages.append(Page(browser, server[1]))
        return pages[-1]

    yield open_one
    for page in pages:
        assert page.problems == []
        assert page.hosts == {server[1].split("/")[2]}  # nothing is requested from elsewhere
        page.tab.close()


@pytest.fixture
def page(open_page):
    return open_page()


@pytest.fixture
def sampled(capsys):
    """A function that returns what sample.py prints with these settings."""

    def printed(run="out-a", **settings):
        capsys.readouterr()
        flags = [f"--{name}={value}" for name, value in settings.items()]
        sample.main([f"--out_dir={run}", "--num_samples=1", *flags])
        return capsys.readouterr().out.removesuffix(f"\n{sample.SEPARATOR}\n")

    return printed


class Page:
    """The page in a tab of a browser."""

    def __init__(self, browser, url):
        self.tab, self.hosts, self.problems = browser.new_page(), set(), []
        self.tab.set_default_timeout(1000 * SECONDS)
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
        if not self.field("top_k").count():
            self.button("more settings ▼").click()
        for name, value in settings.items():
            self.field(name).fill(str(value))
        self.button("Generate").click()

    def tokens(self):
        return self.tab.locator(".tokens .token").locator("visible=true")

    def text(self, number=0):
        """Returns the text in a view of tokens."""
        view = self.tab.locator(".tokens").locator("visible=true").nth(number)
        script = "nodes => nodes.map(node => node.textContent).join('')"
        return view.locator(".token").evaluate_all(script)

    def eventually(self, condition):
        """Waits until condition() is true, while the browser goes on."""
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end, f"still not true; the text is {self.text()!r}"
            self.tab.wait_for_timeout(50)

    def shows(self, text, number=0):
        self.eventually(lambda: self.text(number) == text)

    def says(self, message):
        """Waits until the page has a message that starts so; returns all of it."""
        found = self.tab.get_by_text(re.compile(f"^{re.escape(message)}")).locator("visible=true")
        found.first.wait_for()
        return found.first.inner_text()

    def select_token(self, index):
        """Selects a token of the text; returns the alternatives."""
        self.tokens().nth(index).click()
        self.says("likely tokens in place of")
        return self.tab.locator("label:has([type=radio]) >> visible=true")


def test_a_text_is_that_of_sample_and_continues_from_an_alternative(page, sampled):
    settings = {"max_new_tokens": 40, "seed": 7, "temperature": 1.1, "top_k": 9, "top_p": 0.9}
    settings |= {"min_p": 0.01, "repetition_penalty": 1.1, "context_stride": 3, "stop": "zz"}
    prompt = "Shall I\nmore"
    page.says("out-a/ckpt.pt: step 20")
    page.generate(prompt=prompt, **settings)
    text = sampled(start=prompt, **settings)
    page.shows(text)
    assert re.match(r"40 tokens, [\d,]+ tokens/s", page.says("40 tokens"))
    found = page.select_token(20).all_inner_texts()
    assert len(found) == 10
    labels = [label.strip() for label in found]
    choice = next(label for label in labels if label[0] not in (text[20], "\\", "␣"))
    page.tab.get_by_text(choice, exact=True).click()
    page.shows(sampled(start=text[:20] + choice[0], **settings))


def test_a_stopped_text_stays_and_the_next_one_starts(page, open_page, sampled):
    page.generate(max_new_tokens=ENDLESS)
    page.eventually(lambda: len(page.text()) > 30)
    other = open_page()
    other.generate(max_new_tokens=20, seed=4)
    other.shows(sampled(max_new_tokens=20, seed=4))  # both tabs generate
    with page.tab.expect_response("**/cancel"):
        page.button("Stop").click()
    stopped = page.text()
    assert page.select_token(20).count() == 10
    assert page.text() == stopped
    page.generate(max_new_tokens=20, seed=3)
    page.shows(sampled(max_new_tokens=20, seed=3))


def test_a_closed_tab_ends_its_text(open_page, browser, server, sampled):
    closed = Page(browser, server[1])
    closed.generate(max_new_tokens=ENDLESS)
    closed.eventually(lambda: len(closed.text()) > 30)
    closed.tab.close()
    page = open_page()
    page.generate(max_new_tokens=20)
    page.shows(sampled(max_new_tokens=20))


def test_wrong_settings_are_explained_and_lose_nothing(page, sampled):
    page.generate(prompt="Shall", max_new_tokens=20)
    page.shows(sampled(start="Shall", max_new_tokens=20))
    for name, wrong, right, message in (
        ("temperature", -1, 0.8, "--temperature must be in"),
        ("top_k", "many", 200, "--top_k must be int or None, not 'many'"),
        ("prompt", "Shall €", "Shall", "character '€' (U+20AC) at position 6"),
    ):
        page.generate(**{name: wrong})
        page.says(message)
        assert page.text() == sampled(start="Shall", max_new_tokens=20)
        page.field(name).fill(str(right))
    page.generate(seed=4)
    page.shows(sampled(start="Shall", max_new_tokens=20, seed=4))


def test_a_text_is_scored_and_its_attention_drawn(page, sampled):
    draw = page.button("Draw the attention of each head")
    page.button("Attention ▼").click()
    draw.click()
    page.says("generate or score a text first")
    page.open("Score")
    page.field("text").fill("more lovely\nand")
    page.button("Score").click()
    page.shows("more lovely\nand")
    page.says("loss ")
    draw.click()
    page.tab.locator(".matplotlib img").wait_for()
    page.field("layer").fill("9")
    draw.click()
    page.says("layer 9: there is no layer 9")


def test_two_models_continue_a_prompt_side_by_side(page, sampled):
    page.field("seed").fill("5")
    page.field("max_new_tokens").fill("40")
    page.open("Compare")
    page.field("prompt").fill("Thou")
    page.button("Generate with both").click()
    for number, run in enumerate(("out-a", "out-b")):
        page.shows(sampled(run, max_new_tokens=40, seed=5, start="Thou"), number)


def test_runs_are_watched_and_new_models_are_listed(page, sampled):
    def is_listed(*cells):
        name = re.compile("^" + r"\s*".join(cells))
        return page.tab.get_by_role("row", name=name).count()

    page.open("Runs")
    page.eventually(lambda: is_listed("out-a") and is_listed("out-b"))
    image = page.tab.locator(".matplotlib img >> visible=true")
    drawn = image.get_attribute("src")
    shutil.copytree("out-b", "out-new", ignore=shutil.ignore_patterns("ckpt.pt"))
    with open("out-b/log.jsonl", "a") as log:
        event = {"split": "val", "step": 30, "tokens": 960, "loss": 0.1234, "elapsed_s": 4.0}
        log.write(f"{json.dumps(event)}\n")
    page.eventually(lambda: is_listed("out-new") and is_listed("out-b", "0.1234"))
    page.eventually(lambda: image.get_attribute("src") != drawn)

    page.open("Text")
    page.field("model").click()
    page.tab.get_by_role("option", name="out-new, newest state").click()
    page.says("out-new/last.pt: step 20")
    page.generate(max_new_tokens=20)
    page.shows(sampled(init_from="out-new/last.pt", max_new_tokens=20))
    shutil.copy("out-a/last.pt", "out-new/last.pt")  # as a run does that saves
    page.generate(seed=3)
    page.shows(sampled(max_new_tokens=20, seed=3))


# The last test, because it ends the server


def test_ctrl_c_ends_a_server_that_is_generating(server, browser):
    process, url = server
    page = Page(browser, url)
    page.generate(max_new_tokens=ENDLESS)
    page.eventually(lambda: len(page.text()) > 30)
    process.send_signal(signal.SIGINT)
    assert process.wait(SECONDS) == 130
    assert process.stderr.read() == "playground.py: interrupted\n"
