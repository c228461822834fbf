"""The playground in a real browser, with the server as its own process."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from pages import Playground, Server, eventually

import sample
import train
from folio.settings import ROOT
from tools.page_speed import BROWSER, FLAGS

pytest.importorskip("gradio")
sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason="there is no Chromium"),
]
ENDLESS = 1_000_000  # tokens, which take many minutes


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The current folder, with the runs out-a and out-b."""
    folder = tmp_path_factory.mktemp("browser")
    shape = {"n_embd": 128, "block_size": 64, "learning_rate": 3e-3}
    steps = {"max_iters": 20, "eval_iters": 2, "eval_interval": 10}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        tiny.prepare_verse()
        for name, layers in ("out-a", 4), ("out-b", 2):
            train.main(tiny.flags(out_dir=name, n_layer=layers, seed=layers, **shape, **steps))
        yield folder


@pytest.fixture(scope="module")
def server(runs):
    with Server(runs) as started:
        started.wait_until_ready()
        yield started


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
        pages.append(Playground(browser, server.url))
        return pages[-1]

    yield open_one
    for page in pages:
        assert page.problems == []
        assert page.hosts <= {f"127.0.0.1:{server.port}", "none"}
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


# Generate


def test_the_page_shows_the_text_of_sample(page, sampled):
    settings = {"max_new_tokens": 100, "seed": 7, "temperature": 1.1, "top_k": 9, "top_p": 0.9}
    settings |= {"min_p": 0.01, "repetition_penalty": 1.1, "context_stride": 3, "stop": "e t"}
    page.generate(prompt="Shall I\nmore", **settings)
    page.shows(sampled(start="Shall I\nmore", **settings))
    page.tab.get_by_text(re.compile(r"^\d+ tokens, [\d,]+ tokens/s")).wait_for()


def test_a_stopped_text_can_be_explained_and_the_next_one_starts(page, sampled):
    page.generate(max_new_tokens=ENDLESS)
    eventually(lambda: len(page.text()) > 30, page.tab)
    page.stop()
    assert len(page.select_token(20)) == 10  # computed after the text, so that it has ended
    stopped = page.text()
    page.tab.wait_for_timeout(600)  # more than LONGEST_WAIT
    assert page.text() == stopped
    page.generate(max_new_tokens=20, seed=3)
    page.shows(sampled(max_new_tokens=20, seed=3))


def test_an_unknown_character_is_explained_next_to_the_prompt(page):
    page.fill(prompt="Shall €")
    below, top = page.tab.get_by_text("character '€' (U+20AC) at position 6"), page.field("prompt")
    below.wait_for()
    assert 0 < below.bounding_box()["y"] - top.bounding_box()["y"] < 150
    page.fill(prompt="Shall")
    below.wait_for(state="detached")


def test_wrong_settings_are_explained_and_lose_nothing(page, sampled):
    page.generate(prompt="Shall", max_new_tokens=20)
    text = sampled(start="Shall", max_new_tokens=20)
    page.shows(text)
    for name, wrong, right, message in (
        ("temperature", -1, 0.8, "temperature must be in [0, inf), not -1"),
        ("max_new_tokens", "", 20, "max_new_tokens must be int, not None"),
        ("top_p", 2, 1, "top_p must be in (0, 1], not 2"),
        ("top_k", "many", 200, "top_k must be int or None, not 'many'"),
        ("stop", "[1]", "", "--stop=[1]: must be a string"),
    ):
        page.generate(**{name: wrong})
        page.says(message)
        assert page.text() == text
        page.fill(**{name: right})
    assert page.field("prompt").input_value() == "Shall"
    page.generate(seed=4)
    page.shows(sampled(start="Shall", max_new_tokens=20, seed=4))


# Inspect


def test_an_alternative_continues_the_text(page, sampled):
    page.generate(max_new_tokens=30)
    text = sampled(max_new_tokens=30)
    page.shows(text)
    labels = page.select_token(12)
    shares = [float(re.fullmatch(r".+ <?([\d.]+)%", label)[1]) for label in labels]
    assert len(labels) == 10
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 5
    assert sum(shares) < 101
    choice = next(each for each in labels if each[0] not in (text[12], "\\", "␣"))
    page.tab.get_by_text(choice, exact=True).click()
    page.shows(sampled(start=text[:12] + choice[0], max_new_tokens=30))


def test_a_pasted_text_is_scored(page, sampled, runs):
    Path("verse2.txt").write_text("more lovely\nand", encoding="utf-8")
    page.open("Score")
    page.field("text").fill("more lovely\nand")
    page.button("Score").click()
    page.shows("more lovely\nand")
    assert f"verse2.txt: {page.says('loss ')}\n" == sampled(score="verse2.txt")
    # The model predicts every token but the first.
    assert page.tab.locator(".tokens [title*='%']").count() == len("more lovely\nand") - 1


