"""Invalid inputs to the three scripts, which must print one line and leave all files unchanged.

tests/cli/test_settings.py tests invalid settings and config files.
"""

import io
import pickle
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiny
import torch

import prepare
import sample
import train
from folio.cli import process

MAINS = {"prepare.py": prepare.main, "train.py": train.main, "sample.py": sample.main}
LINES_BEFORE_ERROR = {"sample.py": ("run/ckpt.pt: step ", "machine: ")}
# A bug, an error without a reason, and torch's advice to execute a checkpoint.
FORBIDDEN_WORDS = ("Traceback", " ()", "weights_only")

TRAIN = ["train.py", *tiny.flags()]
RESUME = ["train.py", *tiny.flags(out_dir="run", init_from="resume", max_iters=9)]
SAMPLE = ["sample.py", "--out_dir=run", "--device=cpu", "--dtype=float32", "--max_new_tokens=5"]
TEXT = ["prepare.py", "--dataset=new", "--input=text.txt"]
META, CHARACTER_TABLE = "data/verse/meta.json", "data/verse/meta.pkl"
BEST, LAST = "run/ckpt.pt", "run/last.pt"


# Damage to files


class Hostile:
    """Creates a file if it is unpickled without restrictions."""

    def __reduce__(self):
        return open, ("executed", "w")


def put(path, text=""):
    """Writes a file and creates its folder."""
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(text, encoding="latin-1")


def put_table():
    """Replaces meta.json by nanoGPT's character table, a pickle that creates a file."""
    Path(META).unlink()
    Path(CHARACTER_TABLE).write_bytes(pickle.dumps({"itos": Hostile(), "vocab_size": 3}))


def alter(path, **values):
    """Changes values in a checkpoint."""
    torch.save(torch.load(path) | values, path)


# (damage to the current folder, command, part of the error line)
MISTAKES = [
    (lambda: put("text.txt", "caf\xe9 au lait\n" * 9), TEXT, "text.txt is not UTF-8"),
    (lambda: (put("text.txt", tiny.VERSE), put("data/new")), TEXT, "data/new"),
    (None, [*TRAIN, "--n_embd=15"], "n_embd=15"),
    (None, [*TRAIN, "--out_dir="], "out_dir"),
    (None, [*TRAIN, "--out_dir=verse.txt/out"], "verse.txt/out"),
    (None, [*TRAIN, "--n_embd=1000000"], "memory"),
    (None, [*TRAIN, "--out_dir=run/ckpt.pt"], "'run/ckpt.pt' is not a run's folder"),
    (put_table, TRAIN, CHARACTER_TABLE),
    (None, [*RESUME, "--n_layer=12"], "n_layer is 1 in the checkpoint and 12"),  # the default
    (lambda: alter(LAST, optimizer=7), RESUME, LAST),
    (lambda: alter(BEST, tokenizer={"kind": "char", "characters": "abc"}), SAMPLE, "24"),
    (lambda: (alter(BEST, tokenizer=None), put_table()), SAMPLE, CHARACTER_TABLE),
    # Sampling
    (None, [*SAMPLE, "--start=a", "--prompts=b"], "cannot be combined"),
    (None, [*SAMPLE, "--score=a", "--interactive"], "cannot be combined"),
    (None, [*SAMPLE, "--interactive", "--json"], "cannot be combined"),
    (None, [*SAMPLE, "--score=a", "--stream"], "cannot be combined"),
    (None, [*SAMPLE, "--start=artü"], "'ü' (U+00FC)"),
    (None, [*SAMPLE, "--start=\udcff"], "--start is not UTF-8 text: set"),
    (None, [*SAMPLE, "--start=FILE:"], "the name of the file to read is empty"),
    (None, [*SAMPLE, "--init_from=scratch"], "init_from=scratch"),
    (lambda: put("hf/config.json", "[]"), [*SAMPLE, "--init_from=hf"], "hf/config.json"),
    # Checkpoints, which all scripts read with the same function
    (lambda: torch.save({"model": Hostile()}, BEST), SAMPLE, BEST),
    (lambda: torch.save(torch.load(LAST)["model"], LAST), RESUME, LAST),
    (lambda: alter(BEST, format=99), SAMPLE, BEST),
    (lambda: alter(BEST, iter_num="x"), SAMPLE, BEST),
    (lambda: alter(LAST, model={"a": 1}), RESUME, LAST),
    (lambda: alter(BEST, model=[1]), SAMPLE, BEST),
]


# Tests


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder with a text, its dataset, and a model trained on it."""
    folder = tmp_path_factory.mktemp("original")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        tiny.prepare_verse()
        train.main(tiny.flags(out_dir="run"))
    return folder


@pytest.fixture
def copy(original, tmp_path, monkeypatch):
    """A copy of this folder, which is the current folder."""
    folder = shutil.copytree(original, tmp_path / "copy")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def run(monkeypatch, capfd, recwarn):
    """A function that runs a script in this process. Returns its exit status and stderr."""

    def run_in_process(command):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        monkeypatch.setattr(sys, "argv", command)
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            process.run(MAINS[command[0]])
        warnings = [str(warning.message) for warning in recwarn]  # a script prints them on stderr
        return caught.value.code, "\n".join([*warnings, capfd.readouterr().err])

    return run_in_process


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda row: " ".join(row[1])[-60:])
def test_a_mistake_gives_one_error_line_and_status_2_and_changes_no_file(copy, run, mistake):
    damage, command, message = mistake
    if damage:
        damage()
    script, old_contents = command[0], tiny.contents()
    code, err = run(command)
    *earlier_lines, line = err.splitlines()
    assert code == 2
    assert line.startswith(f"{script}: ")
    assert message in line
    assert line.isprintable()
    assert len(line) < 1000
    assert not [words for words in FORBIDDEN_WORDS if words in err]
    assert all(line.startswith(LINES_BEFORE_ERROR.get(script, ())) for line in earlier_lines)
    assert tiny.contents() == old_contents
    return line


@pytest.mark.parametrize(
    ("command", "function"),
    [
        (TEXT, "folio.data.writer.meta_checksum"),
        (TRAIN, "folio.data.dataset.meta_checksum"),
        (SAMPLE, "folio.checkpoint.format.Checkpoint"),
        (RESUME, "folio.training.optimizers.shard_like"),
    ],
)
def test_a_bug_is_not_reported_as_a_mistake(copy, run, command, function, monkeypatch):
    monkeypatch.setattr(function, Mock(side_effect=ValueError("a bug")))
    put("text.txt", tiny.VERSE)
    with pytest.raises(ValueError, match="a bug"):
        run(command)
