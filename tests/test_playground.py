"""The playground without a browser: its settings, errors and server, and the functions it calls."""

import math
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import requests
import tiny

import sample
from folio.errors import UserError
from folio.scoring import likely_next
from folio.settings import ROOT, load
from tools import playground, texts
from tools.playground import PlaygroundConfig, first_checkpoint
from tools.texts import MOST_TOKENS, Models, alternatives, branch, generate, score

LETTERS = tiny.new_tokenizer("char", tiny.VERSE)
PATH, OTHER = "out/ckpt.pt", "out-b/ckpt.pt"
COUNT = 20  # tokens of a text; the model sees 8


@pytest.fixture
def models(folder):
    """Models, in a folder with a model of the characters of VERSE."""
    tiny.write_checkpoint(PATH, LETTERS)
    return Models("cpu", "float32")


# Settings, errors, server


@pytest.mark.slow
def test_help_does_not_wait_for_torch_and_gradio(tmp_path):
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv[1:] = ['--help']\n"
        "try: runpy.run_module('tools.playground', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as exit: print(exit.code, {'torch', 'gradio'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True)
    assert done.stdout.decode().splitlines()[-1] == "0 set()"


@pytest.mark.parametrize("flag", ["--password=", "--host=", "--port=0", "--device=cuda:99"])
def test_a_wrong_setting_is_an_error(flag):
    with pytest.raises(UserError, match=flag.strip("-=").replace("=", ".*")):
        playground.main([flag])


def test_the_first_model_is_the_best_of_a_run_or_its_newest(folder, monkeypatch):
    tiny.write_checkpoint("out/last.pt", LETTERS)
    assert first_checkpoint("out", []) == "out/last.pt"
    tiny.write_checkpoint(PATH, LETTERS)
    tiny.write_checkpoint(OTHER, LETTERS)
    os.utime(OTHER, (1, 1))
    assert first_checkpoint(None, [OTHER, PATH, "out/last.pt"]) == PATH
    assert first_checkpoint(Path("out").absolute(), []) == PATH
    Path("other").mkdir()
    monkeypatch.chdir("other")
    assert first_checkpoint("../out", []) == "../out/ckpt.pt"


def test_a_folder_without_a_model_is_an_error_that_says_what_to_do(folder):
    with pytest.raises(UserError, match="no trained model .* train one"):
        first_checkpoint(None, [])
    tiny.write_checkpoint(PATH, LETTERS)
    with pytest.raises(UserError, match="oui.* did you mean out"):
        first_checkpoint("oui", [])


@pytest.fixture
def serve(models, monkeypatch):
    """A function that starts the server; it is closed at the end."""
    gradio = pytest.importorskip("gradio")
    pytest.importorskip("matplotlib")
    for name in ("NO_PROXY", "no_proxy"):  # which serve() sets
        monkeypatch.setenv(name, "")
    yield lambda *flags: playground.serve(load(PlaygroundConfig, ["--device=cpu", *flags]))
    gradio.close_all(verbose=False)


def test_a_port_that_is_in_use_is_an_error(models):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1, port {port}"):
            playground.check_address("127.0.0.1", port)


def test_a_damaged_checkpoint_is_an_error_at_the_start(serve):
    Path(PATH).write_bytes(b"damaged")
    with pytest.raises(UserError, match=PATH):
        serve()