def test_the_attention_of_a_layer_is_drawn(page):
    draw = page.button("Draw the attention of each head")
    page.button("Attention ▼").click()
    draw.click()
    page.says("generate or score a text first")
    page.generate(max_new_tokens=20)
    page.says("20 tokens")
    draw.click()
    page.tab.locator(".matplotlib img").wait_for()
    for layer, message in ("9", "out-a/ckpt.pt, layer 9: there is no layer 9"), ("", "enter the"):
        page.field("layer").fill(layer)
        draw.click()
        page.says(message)


# Compare, watch


def test_two_models_continue_a_prompt_side_by_side(page, sampled):
    page.fill(max_new_tokens=40, seed=5)
    page.open("Compare")
    page.field("prompt").fill("Thou")
    page.button("Generate with both").click()
    for number, run in enumerate(("out-a", "out-b")):
        page.shows(sampled(run, max_new_tokens=40, seed=5, start="Thou"), number)


def test_a_run_in_training_is_watched(page, sampled):
    def image():
        return page.tab.locator(".matplotlib img >> visible=true").get_attribute("src")

    def is_listed(*cells):
        name = re.compile("^" + r"\s*".join(cells))
        return page.tab.get_by_role("row", name=name).count()

    page.open("Runs")
    eventually(lambda: is_listed("out-a") and is_listed("out-b"), page.tab)
    drawn = image()
    shutil.copytree("out-b", "out-new", ignore=shutil.ignore_patterns("ckpt.pt"))
    with open("out-b/log.jsonl", "a") as log:
        event = {"split": "val", "step": 30, "tokens": 960, "loss": 0.1234, "elapsed_s": 4.0}
        log.write(f"{json.dumps(event)}\n")
    eventually(lambda: is_listed("out-new") and is_listed("out-b", "0.1234"), page.tab)
    eventually(lambda: image() != drawn, page.tab)
    drawn = image()
    page.field("runs in the plot").click()
    page.tab.get_by_role("option", name="out-new").click()
    eventually(lambda: image() != drawn, page.tab)

    page.open("Text")
    page.choose("model", "out-new, newest state")
    page.generate(max_new_tokens=20)
    page.shows(sampled(init_from="out-new/last.pt", max_new_tokens=20))


# Tabs, replaced checkpoints


def test_two_tabs_get_their_own_texts(open_page, sampled):
    pages = {seed: open_page() for seed in (11, 12)}
    for seed, page in pages.items():
        page.generate(max_new_tokens=150, seed=seed)
    for seed, page in pages.items():
        page.shows(sampled(max_new_tokens=150, seed=seed))


def test_a_closed_tab_ends_its_text(open_page, browser, server, sampled):
    closed, other = Playground(browser, server.url), open_page()
    closed.generate(max_new_tokens=ENDLESS)
    eventually(lambda: len(closed.text()) > 30, closed.tab)
    closed.tab.close()
    other.generate(max_new_tokens=20)
    other.shows(sampled(max_new_tokens=20))


def test_a_checkpoint_is_replaced_while_two_tabs_use_it(runs, open_page, sampled):
    shutil.copytree("out-a", "out-c")
    settings = {"max_new_tokens": 200, "seed": 13}
    first, second = open_page(), open_page()
    for page in first, second:
        page.choose("model", "out-c")
        page.fill(**settings)
    first.generate()
    eventually(lambda: len(first.text()) > 30, first.tab)
    shutil.copy("out-b/ckpt.pt", "out-c/new.pt")
    os.replace("out-c/new.pt", "out-c/ckpt.pt")
    first.shows(sampled("out-a", **settings))
    assert len(first.select_token(8)) == 10  # the model of the text is still in memory

    second.generate()
    second.shows(sampled("out-b", **settings))
    first.tab.locator(".tokens .token").nth(9).click()
    first.says("out-c/ckpt.pt was replaced after this text was made")
    assert first.text() == sampled("out-a", **settings)
    first.generate()
    first.shows(sampled("out-b", **settings))


@pytest.mark.campaign
def test_two_tabs_use_the_newest_state_of_a_run_in_training(open_page, sampled):
    flags = tiny.flags(out_dir="out-d", max_iters=10**6, eval_interval=20, eval_iters=1)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "train.py", *flags]
    training = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        pages, steps = [open_page(), open_page()], ([], [])
        for page in pages:
            page.choose("model", "out-d, newest state")
        pages[0].tab.wait_for_timeout(1000)
        for seed in range(60):
            for page in pages:
                page.generate(max_new_tokens=40, seed=seed)
            for page, found in zip(pages, steps, strict=True):
                page.says("40 tokens, ")
                eventually(lambda page=page: len(page.text()) == 41, page.tab)
                summary = page.says("out-d/last.pt: step ")
                found.append(int(re.search(r"step (\d+)", summary)[1]))
        for found in steps:
            assert found == sorted(found)
            assert found[-1] > found[0]
    finally:
        training.kill()
        training.wait()


# The last test, because it ends the server


def test_ctrl_c_ends_a_server_that_is_generating(server, browser):
    page = Playground(browser, server.url)
    page.generate(max_new_tokens=ENDLESS)
    eventually(lambda: len(page.text()) > 30, page.tab)
    assert server.end(signal.SIGINT, seconds=5) == (130, "playground.py: interrupted\n")
    page.says("Connection to the server was lost")
    page.tab.close()
