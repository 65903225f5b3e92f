"""The lens that ships is whole, small and free to pass on; it works with the real model, and its command makes the same bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.models import make_model

from coral_lens.data.licences import licence_of
from coral_lens.engine.model import Model
from coral_lens.lens.folder import CARD, GENERAL, RECORD, is_own_card, load_lens
from coral_lens.records import UNNAMED, Question
from coral_lens.storage.files import digest_bytes, read_json
from coral_lens.study.general import SOURCES, Source, compared, general_questions, make_general

DIGEST = "41bc9420f151bac7dfeef4bbd8ea61dfd8382e9d1a2fe047d989d0fadf737f20"
"""Of the record of the lens that ships, which has the digests of its numbers; `make lens` makes it again."""
LARGEST = 500_000
"""Bytes of its folder."""
PERMISSIVE = {"MIT", "Apache-2.0", "AFL-3.0"}
SMALL = (
    Source("openbookqa:validation", 40, 40, 12),
    Source("piqa:validation", 40, 40),
    Source("arc_easy:validation", test=12),
)


def test_it_is_the_one_that_the_command_made() -> None:
    assert json.loads((GENERAL / "lens.json").read_text("utf-8"))["digest"] == DIGEST
    assert compared(GENERAL) == f"The same bytes as the lens that ships ({DIGEST[:12]})."
    assert sum(path.stat().st_size for path in GENERAL.iterdir()) < LARGEST


def test_it_holds_all_that_an_answer_can_say() -> None:
    lens = load_lens("general")
    assert lens.view is not None
    assert (lens.sets.coverage, lens.abstention.risk) == (0.9, 0.4)  # type: ignore[union-attr]
    assert lens.abstention.threshold is not None  # type: ignore[union-attr]
    assert lens.model["name"] == "smollm2"


def test_all_that_it_learned_from_may_be_passed_on_and_its_card_says_so() -> None:
    assert {licence_of(s.name.split(":")[0]) for s in SOURCES if s.train or s.calibrate} <= PERMISSIVE
    lens, card = load_lens("general"), (GENERAL / "README.md").read_text("utf-8")
    assert set(lens.training.terms.values()) <= PERMISSIVE
    for source in SOURCES:
        assert source.name in card
    assert "Measured on questions that it has never seen" in card


def test_it_answers_with_the_real_model(smollm2: Model) -> None:
    asked = {
        "What do bees make?": ("honey", "milk", "bread"),
        "What do you use to write on a blackboard?": ("chalk", "a spoon", "a shoe"),
        "Which of these can fly?": ("a pigeon", "a stone", "a fish tank"),
    }
    questions = [Question(text, text, text, options) for text, options in asked.items()]
    answers = load_lens("general").predict(smollm2, questions)
    assert [answer.answer for answer in answers] == [0, 0, 0]
    for answer in answers:
        assert answer.options_in_set is not None
        assert answer.abstain is not None
        assert sum(answer.probs) == pytest.approx(1)
        assert answer.shift < 3


def test_a_folder_of_the_same_name_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_lens("general").model["name"] == "smollm2"
    shutil.copytree(GENERAL, tmp_path / "general")
    (tmp_path / "general" / "lens.safetensors").unlink()
    with pytest.raises(Exception, match=r"general/lens.safetensors is missing"):
        load_lens("general")


def test_no_question_is_on_two_sides_and_those_that_say_what_it_is_worth_name_no_task() -> None:
    parts = general_questions(SMALL)
    sides = [{q.text for q in side} for side in (parts.train, parts.calibrate, *parts.tests.values()) if side]
    assert len(set.union(*sides)) == sum(map(len, sides))
    assert {q.task for q in parts.train} == {"openbookqa", "piqa"}
    assert {q.task for side in (parts.calibrate, *parts.tests.values()) for q in side} == {UNNAMED}
    assert all(q.rendered is None for q in parts.train)


def test_the_command_makes_the_same_bytes_twice_and_says_what_differs(tmp_path: Path) -> None:
    model = make_model("llama", max_length=2048)
    for name in ("one", "two"):
        make_general(model, tmp_path / name, sources=SMALL)
    assert compared(tmp_path / "one", tmp_path / "two").startswith("The same bytes as the lens that ships")
    card = tmp_path / "two" / "README.md"
    assert "| arc_easy:validation, never trained on | 12 |" in card.read_text("utf-8")
    assert read_json(tmp_path / "two" / RECORD)["sha256"][CARD] == digest_bytes(card.read_bytes())
    assert is_own_card(tmp_path / "two")
    card.write_text("other words", encoding="utf-8")
    assert "its card reads otherwise" in compared(tmp_path / "one", tmp_path / "two")
    assert "reads layer" in compared(tmp_path / "one") or "Not the same bytes" in compared(tmp_path / "one")
    assert compared(tmp_path / "one", tmp_path / "none").startswith("There is no lens")