@pytest.mark.slow
def test_a_password_protects_everything(serve, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # is not asked for the page
    monkeypatch.setenv("GRADIO_SHARE", "True")
    url = serve("--password=verse")
    assert "GRADIO_SHARE" not in os.environ
    session = requests.Session()
    session.trust_env = False  # no proxy
    protected = [f"{url}{path}" for path in ("config", "gradio_api/info")]

    def statuses(password):
        session.post(f"{url}login", data={"username": playground.USER, "password": password})
        return [session.get(each).status_code for each in protected]

    assert PATH not in session.get(url).text
    assert statuses("poem") == [401, 401]
    assert statuses("verse") == [200, 200]


# Texts


def settings(**changes):
    flags = [f"--{name}={value}" for name, value in ({"max_new_tokens": COUNT} | changes).items()]
    return load(sample.SampleConfig, [*flags, "--num_samples=1", "--stream=True"])


def generated(models, prompt="Shall I", path=PATH, **changes):
    """Returns a text as the page generates it."""
    *_, last = generate(models, path, prompt, settings(**changes))
    return last


def string(text):
    return "".join(token.piece for token in text.tokens)


def sampled(capsys, prompt, **changes):
    """Returns what sample.py prints for the same checkpoint, prompt and settings."""
    capsys.readouterr()
    flags = [f"--{k}={v}" for k, v in ({"max_new_tokens": COUNT} | changes).items()]
    flags += [f"--start={prompt}"] * bool(prompt) + ["--num_samples=1", f"--init_from={PATH}"]
    sample.main([*flags, "--device=cpu", "--dtype=float32"])
    return capsys.readouterr().out.removesuffix(f"\n{sample.SEPARATOR}\n")


@pytest.mark.parametrize(
    ("prompt", "changes"),
    [
        ("", {}),
        ("S", {"seed": 7, "top_k": 3}),
        ("Shall I", {"top_k": None, "top_p": 0.5, "min_p": 0.1, "temperature": 2.0}),
        ("Shall I", {"repetition_penalty": 1.5, "context_stride": 1}),
        ("Shall I", {"stop": '["e", "th"]', "temperature": 1.5}),
        (tiny.VERSE[:40], {"max_new_tokens": 1}),
        (tiny.VERSE[:40], {"context_stride": 3, "stop": "e", "temperature": 0.0}),
    ],
)
def test_a_text_is_that_of_sample_py(models, capsys, prompt, changes):
    assert string(generated(models, prompt, **changes)) == sampled(capsys, prompt, **changes)


@pytest.mark.parametrize("kind", ["byte", "bpe", "gpt2"])
def test_a_text_of_another_tokenizer_is_that_of_sample_py(models, capsys, kind, gpt2_of_bytes):
    tiny.write_checkpoint(PATH, tiny.new_tokenizer(kind, tiny.VERSE * 20, 260))
    for changes in {"temperature": 1.5}, {"seed": 3, "stop": "e"}:
        text = generated(models, "naïve 🦶", **changes)
        assert string(text) == sampled(capsys, "naïve 🦶", **changes)


def test_a_text_grows_without_showing_the_beginning_of_a_stop_text(models, monkeypatch):
    monkeypatch.setattr(texts, "SECONDS", 0)  # show every token
    whole = string(generated(models))
    stop = whole[15:18]
    *growing, last = map(string, generate(models, PATH, "Shall I", settings(stop=stop)))
    assert last == whole[: whole.index(stop)]
    assert all(last.startswith(each) for each in growing)
    assert len(growing[0]) == len("Shall I") + 1


@pytest.mark.parametrize("stride", [None, 1, 3])
def test_alternatives_are_the_likely_tokens_given_what_the_model_saw(models, capsys, stride):
    """Also beyond the context, in a prompt, and after a branch. A branch is that of sample.py."""
    changes = {} if stride is None else {"context_stride": stride}
    text = generated(models, **changes)
    label, found = alternatives(text, 18)
    assert LETTERS.decode([text.ids[18]]) in label or "␣" in label or "\\n" in label
    *_, branched = branch(text, 18, found[9][1], settings(seed=3, **changes))
    assert branched.tokens[:18] == text.tokens[:18]
    start = string(text)[:18] + LETTERS.decode([found[9][1]])
    assert string(branched) == sampled(capsys, start, seed=3, **changes)
    for each in (text, branched):
        for index in range(1, len(each.tokens)):
            token = each.tokens[index]
            likely = dict(likely_next(each.trained, each.ids[token.start : index], 100))
            found = [choice for _, choice in alternatives(each, index)[1]]
            assert found == list(likely)[:10]
            if index >= 7:
                assert math.exp(token.logprob) == pytest.approx(likely[token.id], abs=1e-5)
    assert alternatives(text, 0)[1] == []
    with pytest.raises(UserError, match="select"):
        alternatives(text, 99)


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
@pytest.mark.parametrize("length", [2, 9, 60])
def test_a_score_is_that_of_sample_py(models, capsys, kind, length):
    content = tiny.VERSE[: length - 1] + ("é" if kind != "char" else "S")
    tiny.write_checkpoint(PATH, tiny.new_tokenizer(kind, tiny.VERSE * 20))
    Path("poem.txt").write_text(content, encoding="utf-8")
    sample.main([f"--init_from={PATH}", "--score=poem.txt", "--device=cpu", "--dtype=float32"])
    expected = capsys.readouterr().out.strip().removeprefix("poem.txt: ")
    text = score(models, PATH, content)
    assert text.status.startswith(expected)
    assert string(text) == content
    for index in range(1, len(text.tokens)):
        seen = dict(likely_next(text.trained, text.ids[text.tokens[index].start : index], 999))
        logprob = text.tokens[index].logprob
        assert math.exp(logprob) == pytest.approx(seen[text.ids[index]], abs=1e-5)


def test_a_long_text_is_an_error(models):
    long = "S" * (MOST_TOKENS + 1)
    for call in (lambda: score(models, PATH, long), lambda: generated(models, long)):
        with pytest.raises(UserError, match="5,001"):
            call()


# Models


def test_two_models_are_in_memory_and_one_is_loaded_again_if_its_file_changes(models):
    for path in (OTHER, "out-c/ckpt.pt"):
        tiny.write_checkpoint(path, LETTERS, n_layer=1)
    text, second = generated(models), models.newest(OTHER)
    assert models.newest(PATH) is text.trained
    tiny.write_checkpoint(PATH, LETTERS, n_layer=3)
    os.utime(PATH, (1, 1))
    assert models.newest(PATH).model.config.n_layer == 3
    assert alternatives(text, 9)[1]  # of the old model
    assert models.newest(OTHER) is not second
    with pytest.raises(UserError, match="no longer in memory"):
        alternatives(text, 9)
    shutil.rmtree("out")
    with pytest.raises(UserError, match=PATH):
        models.newest(PATH)


# The page


@pytest.fixture
def page(models):
    """The page, with more checkpoints and runs in the current folder."""
    pytest.importorskip("gradio")
    pytest.importorskip("matplotlib")
    from tools.page import build

    tiny.write_checkpoint("out/last.pt", LETTERS)
    tiny.write_checkpoint("sweep/n=1/ckpt.pt", LETTERS)
    tiny.write_checkpoint(".hidden/ckpt.pt", LETTERS)
    return build(models, PATH)


def called(page, name, *arguments):
    """Returns the iterator of a function of the page."""
    [found] = {each.fn for each in page.fns.values() if each.name == name}
    return found(*arguments)


def test_texts_of_several_tabs_alternate_and_end_when_their_iterator_is_closed(page):
    """gradio closes it when a tab is closed, or at a click on Stop."""
    values = ["0.8", str(10**9), *[""] * 7]
    first = called(page, "compare", PATH, PATH, "S", *values)
    second = called(page, "generate", PATH, "S", *values)
    for _ in range(3):
        assert "token" in next(first)[0]
        assert next(second)[0].tokens
    first.close()
    assert len(next(second)[0].tokens) > 1
    second.close()
    *_, (text, *_) = called(page, "generate", PATH, "S", "0.8", "3", *[""] * 7)
    assert len(text.tokens) == 4


def test_the_page_has_the_controls_of_sample_py_and_the_checkpoints(page):
    found = {getattr(each, "label", None): each for each in page.blocks.values()}
    names = [field.name for field in fields(sample.SampleConfig) if field.name in found]
    assert "stop" in names
    assert len(names) == 9
    for name in names:
        assert found[name].value == str(getattr(sample.SampleConfig(), name))
    paths = {"out": PATH, "out, newest state": "out/last.pt", "sweep/n=1": "sweep/n=1/ckpt.pt"}
    second = "sweep/n=1/ckpt.pt"  # a model of another folder
    for label, selected in {"model": PATH, "first model": PATH, "second model": second}.items():
        assert dict(map(tuple, found[label].choices)) == paths
        assert found[label].value == selected


def test_the_page_has_no_public_api_and_no_analytics(page):
    assert {fn.api_visibility for fn in page.fns.values()} == {"private"}
    assert not page.analytics_enabled


def test_errors_and_tokens_are_escaped(page):
    import gradio

    from tools.page import tokens_html

    with pytest.raises(gradio.Error) as error:
        next(called(page, "generate", "<b>.pt", "S", *[""] * 9))
    assert "&lt;b&gt;.pt" in error.value.message
    tokens = [texts.Token(1, "<b>\n", 0), texts.Token(2, " &", 0, -9.0)]
    html = tokens_html(tokens).split('<div class="tokens">')[1]
    assert re.sub(r' class="[^"]*"', "", html) == (
        '<p><span title="">&lt;b&gt;<u></u>\n</span><span title="<0.1%"> &amp;</span></p></div>'
    )
