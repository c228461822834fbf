"""tools/playground.py: settings, errors and the parts of the page. No browser."""

import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import requests
import tiny

from folio.errors import UserError
from folio.settings import load
from sample import SampleConfig
from tools import playground
from tools.models import Models
from tools.playground import PlaygroundConfig, first_checkpoint, is_local
from tools.texts import BANDS, Token, controls

ROOT = Path(__file__).parent.parent
LETTERS = tiny.new_tokenizer("char", tiny.VERSE)
PATH = "out/ckpt.pt"


@pytest.fixture
def installed(monkeypatch):
    """Makes main() believe that the packages are installed. It imports them in serve()."""
    monkeypatch.setattr(playground, "find_spec", lambda name: True)


@pytest.fixture
def run(folder):
    """A run in out/ of the current folder."""
    tiny.write_checkpoint(PATH, LETTERS)


# Settings


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("--prot=1", 2)])
def test_help_and_invalid_flags_are_answered_without_torch_and_gradio(argument, status, tmp_path):
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv[1:] = [{argument!r}]\n"
        "try: runpy.run_module('tools.playground', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as exit: print(exit.code, {'torch', 'gradio'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True)
    *lines, last = done.stdout.decode().splitlines()
    assert last == f"{status} set()"
    if argument == "--help":
        found = re.findall(r"^  --(\w+)=.+\n      .+ \(.+\)$", "\n".join(lines), re.M)
        assert found == [field.name for field in fields(PlaygroundConfig)]
    else:
        assert "unknown setting --prot; did you mean --port" in done.stderr.decode()


def test_the_page_is_only_for_this_machine_by_default():
    settings = load(PlaygroundConfig, [])
    assert is_local(settings.host)
    assert (settings.out_dir, settings.port, settings.password) == (None, None, None)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("192.168.1.2", False), ("example.org", False),
        ("", False),
    ],
)  # fmt: skip
def test_only_loopback_addresses_are_local(host, expected):
    assert is_local(host) == expected


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--password=", "^the password is empty"),
        ("--port=0", r"^--port must be in \[1, 65535\], not 0"),
        ("--port=65536", r"^--port must be in \[1, 65535\], not 65536"),
        ("--port=web", "^--port must be int or None, not 'web'"),
        ("--device=cuda:99", "^device=cuda:99, but"),
    ],
)
def test_a_wrong_setting_is_an_error(flag, message):
    with pytest.raises(UserError, match=message):
        playground.main([flag])


@pytest.mark.parametrize("name", ["gradio", "matplotlib"])
def test_a_missing_package_is_an_error_with_the_command_that_installs_it(run, monkeypatch, name):
    monkeypatch.setattr(playground, "find_spec", lambda each: each != name)
    with pytest.raises(UserError) as error:
        playground.main([])
    assert str(error.value) == f"the playground needs {name}: pip install gradio matplotlib"


# The checkpoint that is selected first


def test_the_first_model_is_the_best_of_a_run_or_its_newest(folder):
    tiny.write_checkpoint("out/last.pt", LETTERS)
    assert first_checkpoint("out") == "out/last.pt"
    assert first_checkpoint(Path("out").absolute()) == "out/last.pt"
    tiny.write_checkpoint(PATH, LETTERS)
    os.utime(PATH, (1, 1))
    assert first_checkpoint("out") == PATH


def test_without_a_run_the_first_model_is_the_one_saved_last(folder):
    for number, path in enumerate(["b/ckpt.pt", "sweep/a/ckpt.pt", "c/ckpt.pt"]):
        tiny.write_checkpoint(path, LETTERS)
        os.utime(path, (9 - number % 2, 9 + number % 2))
    assert first_checkpoint(None) == "sweep/a/ckpt.pt"


