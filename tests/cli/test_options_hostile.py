"""Every option of every command takes whatever is written behind it: the command goes on, or says one sentence.

The options are found, not written. What computes is replaced by an end of its own, so that a value that is accepted costs
nothing; a value must not get as far as that if it can do harm there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models import make_model
from support.questions import toy_questions
from typer.main import get_command
from typer.testing import CliRunner

from coral_lens.cli import app
from coral_lens.engine.extract import Extraction, extract
from coral_lens.errors import CoralError

HOSTILE = ("", " ", "-1", "0", "1e999", "nan", "-inf", "99999999999999999999", "../x", "{folder}", "{missing}",
           "{binary}", "nul\x00l", "[/b]", "日本\u202e", "\x1b[2J", "x" * 5000, "1,2", "true",
           "=1+1", "--", "a:b:c:")  # fmt: skip
"""What is written behind every option; folder, missing and binary are places on the disk."""
HEAVY = ("cli.options.Machine.open", "lens.fit.fit", "lens.artefact.Lens.predict", "analysis.layers.analyse_layers",
         "analysis.dimensions.analyse_dimensions", "analysis.heads.analyse_heads", "analysis.heads.time_step",
         "analysis.data.analyse_curves", "analysis.probes.analyse_probes", "sae.train.train_on_store",
         "study.run.run_prepared", "study.run.run_alone", "study.demo.run_demo", "harness.command.run_lm_eval",
         "data.assets.fetch_assets", "lens.publish.push_to_hub")  # fmt: skip
FOREIGN = ("lm-eval", "demo", "assets", "push")
"""Commands without a value of ours to check, or that would ask the network."""
EVERY = 83
"""Of all pairs of an option and a value, so many are passed over for one that is tried; by hand, 1 tries all."""


class ReachedError(CoralError):
    """Accepted: the command would now begin to compute."""


def leaves(command: Any, *above: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", None)
    if not inner:
        yield above, command
    for name, one in (inner or {}).items():
        yield from leaves(one, *above, name)


COMMANDS = {words: command for words, command in leaves(get_command(app)) if words[0] not in FOREIGN}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small inputs of every kind."""
    folder = tmp_path_factory.mktemp("place")
    questions = toy_questions(24)
    lines = [{"id": q.id, "question": q.text, "options": q.options, "answer": q.answer} for q in questions]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "folder").mkdir()
    extract(
        make_model("llama"),
        questions,
        folder / "store",
        extraction=Extraction(layers=(0, 1, 2), packing="tree", token_budget=2000),
    )
    return folder


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise ReachedError("Accepted.")

    for name in HEAVY:
        monkeypatch.setattr(f"coral_lens.{name}", stop)
    monkeypatch.setenv("CORAL_CACHE", str(place / "cache"))


def needed(place: Path, parameter: Any) -> list[str]:
    """What a command cannot do without."""
    name = parameter.opts[0]
    values = {"--out": place / "out", "--store": place / "store", "--layer": 2, "--run": place / "run"}
    value = str(values.get(name, place / "train.jsonl"))
    return [name, value] if name.startswith("--") else [value]


def lines_for(place: Path, words: tuple[str, ...], command: Any) -> Iterator[list[str]]:
    """Yield the command with each hostile value behind each of its options and arguments."""
    known = [p for p in command.params if not getattr(p, "is_flag", False) and p.name != "help"]
    for parameter in known:
        wanted = [p for p in known if (p.required or "--store" in p.opts) and p is not parameter]
        others = [text for p in wanted for text in needed(place, p)]
        for value in HOSTILE:
            text = value.format(folder=place / "folder", missing=place / "missing", binary=place / "binary")
            own = [parameter.opts[0], text] if parameter.opts[0].startswith("--") else ["--", text]
            yield [*words, *others, *own]


@pytest.mark.usefixtures("light", "one_thread")
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_whatever_is_written_behind_an_option_is_accepted_or_one_sentence(
    words: tuple[str, ...], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place / "folder")
    broken = []
    first = 7 * list(COMMANDS).index(words) % EVERY  # not the same option and value of every command
    for line in list(lines_for(place, words, COMMANDS[words]))[first::EVERY]:
        result = CliRunner().invoke(app, line)
        error = result.exception
        one_sentence = isinstance(error, CoralError) and "\n" not in str(error)
        if not (one_sentence or (isinstance(error, SystemExit | None) and result.exit_code in (0, 2))):
            broken.append((line, error))
    assert not broken


@pytest.mark.parametrize("option", ["--expansion", "--batch-size"])
def test_autoencoders_that_no_memory_holds_are_refused_before_any_work(
    place: Path, tmp_path: Path, option: str
) -> None:
    line = ["sae", "train", "--store", str(place / "store"), "--layer", "2", "--out", str(tmp_path / "sae")]
    result = CliRunner().invoke(app, [*line, option, "1000000000"])
    assert isinstance(result.exception, CoralError)
    assert "GiB of memory, and this machine has" in str(result.exception)
    assert not (tmp_path / "sae").exists()
