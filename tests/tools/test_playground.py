"""The playground without a browser: its settings, errors and server, and the functions it calls."""

import math
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests
import tiny

import sample
from folio.cli.errors import UserError
from folio.cli.settings import load_settings
from folio.inference.scoring import likely_next
from tools.playground import __main__ as playground
from tools.playground import texts
from tools.playground.__main__ import PlaygroundConfig
from tools.playground.texts import branch, generate, list_alternatives, make_model_loader, score

LETTERS = tiny.new_tokenizer("char", tiny.VERSE)
PATH = "out/ckpt.pt"
COUNT = 20  # tokens of a text; the model sees 8


@pytest.fixture
def load_model(folder):
    """A function that loads models, in a folder with one of the characters of VERSE."""
    tiny.write_checkpoint(PATH, LETTERS)
    return make_model_loader("cpu", "float32")


# Settings, errors, server


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--host=0.0.0.0", "FOLIO_PASSWORD"),
        ("--out_dir=oui", "oui.* did you mean out"),
    ],
)
def test_a_wrong_setting_is_an_error(load_model, flag, message):
    with pytest.raises(UserError, match=message):
        playground.main([flag])


@pytest.mark.slow
def test_a_password_protects_everything(load_model, monkeypatch):
    gradio = pytest.importorskip("gradio")
    for name in ("NO_PROXY", "no_proxy"):  # which serve() sets
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # is not asked for the page
    monkeypatch.setenv("FOLIO_PASSWORD", "verse")
    flags = ["--device=cpu"]
    url = playground.serve(load_settings(PlaygroundConfig, flags))
    session = requests.Session()
    session.trust_env = False  # no proxy
    protected = [f"{url}{path}" for path in ("config", "gradio_api/info")]

    def statuses(password):
        session.post(f"{url}login", data={"username": playground.USER_NAME, "password": password})
        return [session.get(address).status_code for address in protected]

    assert '"out"' not in session.get(url).text
    assert statuses("poem") == [401, 401]
    assert statuses("verse") == [200, 200]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match=str(port)):
            playground.serve(load_settings(PlaygroundConfig, [*flags, f"--port={port}"]))
    monkeypatch.delenv("FOLIO_PASSWORD")
    url = playground.serve(load_settings(PlaygroundConfig, flags))
    for host, status in ("localhost:80", 200), (urlsplit(url).netloc, 200), ("example.com", 400):
        assert session.get(f"{url}config", headers={"Host": host}).status_code == status
    gradio.close_all(verbose=False)


# Texts


def flags(**changes):
    changes = {"max_new_tokens": COUNT, "num_samples": 1} | changes
    return [f"--{name}={value}" for name, value in changes.items()]


def settings(**changes):
    return load_settings(sample.SampleConfig, flags(stream=True, **changes))


def generate_text(load_model, prompt="Shall I", **changes):
    """Returns a text as the page generates it."""
    *_, text = generate(load_model("out"), prompt, settings(**changes))
    return text


def string(text):
    return "".join(text.pieces)


def run_sample(capsys, prompt, **changes):
    """Returns what sample.py prints for the same checkpoint, prompt and settings."""
    capsys.readouterr()
    start = {"start": prompt} if prompt else {}
    sample.main(flags(init_from=PATH, device="cpu", dtype="float32", **start, **changes))
    return capsys.readouterr().out.removesuffix(f"\n{sample.SEPARATOR}\n")


@pytest.mark.parametrize(
    ("kind", "prompt", "changes"),
    [
        ("char", "", {}),
        ("char", "Shall I", {"seed": 7, "top_p": 0.5, "min_p": 0.1, "temperature": 2.0}),
        ("char", "Shall I", {"repetition_penalty": 1.5, "context_stride": 1}),
        ("char", tiny.VERSE[:40], {"max_new_tokens": 1}),
        ("byte", "naïve 🦶", {"temperature": 1.5}),
        ("bpe", "naïve 🦶", {"seed": 3, "stop": '["e", "th"]'}),
        ("gpt2", "naïve 🦶", {"temperature": 1.5, "stop": "e"}),
    ],
)
def test_a_text_is_that_of_sample_py(load_model, capsys, gpt2_of_bytes, kind, prompt, changes):
    tiny.write_checkpoint(PATH, tiny.new_tokenizer(kind, tiny.VERSE * 20, 260))
    printed = run_sample(capsys, prompt, **changes)
    assert string(generate_text(load_model, prompt, **changes)) == printed


