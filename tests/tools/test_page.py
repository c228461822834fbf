"""Tests of tools/page: its scripts in Node compared with sample.py, and the page in Chromium."""

import json
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch

import sample
from folio.checkpoint.run_dir import RunDir
from folio.cli.errors import UserError
from folio.data.tokenizer import CharTokenizer
from model import ACTIVATIONS
from tools.page import __main__ as page

NODE = shutil.which("node")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
DRIVER = """
const { runs, task } = JSON.parse(require("fs").readFileSync(0));
const run = loadRun(runs[0]);
const { tokenizer } = run;
const isDefault = (text) => !text && task.action === "generate";
const encode = (text) => (isDefault(text) ? tokenizer.start : tokenizer.encode(text));
const start = (text) => encode(text).map((id) => ({ id, start: 0, logprob: null }));
const texts = task.texts.map(start);
for (const tokens of texts) {
  if (task.action === "score") for (const _ of score(run, tokens));
  if (task.action === "generate") for (const _ of generate(run, tokens, task, makeRandom(1)));
}
console.log(JSON.stringify(texts.map((text) => text.map(({ id, logprob }) => [id, logprob]))));
"""
TEXT = (
    "She'll say:\r\n\n  we've 12 caf\u00e9s,\u00a0\u2028 na\u00efve\t\u6f22\u5b57 \U0001f600!?"
    "  'twas\u0085\ufeff  "
)
needs_node = pytest.mark.skipif(not NODE, reason="there is no Node")
needs_browser = pytest.mark.skipif(not BROWSER, reason="there is no Chromium")


def write_run(tokenizer, folder="out", **changes):
    """Writes a checkpoint of a random model that the page does not round."""
    path = Path(folder, "ckpt.pt")
    tiny.write_checkpoint(path, tokenizer, **changes)
    content = torch.load(path)
    for weight in content["model"].values():
        rows = weight.view(len(weight), -1)
        scales = rows.abs().amax(dim=1, keepdim=True) / 127
        rows.copy_((rows / scales).round() * scales)
    torch.save(content, path)


def in_node(action, *texts, **params):
    """Returns a list of [id, log-probability] for each text, made by the scripts of the page."""
    page.main(["--out_dir=out", "--to=page.html"])
    runs = re.search(r'id="runs">(.*?)</script>', Path("page.html").read_text("utf-8"))[1]
    scripts = [Path(page.__file__).with_name(name) for name in ("gpt.js", "text.js")]
    code = "".join(path.read_text("utf-8") for path in scripts) + DRIVER
    given = {"runs": json.loads(runs), "task": {"action": action, "texts": texts, **params}}
    command = [NODE, "--eval", code]
    result = subprocess.run(command, input=json.dumps(given), stdout=subprocess.PIPE, text=True)
    assert result.returncode == 0
    return json.loads(result.stdout)


def in_sample(capsys, *flags, out_dir="out"):
    """Returns what sample.py prints with --json."""
    capsys.readouterr()
    common = ["--device=cpu", "--dtype=float32", "--json", "--num_samples=1"]
    sample.main([f"--out_dir={out_dir}", *common, *flags])
    return json.loads(capsys.readouterr().out)


MODELS = [
    *({"kind": "char", **shape} for shape in tiny.SHAPES if "vocab_size" not in shape),
    {"kind": "char", "n_layer": 3, "n_head": 5, "n_embd": 30, "block_size": 12},
    {"kind": "char", "activation": "gelu_tanh", "smear": 3},
    {"kind": "char", "activation": "relu", "norm": "rmsnorm", "qk_norm": True},
    *({"kind": kind} for kind in ("list", "byte", "bpe", "gpt2")),
    *({"kind": kind, **tiny.SWITCHES} for kind in ("char", "byte", "bpe")),
]


@needs_node
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_greedy_text_is_that_of_sample(model, folder, capsys, request):
    kind = model["kind"]
    if kind == "gpt2":
        request.getfixturevalue("gpt2")
    switches = {name: value for name, value in model.items() if name != "kind"}
    write_run(tiny.new_tokenizer(kind, tiny.VERSE), **switches)
    prompt = tiny.VERSE[:30]
    count = 40 if kind == "gpt2" else 300  # its vocabulary is large
    flags = ["--temperature=0", f"--max_new_tokens={count}", f"--start={prompt}"]
    expected = in_sample(capsys, *flags)
    [tokens] = in_node("generate", prompt, max_new_tokens=count, temperature=0)
    generated = tokens[-len(expected["ids"]) :]
    assert [token for token, _ in generated] == expected["ids"]
    assert [logprob for _, logprob in generated] == pytest.approx(expected["logprobs"], abs=1e-4)


