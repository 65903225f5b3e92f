"""The demo walks the whole line, and a second run reuses what the first one left."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.leaky import DROPPED, LEAKING, leaky_rows, training_rows, write_rows

from coral_lens.data.leaks import question_keys
from coral_lens.engine.forecast import Forecast
from coral_lens.engine.model import Model
from coral_lens.report.runs import load_run
from coral_lens.study.demo import DemoPlan, demo_questions, outlook, run_demo

PLAN = DemoPlan(limit=40)
pytestmark = pytest.mark.filterwarnings("ignore:.*prompts were longer than the model reads")
"""The tiny model reads 256 bytes."""


def test_training_and_test_questions_are_apart() -> None:
    train, tests = demo_questions(PLAN)
    assert list(tests) == [*PLAN.train, *PLAN.transfer]
    ids = [q.id for q in train] + [q.id for questions in tests.values() for q in questions]
    assert len(ids) == len(set(ids)) == 5 * 40
    for questions in tests.values():
        assert not {q.group for q in train} & {q.group for q in questions}


def test_a_second_run_reuses_the_first_and_gives_the_same_predictions(tiny: Model, tmp_path: Path) -> None:
    first = run_demo(tmp_path, PLAN, model=tiny)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert len(written) >= 1 + 5 + 2
    second = run_demo(tmp_path, PLAN, model=tiny)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == written
    for run in (first, second, load_run(tmp_path)):
        assert [e.trained_on for e in run.evaluations] == [True, True, True, False, False]
        for a, b in zip(run.evaluations, first.evaluations, strict=True):
            assert tuple(a.predictions) == ("base", "temperature", "coral ridge", "listwise", "listwise tempered")
            assert all((a.predictions[m].probs == b.predictions[m].probs).all() for m in a.predictions)


def test_how_long_it_takes_is_said_before_it_starts_and_what_is_there_is_reused(tiny: Model, tmp_path: Path) -> None:
    told: list[str] = []
    started: list[str] = []

    @contextmanager
    def bar(label: str, _: int, __: str) -> Iterator[Callable[[int], None]]:
        assert len(told) == 1, "it is said before anything is scored"
        started.append(label)
        yield lambda _: None

    run_demo(tmp_path, PLAN, model=tiny, tell=told.append, bar=bar)
    assert started == ["training questions", *PLAN.train, *PLAN.transfer]
    assert re.fullmatch(
        r"200 questions\. This takes about 20 s here \(the model reads [\d,]+ tokens a second, as just measured\) and keeps "
        rf"[\d.]+ [kM]B in {tmp_path}\.",
        told[0],
    )
    run_demo(tmp_path, PLAN, model=tiny, tell=told.append)
    assert told[1] == "The 200 questions were scored by an earlier run, which is reused: about 20 s."


def test_the_time_is_that_of_the_tokens_that_are_left() -> None:
    half = Forecast(n_questions=1000, n_kept=400, tokens=60_000, speed=100.0, new_bytes=2_000_000)
    assert outlook(half, Path("out")) == (
        "1,000 questions; 400 of them were scored by an earlier run and are reused. This takes about 11 min here (the model "
        "reads 100 tokens a second, as just measured) and keeps 2.0 MB in out."
    )


def test_no_test_question_was_seen_by_the_lenses(tiny: Model, tmp_path: Path) -> None:
    run = run_demo(tmp_path, PLAN, model=tiny)
    train, _ = demo_questions(PLAN)
    seen = set(question_keys(train).tolist())
    assert all(not seen & set(question_keys(e.questions).tolist()) for e in run.evaluations)


def test_no_repeat_no_shared_article_and_no_edited_copy_is_trained_on_and_tested(tiny: Model, tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", training_rows())
    test = write_rows(tmp_path / "test.jsonl", leaky_rows())
    plan = DemoPlan(train=(str(train),), transfer=(str(test),))
    learned, _ = demo_questions(plan)
    run = run_demo(tmp_path / "demo", plan, model=tiny)
    n_dropped = run.provenance["training questions dropped because a test set has them too"]
    assert run.provenance["leak guard"]["dropped from training"] == DROPPED
    assert n_dropped == sum(DROPPED.values())
    assert run.lens["training"]["tasks"] == {"questions": len(learned) - n_dropped}
    assert {q.id for q in run.evaluations[1].questions} >= LEAKING, "what is tested stays, and is not trained on"
    assert run.provenance["leak guard"]["left out"] == {}