def test_a_folder_without_a_model_is_an_error_that_says_what_to_do(folder, installed):
    with pytest.raises(UserError, match="^there is no trained model in this folder: train one"):
        playground.main([])
    tiny.write_run("out-log", [])
    with pytest.raises(UserError, match="^there is no trained model in this folder: train one"):
        playground.main([])
    with pytest.raises(UserError, match="^there is no checkpoint nowhere/ckpt.pt; available"):
        playground.main(["--out_dir=nowhere"])
    tiny.write_checkpoint(PATH, LETTERS)
    with pytest.raises(UserError, match=r"^there is no checkpoint oui/ckpt.pt; did you mean out"):
        playground.main(["--out_dir=oui"])


def test_the_selected_run_can_be_outside_the_folder(run, monkeypatch):
    Path("other").mkdir()
    monkeypatch.chdir("other")
    assert first_checkpoint("../out") == "../out/ckpt.pt"


# The server


@pytest.fixture
def interrupted(run, installed, monkeypatch, capsys):
    """A function that runs main() until Ctrl-C, without a server. Returns what it prints."""
    waiting = SimpleNamespace(wait=Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(playground, "threading", SimpleNamespace(Event=lambda: waiting))
    monkeypatch.setattr(playground, "serve", lambda *_: "http://127.0.0.1:7860/")

    def interrupted(*flags):
        with pytest.raises(KeyboardInterrupt):
            playground.main(flags)
        return capsys.readouterr()

    return interrupted


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        ([], False),
        (["--host=0.0.0.0"], True),
        (["--host=0.0.0.0", "--password=secret"], False),
        (["--host=localhost"], False),
    ],
)
def test_a_page_for_other_machines_has_a_warning_unless_it_has_a_password(
    interrupted, flags, warned
):
    captured = interrupted(*flags)
    assert captured.out == "open http://127.0.0.1:7860/ in a browser; Ctrl-C stops the server\n"
    assert captured.err == f"{playground.WARNING}\n" * warned


def test_a_damaged_checkpoint_is_an_error_at_the_start(run, installed, monkeypatch):
    Path(PATH).write_bytes(b"damaged")
    monkeypatch.setattr(playground, "serve", lambda *_: "url")
    with pytest.raises(UserError, match="^out/ckpt.pt is "):
        playground.main(["--device=cpu"])


@pytest.fixture
def models():
    pytest.importorskip("gradio")
    pytest.importorskip("matplotlib")
    return Models("cpu", "float32")


def test_a_port_that_is_in_use_is_an_error(run, models):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = load(PlaygroundConfig, [f"--port={port}"])
        with pytest.raises(UserError, match=f"^cannot listen on 127.0.0.1, port {port} .Address"):
            playground.serve(models, PATH, settings)


def test_a_password_protects_everything(run, models, monkeypatch):
    import gradio

    for name in ("http_proxy", "HTTP_PROXY"):  # is not asked for the page
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "example.org")
    settings = load(PlaygroundConfig, ["--password=verse"])
    url = playground.serve(models, PATH, settings)
    try:
        session = requests.Session()
        session.trust_env = False  # no proxy
        protected = [f"{url}{path}" for path in ("config", "gradio_api/info")]
        assert PATH not in session.get(url).text
        assert [session.get(each).status_code for each in protected] == [401, 401]
        account = {"username": playground.USER, "password": "poem"}
        assert session.post(f"{url}login", data=account).status_code == 400
        assert [session.get(each).status_code for each in protected] == [401, 401]
        assert session.post(f"{url}login", data=account | {"password": "verse"}).ok
        assert [session.get(each).status_code for each in protected] == [200, 200]
    finally:
        gradio.close_all(verbose=False)


# The page


@pytest.fixture
def page(run, models):
    """The page, with two more checkpoints in the current folder."""
    from tools.page import build

    tiny.write_checkpoint("out/last.pt", LETTERS)
    tiny.write_checkpoint("out-b/ckpt.pt", LETTERS)
    return build(models, PATH)


def labels_of(page):
    """Returns {label: component}."""
    return {each.label: each for each in page.blocks.values() if getattr(each, "label", None)}


