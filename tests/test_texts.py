"""tools/texts.py: what the playground does with a text, compared with sample.py and the model."""

import itertools
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import tiny
import torch

import sample
from folio.completion import Completion
from folio.errors import UserError
from folio.scoring import likely_next
from folio.settings import load
from model import GPT, GPTConfig
from tools import texts
from tools.models import Models
from tools.texts import (
    CONTROLS,
    Generation,
    Token,
    alternatives,
    attention,
    controls,
    score,
    settings_of,
    vocabulary_problem,
)

PATH = "out/ckpt.pt"
LETTERS = tiny.new_tokenizer("char", tiny.VERSE)
COUNT = 20  # tokens of a text; the model sees 8


@pytest.fixture
def models(folder):
    """The models of a folder with a model of the characters of VERSE. Nothing is in its thread."""
    tiny.write_checkpoint(PATH, LETTERS)
    return Models("cpu", "float32")


def values(**changes):
    """Returns values of CONTROLS."""
    return [({"max_new_tokens": COUNT} | changes).get(f.name, f.default) for f in controls()]


def generated(models, prompt="Shall I", stopped=None, **changes):
    """Returns a text as the page generates it."""
    generation = Generation(models, settings_of(values(**changes)))
    generation.continue_prompt(stopped or Event(), PATH, prompt)
    return generation.text()


def branched(models, text, index, choice, **changes):
    generation = Generation(models, settings_of(values(**changes)))
    generation.branch(Event(), text, index, choice)
    return generation.text()


def sampled(capsys, prompt="Shall I", **changes):
    """Returns what sample.py prints with --json for the same checkpoint, prompt and settings."""
    flags = [f"--{k}={v}" for k, v in ({"max_new_tokens": COUNT} | changes).items()]
    flags += ["--num_samples=1", "--json", f"--init_from={PATH}"] + [f"--start={prompt}"] * (
        prompt != ""
    )
    capsys.readouterr()
    sample.main([*flags, "--device=cpu", "--dtype=float32"])
    return json.loads(capsys.readouterr().out)


def assert_same(text, expected):
    """Asserts that a text is one of `sampled`."""
    new = text.tokens[len(text.tokens) - len(expected["ids"]) :]
    assert text.text == expected["prompt"] + expected["text"]
    assert [token.id for token in new] == expected["ids"]
    assert [token.logprob for token in new] == expected["logprobs"]


def probability_of(trained, text, index):
    """Returns the model's probability of a token, given what it saw of the text."""
    context = text.ids[text.tokens[index].start : index]
    return dict(likely_next(trained, context, 10_000))[text.tokens[index].id]


# Generation


@pytest.mark.parametrize(
    ("prompt", "changes"),
    [
        ("", {}),
        ("S", {"seed": 7, "top_k": 3}),
        ("Shall I", {"top_k": None, "top_p": 0.5, "min_p": 0.1, "temperature": 2.0}),
        ("Shall I", {"temperature": 0.0}),
        ("Shall I", {"repetition_penalty": 1.5}),
        ("Shall I", {"context_stride": 1}),
        ("Shall I", {"stop": '["e", "th"]', "temperature": 1.5}),
        ("Shall I", {"max_new_tokens": 1}),
        (tiny.VERSE[:40], {}),
        (tiny.VERSE[:40], {"context_stride": 3, "repetition_penalty": 1.5, "stop": "e"}),
    ],
)
def test_a_text_is_that_of_sample_py(models, capsys, prompt, changes):
    assert_same(generated(models, prompt, **changes), sampled(capsys, prompt, **changes))


@pytest.mark.parametrize("kind", ["byte", "bpe", "gpt2"])
def test_a_text_of_another_tokenizer_is_that_of_sample_py(models, capsys, kind, gpt2_of_bytes):
    tokenizer = tiny.new_tokenizer(kind, tiny.VERSE * 20, 260)
    tiny.write_checkpoint(PATH, tokenizer)
    for changes in {"temperature": 1.5}, {"seed": 3, "stop": "e"}:
        assert_same(
            generated(models, "naïve 🦶", **changes), sampled(capsys, "naïve 🦶", **changes)
        )


