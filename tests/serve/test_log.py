"""A log of answers is what `coral audit` reads once a person has added labels, and is added to nobody else's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.servers import Shop, running, settings

from coral_lens.audit.reading import read_audited
from coral_lens.errors import CoralError
from coral_lens.lens.open_answers import OpenAnswer
from coral_lens.serve.log import AnswerLog, answered
from coral_lens.serve.settings import Answering

ASKED: tuple[dict[str, Any], ...] = (
    {"question": "Which?", "options": {"a": "the first", "b": None}, "instructions": "Be fair.", "context": "A text."},
    {"question": "Is it so?", "kind": "yes-no"},
    {"question": "How much?", "kind": "score", "options": ["little", "some", "much"]},
    {"question": "Too long? " * 300, "options": ["yes", "no"]},
)


@pytest.fixture(scope="module")
def logged(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The lines of two requests that ask the same; in the second, ids are given."""
    log = tmp_path_factory.mktemp("log") / "answers.jsonl"
    with running(shop.model, shop.lenses, settings(answering=Answering(log=log))) as server, server.client() as client:
        for names in ((None,) * 4, ("a", "b", "c", "d")):
            rows = [row | ({"id": name} if name else {}) for row, name in zip(ASKED, names, strict=True)]
            assert client.post("/v1/predict", json={"lens": "first", "questions": rows}).status_code == 200
    return [json.loads(line) for line in log.read_text("utf-8").splitlines()]


def test_a_line_has_all_that_was_asked_and_its_own_id(logged: list[dict[str, Any]]) -> None:
    assert len({line["id"] for line in logged}) == len(logged) == 8
    assert [line["name"] for line in logged] == ["1", "2", "3", "4", "a", "b", "c", "d"]
    first, second, third, refused = logged[:4]
    assert (first["instructions"], first["descriptions"], first["context"]) == (
        "Be fair.",
        ["the first", ""],
        "A text.",
    )
    assert [line["kind"] for line in (first, second, third)] == ["choice", "yes-no", "score"]
    assert (refused["type"], "longer than" in refused["reason"]) == ("refusal", True)
    for line in (first, second, third):
        assert line["chosen"] == line["probs"].index(max(line["probs"]))
        assert not {"answer", "label"} & set(line)


def test_an_audit_wants_labels_and_then_measures_both_lens_and_model(
    logged: list[dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in logged), "utf-8")
    with pytest.raises(CoralError, match="6 of 6 rows have no label"):
        read_audited([file])
    labels = [line.get("options", [""])[0] for line in logged]
    lines = [json.dumps(line | {"label": label}) for line, label in zip(logged, labels, strict=True)]
    file.write_text("\n".join(lines), "utf-8")
    found = read_audited([file])
    assert [q.answer for q in found.questions] == [0] * 6
    assert [q.kind for q in found.questions] == ["choice", "yes-no", "score"] * 2
    assert set(found.systems) == {"first", "base"}
    given = [p for line in logged if "probs" in line for p in line["probs"]]
    assert found.systems["first"].probs.tolist() == pytest.approx(given)


def test_an_open_answer_is_a_choice_between_what_was_written_and_none_of_it() -> None:
    answer = OpenAnswer("q", "b", 0.5, None, 0.2, ("a", "b"), (0.3, 0.5), (4, 3), 8, 1.0)
    line = answered(answer)
    assert (line["options"], line["probs"], line["chosen"]) == (("a", "b", "none of these"), (0.3, 0.5, 0.2), 1)
    assert "abstain" not in line


def test_a_file_of_somebody_else_is_not_added_to(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"question": "mine"}\n', "utf-8")
    with pytest.raises(CoralError, match="is no log of answers, and nothing is added to it"):
        AnswerLog(file)
    assert file.read_text("utf-8") == '{"question": "mine"}\n'


@pytest.mark.parametrize("cut", [9, 0])
def test_a_line_that_a_kill_cut_short_does_not_spoil_the_next_and_is_not_removed(tmp_path: Path, cut: int) -> None:
    file, line = tmp_path / "log.jsonl", b'{"lens_digest": "d", "question": "Who?"}'
    begun = line + b"\n" + line[: len(line) - cut]
    file.write_bytes(begun)
    for _ in range(2):
        AnswerLog(file).close()
        assert file.read_bytes() == begun + b"\n"


@pytest.mark.parametrize("name", ["", "nowhere/log.jsonl", "nul\x00l", "x" * 300])
def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(CoralError, match=r"cannot be written: .*; choose another file"):
        AnswerLog(tmp_path / name)
