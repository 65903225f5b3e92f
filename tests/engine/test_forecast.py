"""How long scoring takes is measured, and what an earlier run left is not counted again."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.questions import toy_questions

from coral_lens.engine.extract import extract
from coral_lens.engine.forecast import forecast, kept_questions, spread
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Extraction
from coral_lens.engine.prompts import prepare
from coral_lens.engine.trees import build_tree

pytestmark = pytest.mark.usefixtures("one_thread")


def test_tokens_bytes_and_questions_are_those_of_the_work(tiny: Model, tmp_path: Path) -> None:
    questions, extraction = toy_questions(30), Extraction(layers=(1, 2))
    expected = forecast(tiny, {tmp_path / "store": questions}, extraction)
    prompts = prepare(questions, extraction.style, tiny).prompts
    assert expected.tokens == sum(len(build_tree(p)) for p in prompts)
    assert expected.new_bytes == sum(len(q.options) for q in questions) * 2 * 2 * tiny.width
    assert (expected.n_questions, expected.n_kept) == (30, 0)
    assert expected.seconds == pytest.approx(expected.tokens / expected.speed)
    assert not (tmp_path / "store").exists(), "nothing is written"


def test_what_is_kept_takes_no_time(tiny: Model, tmp_path: Path) -> None:
    questions, extraction = toy_questions(30), Extraction(layers=(1, 2))
    extract(tiny, questions, tmp_path / "done", extraction=extraction)
    assert kept_questions(tmp_path / "done") == set(range(30))
    expected = forecast(tiny, {tmp_path / "done": questions}, extraction)
    assert (expected.n_kept, expected.tokens, expected.seconds, expected.new_bytes) == (30, 0, 0.0, 0)
    both = forecast(tiny, {tmp_path / "done": questions, tmp_path / "new": toy_questions(10, seed=1)}, extraction)
    assert (both.n_questions, both.n_kept) == (40, 30)
    assert both.tokens > 0


def test_prompts_that_are_timed_are_spread_over_all(tiny: Model) -> None:
    prompts = prepare(toy_questions(100), Extraction(()).style, tiny).prompts
    assert spread(prompts, [50] * 100, 1000) == list(prompts[::5])
    assert spread(prompts, [50] * 100, 10**6) == list(prompts)