def test_tokens_of_a_prompt_have_their_texts_and_no_probability(models):
    text = generated(models, "Shall I")
    assert [token.piece for token in text.tokens[:7]] == list("Shall I")
    assert [token.logprob for token in text.tokens[:7]] == [None] * 7
    assert None not in [token.logprob for token in text.tokens[7:]]
    assert text.ids[:7] == LETTERS.encode("Shall I").tolist()


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("kind", ["char", "byte"])
def test_the_text_while_it_is_generated_is_a_beginning_of_the_final_text(
    models, monkeypatch, kind, stops
):
    """It is read in another thread, also while a token is added."""
    tiny.write_checkpoint(PATH, tiny.new_tokenizer(kind, tiny.VERSE))
    stop = generated(models).text[-6:-2] if stops else None
    generation, seen = Generation(models, settings_of(values(stop=stop))), []

    def look(self, *arguments):
        seen.append(generation.text())
        extend(self, *arguments)
        seen.append(generation.text())

    extend = Completion._extend
    monkeypatch.setattr(Completion, "_extend", look)
    assert generation.text() is None
    generation.continue_prompt(Event(), PATH, "Shall I")
    final = generation.text()
    assert final.status.endswith(f"; ended by {stop!r}") == stops
    assert len(seen) >= 2 * (len(final.tokens) - len("Shall I"))
    for each in seen:
        assert final.text.startswith(each.text)
        assert each.ids == final.ids[: len(each.ids)]


def test_a_beginning_of_a_stop_text_is_not_shown_while_it_may_become_one(models, monkeypatch):
    whole = generated(models).text.removeprefix("Shall I")
    stop, shown = whole[5:8], []
    real = texts.continued

    def watched(*arguments):
        for _ in real(*arguments):
            shown.append(generation.text().text)
            yield

    monkeypatch.setattr(texts, "continued", watched)
    generation = Generation(models, settings_of(values(stop=stop)))
    generation.continue_prompt(Event(), PATH, "Shall I")
    end = whole.index(stop)
    assert generation.text().text == "Shall I" + whole[:end]
    assert generation.text().status.endswith(f"; ended by {stop!r}")
    assert [len(each) - len("Shall I") for each in shown[end:]] == [end] * 3


def test_stopping_ends_a_text_after_a_token_without_a_reason(models):
    stopped = Event()
    stopped.set()
    text = generated(models, stopped=stopped)
    assert len(text.text) == len("Shall I") + 1
    assert "1 token" in text.status
    assert "ended" not in text.status