@pytest.mark.parametrize("stride", [4, 1, 3])
def test_alternatives_are_the_likely_tokens_given_what_the_model_saw(load_model, capsys, stride):
    """Also beyond the context, in a prompt, and after a branch. A branch is that of sample.py."""
    text = generate_text(load_model, context_stride=stride)
    label, choices = list_alternatives(text, 18)
    assert LETTERS.decode([text.ids[18]]) in label or "␣" in label or "\\n" in label
    token = choices[9][1]
    *_, new_text = branch(text, 18, token, settings(seed=3, context_stride=stride))
    start = string(text)[:18] + LETTERS.decode([token])
    assert string(new_text) == run_sample(capsys, start, seed=3, context_stride=stride)
    check_alternatives(text)
    check_alternatives(new_text)
    not_computed = [index for index, value in enumerate(new_text.logprobs) if value is None]
    assert not_computed == [*range(7), 18]
    assert list_alternatives(text, 0)[1] == []


def check_alternatives(text):
    for index in range(1, len(text.ids)):
        likely = dict(likely_next(text.trained, text.ids[text.starts[index] : index], 999))
        tokens = [token for _, token in list_alternatives(text, index)[1]]
        assert tokens == list(likely)[:10]
        if text.logprobs[index] is not None:
            expected = likely[text.ids[index]]
            assert math.exp(text.logprobs[index]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_a_score_is_that_of_sample_py(load_model, capsys, kind):
    content = tiny.VERSE[:60] + ("é" if kind != "char" else "S")
    tiny.write_checkpoint(PATH, tiny.new_tokenizer(kind, tiny.VERSE * 20))
    Path("poem.txt").write_text(content, encoding="utf-8")
    sample.main([f"--init_from={PATH}", "--score=poem.txt", "--device=cpu", "--dtype=float32"])
    text = score(load_model("out"), content)
    assert text.status == capsys.readouterr().out.strip().removeprefix("poem.txt: ")
    assert string(text) == content
    assert None not in text.logprobs[1:]
    check_alternatives(text)


# The page


@pytest.fixture
def page(load_model):
    """The page, with more runs in the current folder."""
    pytest.importorskip("gradio")
    from tools.playground.page import build_page

    for folder in ("sweep/n=1", ".hidden"):
        tiny.write_checkpoint(f"{folder}/ckpt.pt", LETTERS)
    return build_page(load_model, "out")


@pytest.mark.slow
def test_the_page_has_no_api_and_lists_the_runs(page):
    inputs = {getattr(block, "label", None): block for block in page.blocks.values()}
    for label in ("model", "first model", "second model"):
        assert [value for _, value in inputs[label].choices] == ["out", "sweep/n=1"]
    assert {fn.api_visibility for fn in page.fns.values()} == {"private"}
    assert not page.analytics_enabled


@pytest.mark.slow
def test_errors_and_tokens_are_escaped(page):
    import gradio

    from tools.playground.page import render_text

    [generate] = {fn.fn for fn in page.fns.values() if fn.name == "generate"}
    with pytest.raises(gradio.Error, match="&lt;b&gt;/last.pt"):
        next(generate("<b>", "S", *[""] * 9))
    for prompt, count, message in ("S" * 20_001, "", "20,001 char"), ("S", "20001", "at most 20,0"):
        with pytest.raises(gradio.Error, match=message):
            next(generate("out", prompt, "", count, *[""] * 7))
    text = texts.TokenText(None, [1, 2], ["<b>\n", " &"], [0, 0], [None, -9.0], "<i>")
    tokens, status = render_text(text)
    assert tokens.endswith(
        '<p><span class="token">&lt;b&gt;<span></span>\n</span>'
        '<span class="token" style="background: #f1998c" title="<0.1%"> &amp;</span></p></div>'
    )
    assert status == "&lt;i&gt;"