@needs_node
def test_a_text_begins_with_the_end_token_as_in_sample(folder, capsys):
    write_run(tiny.new_tokenizer("bpe", tiny.VERSE))
    expected = in_sample(capsys, "--temperature=0", "--max_new_tokens=9")
    [[first, *tokens]] = in_node("generate", "", max_new_tokens=9, temperature=0)
    assert (first[0], [token for token, _ in tokens]) == (0, expected["ids"])


@needs_node
@pytest.mark.parametrize(
    ("write", "tolerance"),
    [(write_run, 1e-5), (partial(tiny.write_checkpoint, Path("out", "ckpt.pt")), 1e-2)],
    ids=["not rounded", "rounded"],
)
def test_a_score_is_that_of_sample(write, tolerance, folder, capsys):
    write(tiny.new_tokenizer("bpe", tiny.VERSE), **tiny.SWITCHES)
    Path("poem.txt").write_text(tiny.VERSE)
    expected = in_sample(capsys, "--score=poem.txt")
    [[first, *tokens]] = in_node("score", tiny.VERSE)
    assert first[1] is None
    assert len(tokens) == expected["tokens"]
    loss = -sum(logprob for _, logprob in tokens) / len(tokens)
    assert loss == pytest.approx(expected["loss"], abs=tolerance)


@needs_node
@pytest.mark.parametrize("kind", ["char", "list", "byte", "bpe", "gpt2"])
def test_tokens_are_those_of_the_tokenizer(kind, folder, request):
    tokenizer = request.getfixturevalue("gpt2") if kind == "gpt2" else None
    tokenizer = tokenizer or tiny.new_tokenizer(kind, TEXT + tiny.VERSE)
    write_run(tokenizer)
    texts = [TEXT, tiny.VERSE, TEXT[::-1], "", "a" * 300, " \n \n  \r\n "]
    if kind in ("byte", "gpt2"):
        texts += [chr(i) + "a" + chr(i) for i in range(0, 0x3100, 7)]
    expected = [tokenizer.encode(text).tolist() for text in texts]
    assert [[token for token, _ in text] for text in in_node("encode", *texts)] == expected


def test_the_loss_of_the_best_step_is_not_that_of_others(folder):
    write_run(CharTokenizer("ab"))
    run_dir = RunDir("out")
    checkpoint = run_dir.load_best()
    assert "loss 2.5000 per token" in page.describe_training(run_dir, checkpoint, 1, "token")
    Path("out/log.jsonl").write_text(
        '{"event": "final", "step": 9, "best_step": 9, "tokens": 9, "elapsed_s": 9, "loss": 1.5}'
    )
    assert "loss 2.5000 per token" in page.describe_training(run_dir, checkpoint, 1, "token")
    checkpoint.progress.best_step -= 1
    assert "loss" not in page.describe_training(run_dir, checkpoint, 1, "token")


def test_a_missing_run_leaves_no_file(folder):
    write_run(CharTokenizer("ab"))
    with pytest.raises(UserError, match="there is no checkpoint s/a=1,b=2/"):
        page.main(["--out_dir=out,s/a=1,b=2"])
    assert not list(Path().rglob("*page*"))


def test_an_activation_that_gpt_js_lacks_is_refused(folder, monkeypatch):
    monkeypatch.setitem(ACTIVATIONS, "made_up", torch.sin)
    write_run(CharTokenizer("ab"), activation="made_up")
    assert "the page has no activation made_up" in tiny.error_of(page.main, ["--out_dir=out"])
    assert not Path("page.html").exists()


# In a browser


@pytest.fixture
def open_page():
    """A function that opens a file in Chromium, and checks that nothing is requested or fails."""
    problems = []
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)

        def open_file(path):
            tab = browser.new_page(viewport={"width": 390, "height": 844})
            url = Path(path).absolute().as_uri()
            tab.on("console", lambda message: problems.append(message.text))
            tab.on("pageerror", lambda error: problems.append(str(error)))
            tab.on("request", lambda sent: sent.url == url or problems.append(sent.url))
            tab.goto(url)
            return tab

        yield open_file
        browser.close()
    assert not problems