def test_the_status_has_the_number_of_tokens_and_the_speed(models, monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(texts, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    assert generated(models).status == "20 tokens, 1 tokens/s"


def test_a_text_ends_at_the_end_of_text_token(models, gpt2_of_bytes):
    tiny.write_model(PATH, chain({97: 98, 98: 256, 256: 97}, vocab_size=320), gpt2_of_bytes)
    text = generated(models, "a", temperature=0.0)
    assert (text.text, text.ids) == ("ab", [97, 98, 256])
    assert text.status.endswith("; ended by 'end of text'")


@pytest.mark.parametrize("prompt", ["ü", "Shall I ü"])
def test_an_unknown_character_is_an_error_and_a_problem_of_the_prompt(models, prompt):
    with pytest.raises(UserError, match=r"^character 'ü' \(U\+00FC\) at position") as error:
        generated(models, prompt)
    trained, _ = models.newest(PATH)
    assert vocabulary_problem(trained, prompt) == str(error.value)
    assert vocabulary_problem(trained, prompt.replace("ü", "a")) == ""
    assert vocabulary_problem(trained, "") == ""


# Alternatives


def chain(follows, vocab_size=256):
    """Returns a GPT without layers. {token: its likely successor, or a list, the best first}."""
    config = GPTConfig(8, vocab_size, n_layer=0, n_head=1, n_embd=vocab_size, tie_weights=False)
    model = GPT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wte.weight.fill_diagonal_(1.0)
        model.transformer.ln_f.weight.fill_(1.0)
        for token, likely in follows.items():
            for rank, successor in enumerate(likely if isinstance(likely, list) else [likely]):
                model.lm_head.weight[successor, token] = 2.0 - rank / 2
    return model


@pytest.mark.parametrize("stride", [None, 1, 3])
def test_the_probability_of_a_token_is_that_among_its_alternatives(models, stride):
    """Also beyond the context, and after a branch."""
    text = generated(models, "Shall I", context_stride=stride)
    trained, _ = models.newest(PATH)
    _, choice = alternatives(models, text, 18)[1][9]
    for each in (text, branched(models, text, 18, choice, context_stride=stride)):
        for index in range(7, len(each.tokens)):
            expected = probability_of(trained, each, index)
            token = each.tokens[index]
            assert index - token.start <= 8
            assert math.exp(token.logprob) == pytest.approx(expected, abs=1e-5)


def test_alternatives_are_the_most_likely_tokens_with_probabilities(models):
    text = generated(models)
    trained, _ = models.newest(PATH)
    for index in (3, 7, 20):  # also of the prompt
        _, found = alternatives(models, text, index)
        likely = likely_next(trained, text.ids[text.tokens[index].start : index], 10)
        assert [token for _, token in found] == [token for token, _ in likely]
        for (label, token), (_, probability) in zip(found, likely, strict=True):
            character = LETTERS.decode([token])
            shown = {"\n": "\\n", " ": "␣"}.get(character, character)
            assert label == f"{shown}  {texts.percent(probability)}"
    assert alternatives(models, text, 0)[1] == []


@pytest.mark.parametrize("index", [5, 7, 13, 26])
def test_a_branch_continues_the_unchanged_text_with_the_chosen_token(models, capsys, index):
    text = generated(models)
    label, choice = alternatives(models, text, index)[1][1]
    branch = branched(models, text, index, choice, seed=3)
    assert branch.version == text.version
    assert branch.tokens[:index] == text.tokens[:index]
    token = branch.tokens[index]
    assert (token.id, token.piece) == (choice, LETTERS.decode([choice]))
    assert label.endswith(f"  {texts.percent(math.exp(token.logprob))}")
    assert len(branch.tokens) == index + 1 + COUNT
    before = "".join(each.piece for each in branch.tokens[: index + 1])
    assert_same(branch, sampled(capsys, before, seed=3))


def test_a_branch_can_start_within_a_branch_or_a_scored_text(models):
    text = score(models, PATH, tiny.VERSE)
    for index in (60, 40, 41):
        choice = alternatives(models, text, index)[1][2][1]
        before, text = text, branched(models, text, index, choice)
        assert text.tokens[:index] == before.tokens[:index]
        assert text.ids[index] == choice


def test_a_branch_within_a_character_keeps_or_completes_it(models):
    byte = tiny.new_tokenizer("byte", "")
    follows = {97: [0xC3, 98, 0xC4], 0xC3: [0xA9, 0xA8], 0xC4: [0xA9], 0xA9: [97], 0xA8: [97]}
    tiny.write_model(PATH, chain(follows), byte)
    text = generated(models, "a", temperature=0.0, max_new_tokens=6)
    assert text.text == "aéaéa"
    assert [token.piece for token in text.tokens] == ["a", "", "é", "a", "", "é", "a"]
    greedy = {"temperature": 0.0, "max_new_tokens": 2}
    assert branched(models, text, 4, 98, **greedy).text.startswith("aéab")
    assert branched(models, text, 5, 0xA8, **greedy).text == "aéaèa\N{REPLACEMENT CHARACTER}"
    begun = branched(models, text, 4, 0xC4, **greedy)  # the first byte of another character
    assert begun.text == "aéaĩa"
    assert [token.piece for token in begun.tokens[4:]] == ["", "ĩ", "a"]


def test_a_branch_can_continue_after_the_end_of_text_token(models, gpt2_of_bytes):
    follows = {97: [98, 256], 98: [97], 256: [98]}
    tiny.write_model(PATH, chain(follows, vocab_size=320), gpt2_of_bytes)
    text = generated(models, "a", temperature=0.0, max_new_tokens=3)
    (_, _), (label, choice) = alternatives(models, text, 1)[1][:2]
    assert label.startswith("<|endoftext|>  ")
    branch = branched(models, text, 1, choice, temperature=0.0, max_new_tokens=2)
    assert branch.ids == [97, 256, 98, 97]


def test_a_token_that_the_text_no_longer_has_is_an_error(models):
    text = generated(models)
    for call in (
        lambda: alternatives(models, text, 99),
        lambda: branched(models, text, 99, 1),
        lambda: branched(models, text, 9, 10_000),  # not among the alternatives there
    ):
        with pytest.raises(UserError, match="^the text has changed since this token was selected"):
            call()


def test_a_text_whose_checkpoint_was_replaced_uses_the_old_model_or_is_an_error(models):
    text = generated(models)
    _, found = alternatives(models, text, 9)
    tiny.write_checkpoint("new.pt", LETTERS, n_layer=1)
    os.replace("new.pt", PATH)
    assert alternatives(models, text, 9)[1] == found
    new = generated(models)
    assert new.text != text.text
    assert new.version != text.version
    for call in (
        lambda: alternatives(models, text, 9),
        lambda: branched(models, text, 9, found[0][1]),
        lambda: attention(models, text, 0),
    ):
        with pytest.raises(UserError, match="was replaced after this text was made"):
            call()


def test_several_tabs_generate_while_the_checkpoint_is_replaced(models):
    def replace(layers):
        tiny.write_checkpoint("new.pt", LETTERS, n_layer=layers)
        os.replace("new.pt", PATH)

    def tab(seed):
        found = []
        for _ in range(6):
            generation = Generation(models, settings_of(values(seed=seed)))
            for _ in models.stream(generation.continue_prompt, PATH, "Shall I"):
                generation.text()
            found.append(generation.text().text)
        return found

    expected = {seed: set() for seed in (1, 2)}
    for layers in (1, 2):
        replace(layers)
        for seed, known in expected.items():
            known.add(generated(models, seed=seed).text)
    with ThreadPoolExecutor(2) as pool:
        tabs = {seed: pool.submit(tab, seed) for seed in expected}
        for number in range(16):
            replace(1 + number % 2)
    for seed, known in expected.items():
        assert set(tabs[seed].result()) <= known
    replace(3)
    assert models.run(lambda: models.newest(PATH)[0].model.config.n_layer) == 3


# Scores


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
@pytest.mark.parametrize("length", [2, 9, 60])
def test_a_score_is_that_of_sample_py(models, capsys, kind, length):
    content = tiny.VERSE[: length - 1] + ("é" if kind != "char" else "S")
    tiny.write_checkpoint(PATH, tiny.new_tokenizer(kind, tiny.VERSE * 20))
    Path("poem.txt").write_text(content, encoding="utf-8")
    flags = [f"--init_from={PATH}", "--score=poem.txt", "--device=cpu", "--dtype=float32"]
    capsys.readouterr()
    sample.main([*flags, "--logprobs"])
    captured = capsys.readouterr()
    text = score(models, PATH, content)
    assert text.text == content
    assert captured.err.splitlines()[-1] == f"poem.txt: {text.status}"
    shown = ["-" if t.logprob is None else f"{t.logprob:.4f}" for t in text.tokens]
    pairs = zip(shown, text.tokens, strict=True)
    assert captured.out.splitlines() == [f"{number}\t{t.piece!r}" for number, t in pairs]


def test_the_probability_of_a_scored_token_is_that_among_its_alternatives(models):
    text = score(models, PATH, tiny.VERSE)
    trained, _ = models.newest(PATH)
    for index in range(1, len(text.tokens)):
        expected = probability_of(trained, text, index)
        assert math.exp(text.tokens[index].logprob) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "^the text has 0 tokens; a score needs text after the first"),
        ("S", "^the text has 1 tokens; a score needs text after the first"),
        ("ü", r"^character 'ü' \(U\+00FC\) at position 0 "),
        ("S" * 12, f"^the text has 12 tokens, and .* at most 11: use .*--init_from={PATH} --score"),
    ],
)
def test_a_text_that_cannot_be_scored_is_an_error(models, monkeypatch, content, message):
    monkeypatch.setattr(texts, "MOST_TOKENS", 11)
    with pytest.raises(UserError, match=message):
        score(models, PATH, content)