def test_the_page_has_the_controls_of_sample_py(page):
    found = labels_of(page)
    by_name = {field.name: field for field in fields(SampleConfig)}
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "context_stride"):
        field = by_name[name]
        assert found[name].value in (field.default, str(field.default))
        explanation = field.metadata["explanation"]
        assert found[name].info == f"{explanation}; in {field.metadata['bounds']}"
    for name in ("seed", "max_new_tokens", "stop"):
        assert found[name].value == by_name[name].default


def test_the_page_lists_the_checkpoints_and_selects_those_to_compare(page):
    found = labels_of(page)
    names = {"out": PATH, "out, newest state": "out/last.pt", "out-b": "out-b/ckpt.pt"}
    for label in ("model", "first model", "second model"):
        assert dict(map(tuple, found[label].choices)) == names
    assert [found[label].value for label in ("model", "first model")] == [PATH, PATH]
    assert found["second model"].value == "out-b/ckpt.pt"


def test_a_checkpoint_outside_the_folder_can_be_selected(run, models, monkeypatch):
    from tools.page import build

    Path("other").mkdir()
    monkeypatch.chdir("other")
    found = labels_of(build(models, "../out/ckpt.pt"))
    assert found["model"].choices == [("../out/ckpt.pt", "../out/ckpt.pt")]
    assert found["second model"].value == "../out/ckpt.pt"
    shutil.rmtree("../out")  # the page stays, with an error when it is used


def test_the_page_has_no_public_api_and_no_analytics(page):
    assert {fn.api_visibility for fn in page.fns.values()} == {"private"}
    assert not page.analytics_enabled


def defaults(**changes):
    return [changes.get(field.name, field.default) for field in controls()]


def function(page, name):
    """Returns a function of the page that is called when it is used."""
    (found,) = {each.fn for each in page.fns.values() if each.name == name}
    return found


@pytest.mark.parametrize("name", ["generate", "compare"])
def test_ending_a_generator_of_the_page_ends_the_text_and_frees_the_thread(page, models, name):
    """gradio does so when a tab is closed, or at a click on Stop."""
    values = defaults(max_new_tokens=10**9)
    inputs = [PATH, *["out-b/ckpt.pt"] * (name == "compare"), "Shall I", *values]
    shown = function(page, name)(*inputs)
    next(shown)
    shown.close()
    assert models.submit(int).result(20) == 0


def test_the_page_shows_the_text_of_the_models_that_are_compared(page):
    *_, last = function(page, "compare")(PATH, "out-b/ckpt.pt", "I", *defaults(max_new_tokens=3))
    assert [each.count('class="token ') for each in last] == [4, 0, 4, 0]
    assert last[0] == last[2]  # the same weights and seed
    assert [each.startswith("3 tokens, ") for each in last] == [False, True] * 2


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ("é", {}, "character &#x27;é&#x27; .* is not among the"),
        ("I", {"top_p": 2.0}, r"top_p must be in \(0, 1\], not 2"),
        ("I", {"max_new_tokens": 1.5}, "max_new_tokens must be int"),
    ],
)
def test_an_error_takes_the_place_of_the_description(page, prompt, changes, message):
    *_, last = function(page, "generate")(PATH, prompt, *defaults(**changes))
    assert re.search(message, last[3])


def test_tokens_are_html_that_shows_their_probability_and_line_breaks(models):
    from tools.components import tokens_html

    tokens = [Token(1, "<b>\n", 0), Token(2, "", 0, -0.1), Token(3, " &", 0, -9.0)]
    legend, shown = tokens_html(tokens).split('<div class="tokens">')
    assert legend.count("<span") == len(BANDS)
    assert shown == (
        '<p><span class="token " title="">&lt;b&gt;<u></u>\n</span>'
        '<span class="token likely" title="90.5%"></span>'
        '<span class="token surprising" title="<0.1%"> &amp;</span></p></div>'
    )


def test_an_error_is_shown_without_a_traceback(models):
    import gradio

    from tools.components import reported

    with pytest.raises(gradio.Error) as error, reported():
        raise UserError("no <b>")
    assert (error.value.message, error.value.print_exception) == ("no &lt;b&gt;", False)
    with pytest.raises(ValueError, match="a bug"), reported():
        raise ValueError("a bug")
