"""The playground without a browser: its settings, errors and server, and the functions it calls."""

import math
import socket
from dataclasses import fields
from pathlib import Path

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
from tools.playground.texts import alternatives, branch, generate, model_loader, score

LETTERS = tiny.new_tokenizer("char", tiny.VERSE)
PATH = "out/ckpt.pt"
COUNT = 20  # tokens of a text; the model sees 8


@pytest.fixture
def newest(folder):
    """A function that loads models, in a folder with one of the characters of VERSE."""
    tiny.write_checkpoint(PATH, LETTERS)
    return model_loader("cpu", "float32")


# Settings, errors, server


@pytest.mark.parametrize(
    ("flag", "wrong"),
    [
        ("--password=", "password"),
        ("--port=0", "port.* 0"),
        ("--device=cuda:99", "cuda:99"),
        ("--out_dir=oui", "oui.* did you mean out"),
    ],
)
def test_a_wrong_setting_is_an_error(newest, flag, wrong):
    with pytest.raises(UserError, match=wrong):
        playground.main([flag])


@pytest.mark.slow
def test_a_password_protects_everything(newest, monkeypatch):
    gradio = pytest.importorskip("gradio")
    for name in ("NO_PROXY", "no_proxy"):  # which serve() sets
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # is not asked for the page
    flags = ["--device=cpu", "--password=verse"]
    url = playground.serve(load_settings(PlaygroundConfig, flags))
    session = requests.Session()
    session.trust_env = False  # no proxy
    protected = [f"{url}{path}" for path in ("config", "gradio_api/info")]

    def statuses(password):
        session.post(f"{url}login", data={"username": playground.USER, "password": password})
        return [session.get(each).status_code for each in protected]

    assert '"out"' not in session.get(url).text
    assert statuses("poem") == [401, 401]
    assert statuses("verse") == [200, 200]
    port = socket.create_server(("127.0.0.1", 0))
    with port, pytest.raises(OSError, match=str(port.getsockname()[1])):
        playground.serve(
            load_settings(PlaygroundConfig, [*flags, f"--port={port.getsockname()[1]}"])
        )
    gradio.close_all(verbose=False)


# Texts


def settings(**changes):
    flags = [f"--{name}={value}" for name, value in ({"max_new_tokens": COUNT} | changes).items()]
    return load_settings(sample.SampleConfig, [*flags, "--num_samples=1", "--stream=True"])


def generated(newest, prompt="Shall I", **changes):
    """Returns a text as the page generates it."""
    *_, last = generate(newest("out"), prompt, settings(**changes))
    return last


def string(text):
    return "".join(text.pieces)


def sampled(capsys, prompt, **changes):
    """Returns what sample.py prints for the same checkpoint, prompt and settings."""
    capsys.readouterr()
    flags = [f"--{k}={v}" for k, v in ({"max_new_tokens": COUNT} | changes).items()]
    flags += [f"--start={prompt}"] * bool(prompt) + ["--num_samples=1", f"--init_from={PATH}"]
    sample.main([*flags, "--device=cpu", "--dtype=float32"])
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
def test_a_text_is_that_of_sample_py(newest, capsys, gpt2_of_bytes, kind, prompt, changes):
    tiny.write_checkpoint(PATH, tiny.new_tokenizer(kind, tiny.VERSE * 20, 260))
    assert string(generated(newest, prompt, **changes)) == sampled(capsys, prompt, **changes)


@pytest.mark.parametrize("stride", [4, 1, 3])
def test_alternatives_are_the_likely_tokens_given_what_the_model_saw(newest, capsys, stride):
    """Also beyond the context, in a prompt, and after a branch. A branch is that of sample.py."""
    text = generated(newest, context_stride=stride)
    label, found = alternatives(text, 18)
    assert LETTERS.decode([text.ids[18]]) in label or "␣" in label or "\\n" in label
    *_, branched = branch(text, 18, found[9][1], settings(seed=3, context_stride=stride))
    start = string(text)[:18] + LETTERS.decode([found[9][1]])
    assert string(branched) == sampled(capsys, start, seed=3, context_stride=stride)
    for each in (text, branched):
        for index in range(1, len(each.ids)):
            likely = dict(likely_next(each.trained, each.ids[each.starts[index] : index], 100))
            found = [choice for _, choice in alternatives(each, index)[1]]
            assert found == list(likely)[:10]
            if each.logprobs[index] is not None:
                expected = likely[each.ids[index]]
                assert math.exp(each.logprobs[index]) == pytest.approx(expected, abs=1e-5)
    assert [index for index, each in enumerate(branched.logprobs) if each is None] == [
        *range(7),
        18,
    ]
    assert alternatives(text, 0)[1] == []


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_a_score_is_that_of_sample_py(newest, capsys, kind):
    content = tiny.VERSE[:60] + ("é" if kind != "char" else "S")
    tiny.write_checkpoint(PATH, tiny.new_tokenizer(kind, tiny.VERSE * 20))
    Path("poem.txt").write_text(content, encoding="utf-8")
    sample.main([f"--init_from={PATH}", "--score=poem.txt", "--device=cpu", "--dtype=float32"])
    text = score(newest("out"), content)
    assert text.status == capsys.readouterr().out.strip().removeprefix("poem.txt: ")
    assert string(text) == content
    for index in range(1, len(text.ids)):
        seen = dict(likely_next(text.trained, text.ids[text.starts[index] : index], 999))
        assert math.exp(text.logprobs[index]) == pytest.approx(seen[text.ids[index]], abs=1e-5)


# The page


@pytest.fixture
def page(newest):
    """The page, with more runs in the current folder."""
    pytest.importorskip("gradio")
    from tools.playground.page import build

    for folder in ("sweep/n=1", ".hidden"):
        tiny.write_checkpoint(f"{folder}/ckpt.pt", LETTERS)
    return build(newest, "cpu", "out")


@pytest.mark.slow
def test_the_page_has_the_controls_of_sample_py_and_the_runs_but_no_api(page):
    found = {getattr(each, "label", None): each for each in page.blocks.values()}
    names = [field.name for field in fields(sample.SampleConfig) if field.name in found]
    assert len(names) == 9
    for name in names:
        assert found[name].value == str(getattr(sample.SampleConfig(), name))
    for label in ("model", "first model", "second model"):
        assert [value for _, value in found[label].choices] == ["out", "sweep/n=1"]
        assert found[label].value == "out"
    assert {fn.api_visibility for fn in page.fns.values()} == {"private"}
    assert not page.analytics_enabled


@pytest.mark.slow
def test_errors_and_tokens_are_escaped(page):
    import gradio

    from tools.playground.page import text_html

    [generate] = {each.fn for each in page.fns.values() if each.name == "generate"}
    with pytest.raises(gradio.Error, match="&lt;b&gt;/last.pt"):
        next(generate("<b>", "S", *[""] * 9))
    text = texts.TokenText(None, [1, 2], ["<b>\n", " &"], [0, 0], [None, -9.0], "<i>")
    tokens, status = text_html(text)
    assert tokens.endswith(
        '<p><span class="token">&lt;b&gt;<span></span>\n</span>'
        '<span class="token" style="background: #f1998c" title="<0.1%"> &amp;</span></p></div>'
    )
    assert status == "&lt;i&gt;"