# Settings


def test_the_defaults_are_those_of_sample_py():
    defaults = [each.default for each in controls()]
    assert settings_of(defaults) == load(sample.SampleConfig, ["--num_samples=1", "--stream"])
    assert [each.name for each in controls()] == list(CONTROLS)
    shown = ["" if each is None else str(each) for each in defaults]  # in text fields
    assert settings_of(shown) == settings_of(defaults)


def test_integers_become_floats_where_the_setting_is_a_float():
    found = settings_of(values(temperature=1, top_p=1))
    assert [type(each) for each in (found.temperature, found.top_p)] == [float, float]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.5), ("temperature", math.nan), ("temperature", math.inf),
        ("max_new_tokens", 0), ("seed", -1), ("seed", 2**63), ("top_k", 0), ("top_k", 1.5),
        ("top_p", 0.0), ("top_p", 1.5), ("min_p", 1.5), ("repetition_penalty", 0.001),
        ("context_stride", 0), ("stop", '["a", 1]'),
    ],
)  # fmt: skip
def test_a_wrong_value_has_the_message_of_sample_py(name, value):
    with pytest.raises(UserError) as expected:
        sample.read_inputs(load(sample.SampleConfig, [f"--{name}={value}", "--num_samples=1"]))
    with pytest.raises(UserError) as error:
        settings_of(values(**{name: value}))
    message = str(expected.value)
    assert str(error.value) == (message if name == "stop" else message.removeprefix("--"))
    assert message.startswith((f"--{name} must be", "--stop=["))