def run_button(tab, name, **fields):
    """Fills fields, clicks a button, waits until the work is done, and returns the text."""
    for label, value in fields.items():
        tab.locator(f"#{label}").fill(value)
    tab.get_by_role("button", name=name, exact=True).click()
    tab.locator("#stop[disabled]").wait_for()
    return tokens_of(tab)


def tokens_of(tab):
    return tab.locator(".token").all_text_contents()


@pytest.mark.slow
@needs_browser
def test_everything_that_the_page_can_do(folder, capsys, open_page):
    name = "<b>&amp;"  # must appear as it is
    write_run(CharTokenizer("\n <>/abcdefgh"), block_size=32, n_layer=3, n_embd=128)
    write_run(tiny.new_tokenizer("bpe", tiny.VERSE), folder=name)
    page.main([f"--out_dir=out,{name}", "--to=page.html"])
    assert capsys.readouterr().out == "wrote page.html: 0.9 MB; open it in a browser\n"
    tab = open_page("page.html")
    status = tab.locator("#status")

    # A greedy text, also by the keyboard, and from an alternative of one of its tokens.
    prompt = "a</b>\n"
    greedy = {"temperature": "0", "max_new_tokens": "60"}
    flags = ["--temperature=0", "--max_new_tokens=60"]
    expected = in_sample(capsys, *flags, f"--start={prompt}")["text"]
    assert "".join(run_button(tab, "Generate", text=prompt, **greedy)) == prompt + expected
    assert status.inner_text().startswith("out: 60 tokens, ")
    tab.locator(".token").nth(9).click()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowLeft")
    likely = tab.locator("#selected button").all_inner_texts()
    assert len(likely) == 10
    assert likely[0].startswith(tab.locator("#selected h2").inner_text().split("%")[0])
    second = likely[1][1].replace("\u2423", " ").replace("\u21b5", "\n")
    start = prompt + expected[:3] + second
    expected = in_sample(capsys, *flags, f"--start={start}")["text"]
    assert "".join(run_button(tab, likely[1])) == start + expected

    # Attention of the selected token.
    tab.get_by_label("Color").select_option("attention")
    tab.locator(".token").nth(20).click()
    for layer, head in (("mean", "mean"), ("2", "1")):
        tab.get_by_label("Layer").select_option(layer)
        tab.get_by_label("Head").select_option(head)
        tab.locator("#stop[disabled]").wait_for()
        shares = tab.locator(".token").evaluate_all(
            "spans => spans.map(span => parseFloat(span.style.getPropertyValue('--share')))"
        )
        assert max(shares) == 100
        assert all(shares[:21])
        assert not any(shares[21:])
    tab.get_by_label("Color").select_option("probability")

    # Scores, mistakes, and a second run.
    Path("text.txt").write_text("abc <d>\n" * 9)
    totals = in_sample(capsys, "--score=text.txt")
    run_button(tab, "Score", text="abc <d>\n" * 9)
    score = "out: loss {loss:.4f}, perplexity {perplexity:.5g}, bits per byte {bits_per_byte:.4f}"
    assert status.inner_text() == score.format_map(totals) + ", 71 tokens"
    run_button(tab, "Score", text="aXb")
    assert "know \u201cX\u201d (U+0058): remove" in tab.get_by_role("alert").inner_text()
    run_button(tab, "Score", text="a")
    assert "two tokens" in tab.get_by_role("alert").inner_text()
    tab.get_by_label("Model").select_option(name)
    assert tab.title().startswith(name)
    texts = [run_button(tab, "Generate", text="X", seed=seed, temperature="1") for seed in "556"]
    assert texts[0] == texts[1] != texts[2]

    # Stop ends a text that would take too long.
    tab.get_by_label("Model").select_option("out")
    tab.locator("#text").fill("a")
    tab.locator("#max_new_tokens").fill("20000")
    tab.get_by_role("button", name="Generate").click()
    tab.locator(".token").nth(70).wait_for()
    assert 70 < len(run_button(tab, "Stop")) < 20_000
