"""`coral extract`, `fit` and `calibrate`: what their options stand for, and that wrong values are refused before any work."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support.commands import GOLDEN, ROOT
from support.models import make_model
from support.pages import blocks_of
from support.s3 import put_at
from typer.testing import CliRunner

from coral_lens.cli import app
from coral_lens.cli.analyse import Studied
from coral_lens.cli.extract import KeptStates, parse_blocks
from coral_lens.data.settings import Style
from coral_lens.engine import activations
from coral_lens.errors import CoralError

pytestmark = pytest.mark.usefixtures("one_thread")


def run(*arguments: object) -> str:
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False).output


def test_by_default_all_layers_and_no_heads_are_kept() -> None:
    extraction = KeptStates().extraction(make_model("llama"))
    assert extraction.layers == (0, 1, 2, 3)
    assert extraction.readings is None
    assert extraction.style == Style()


def test_layers_heads_and_style_are_kept_as_asked() -> None:
    model = make_model("llama")
    extraction = KeptStates(layers=(2,), heads=(1, 3), style=Style("letters")).extraction(model)
    assert (extraction.layers, extraction.style.kind) == ((2,), "letters")
    assert extraction.readings is not None
    assert extraction.readings.about == {"heads": [1, 3]}
    everything = KeptStates(heads=None).extraction(model)
    assert everything.readings is not None
    assert everything.readings.about == {"heads": [1, 2, 3]}


def test_blocks_are_numbers_ranges_or_all() -> None:
    assert parse_blocks("1-3,5", "--heads") == (1, 2, 3, 5)
    assert parse_blocks("all", "--heads") is None
    with pytest.raises(CoralError, match=r"--heads must look like 0,16 or 12-20. Got 'every' instead"):
        parse_blocks("every", "--heads")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["extract", "q.jsonl", "--out", "OUT", "--heads", "some"], "--heads must look like 0,16 or 12-20"),
        (["extract", "q.jsonl", "--out", "OUT", "--num-fewshot", "-1"], "num_fewshot must be at least 0. Got -1"),
        (["fit", "--train", "q.jsonl", "--out", "OUT", "--top-layers", "9"], "top_layers must lie between 1 and 8"),
        (["fit", "--train", "q.jsonl", "--out", "OUT", "--criterion", "briar"], "Unknown criterion 'briar'.*'brier'"),
        (["fit", "--train", "q.jsonl", "--out", "OUT", "--search", "all"], "Unknown search 'all'; use one of halving"),
        (["fit", "--train", "q.jsonl", "--out", "OUT", "--weight-decay", "1;45"], "--weight-decay must look like 0.1"),
        (["fit", "--train", "q.jsonl", "--out", "OUT", "--lens", "mlp", "--hidden", "0"], "hidden must be at least 1"),
        (["fit", "--train", "q.jsonl", "--out", "OUT", "--hidden", "8"], "A listwise lens has no network to search"),
        (["fit", "--train", "q.jsonl", "--out", "OUT", "--seed", "-1"], "seed must lie between 0 and 4294967295"),
        (
            ["calibrate", "--lens", "OUT", "--questions", "q.jsonl", "--coverage", "1"],
            "coverage must lie between 0 and 1",
        ),
        (["calibrate", "--lens", "OUT", "--questions", "q.jsonl", "--sets", "rasp"], "Unknown sets 'rasp'.*'raps'"),
        (["calibrate", "--lens", "OUT", "--questions", "q.jsonl", "--risk", "0"], "risk must lie between 0 and 1"),
    ],
)
def test_a_wrong_value_is_refused_before_a_file_is_opened(tmp_path: Path, arguments: list[str], said: str) -> None:
    with pytest.raises(CoralError, match=said):
        run(*[tmp_path / "out" if word == "OUT" else word for word in arguments])
    assert list(tmp_path.iterdir()) == []


def test_a_described_case_is_reckoned_without_questions_a_model_or_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    facts = ("questions=1000000", "layers=32", "width=4096", "devices=64", "speed=150", "price=2.5")
    outcome = CliRunner().invoke(app, ["extract", "--plan", *(word for fact in facts for word in ("--case", fact))])
    assert outcome.exit_code == 0, outcome.output
    assert "1,081 GB in 32,227 shards" in outcome.output
    assert "64 device(s)" in outcome.output
    assert "(3.61 device hours)" in outcome.output
    assert "9.02 for a million questions" in outcome.output
    twice = CliRunner().invoke(
        app, ["extract", "--plan", "--read", "answer,context", "--case", "layers=32", "--case", "width=4096"]
    )
    assert "2,163 GB in 64,453 shards" in twice.output
    assert "33 layers are kept at 2 places" in twice.output
    assert not list(tmp_path.iterdir())


def test_the_guide_prints_what_the_plan_prints() -> None:
    page = ROOT / "docs" / "guides" / "scale.md"
    plans = [
        words for block in blocks_of(page) if block.language == "sh" for words in block.commands if "--plan" in words
    ]
    printed = [" ".join(run(*words[1:]).split()) for words in plans]
    table = page.read_text("utf-8").partition("It prints")[2].partition("That is arithmetic")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE)
    assert len(rows) >= 6
    for _, *cells in rows:
        for cell, said in zip(cells, printed, strict=True):
            assert cell in said or "layer" in cell, cell


def test_a_finished_store_is_described_without_its_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(GOLDEN / "store", tmp_path / "store")
    monkeypatch.setattr(activations, "question_from", lambda record: pytest.fail("a question is read"))
    outcome = CliRunner().invoke(app, ["extract", "--finish", "--out", str(tmp_path / "store")])
    assert outcome.exit_code == 0, outcome.output
    n_lines = len((GOLDEN / "store" / "questions.jsonl").read_bytes().splitlines())
    assert f"{n_lines} questions, " in outcome.output


def test_a_store_at_an_address_is_finished_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path))
    url = f"memory://{tmp_path.name}/store"
    for path in (GOLDEN / "store").iterdir():
        put_at(url, path.name, path.read_bytes())
    assert f"MiB in {url}" in run("extract", "--finish", "--out", url)
    joined, _ = Studied(store=(url,)).opened()
    assert len(joined.questions) == len(activations.ActivationStore(GOLDEN / "store").questions)
    assert "stores" in run("cache")


@pytest.mark.parametrize("line", ["fit --train q.jsonl", "run study.toml", "predict --questions q.jsonl"])
def test_an_address_is_refused_where_results_are_no_store(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CoralError, match=r"--out must be a folder, and s3:/bucket/x is an address; only stores"):
        run(*line.split(), "--out", "s3://bucket/x")
    assert not list(tmp_path.iterdir())


def test_studies_want_a_folder_for_their_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CoralError, match=r"--work must be a folder, and s3:/bucket/x is an address"):
        run("run", "study.toml", "--out", "out", "--work", "s3://bucket/x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("extract", "Give --out"),
        ("extract --finish --out nothing://a/b", "Cannot open nothing://a/b: Protocol not known"),
        ("extract x.jsonl --out nothing://a/b", "Cannot open nothing://a/b: Protocol not known"),
        ("extract --out store", "Give questions"),
        ("extract x.jsonl --out store --case questions=3", "add --plan"),
        ("extract --out store --part 17/16", "--part must lie between"),
    ],
)
def test_a_line_that_lacks_something_is_refused_in_a_sentence(line: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CoralError, match=said):
        CliRunner().invoke(app, line.replace("store", str(tmp_path / "store")).split(), catch_exceptions=False)
    assert not list(tmp_path.iterdir())