@pytest.mark.parametrize("name", ["temperature", "max_new_tokens", "seed", "top_p"])
def test_an_empty_field_without_a_default_is_an_error(name):
    with pytest.raises(UserError, match=f"^{name} must be (int|float), not '?None"):
        settings_of(values(**{name: None}))


# Colors and attention


@pytest.mark.parametrize(
    ("probability", "band", "percent"),
    [
        (1.0, "likely", "100.0%"), (0.5, "likely", "50.0%"), (0.499, "fair", "49.9%"),
        (0.06, "unlikely", "6.0%"), (0.049, "rare", "4.9%"), (0.009, "surprising", "0.9%"),
        (0.001, "surprising", "0.1%"), (0.00099, "surprising", "<0.1%"),
        (0.0, "surprising", "<0.1%"), (None, "", ""),
    ],
)  # fmt: skip
def test_tokens_have_bands_of_probability(probability, band, percent):
    logprob = math.log(probability) if probability else None
    token = Token(1, "a", 0, -math.inf if probability == 0 else logprob)
    assert (token.band, token.percent) == (band, percent)


def titles(figure):
    return [axes.get_title() for axes in figure.findobj(lambda each: hasattr(each, "imshow"))]


def test_attention_of_each_head_of_a_layer_is_drawn(models):
    pytest.importorskip("matplotlib")
    text = generated(models)
    figure = attention(models, text, 1)
    assert {"layer 1, head 0", "layer 1, head 1"} <= set(titles(figure))
    assert not any("layer 0" in title for title in titles(figure))
    assert figure.get_suptitle().startswith(f"{PATH}, layer 1\n")
    assert repr(text.text[-8:]) in figure.get_suptitle()


@pytest.mark.parametrize(
    ("layer", "message"),
    [(2, "no layer 2; the last is layer 1"), (-1, "no layer -1;"), (None, "^enter the number")],
)
def test_a_wrong_layer_is_an_error(models, layer, message):
    with pytest.raises(UserError, match=message):
        attention(models, generated(models), layer)


def test_a_model_without_layers_has_no_attention(models):
    tiny.write_checkpoint(PATH, LETTERS, n_layer=0)
    with pytest.raises(UserError, match="the model has no layers"):
        attention(models, generated(models), 0)
