"""Systems that answered the same questions are put side by side, question by question, whatever their order."""

from __future__ import annotations

import pytest
from support.audits import Row, rows

from coral_lens.audit.reading import read_audited
from coral_lens.audit.systems import joined
from coral_lens.errors import CoralError


def named(made: list[Row], name: str) -> list[Row]:
    return [row | {"model": name} for row in made]


def test_systems_are_paired_by_id_and_others_left_out() -> None:
    one, other = named(rows(6), "one"), named(rows(6, sharpness=2), "two")
    found = joined([read_audited([one[:5]]), read_audited([other[:0:-1]])])
    assert [q.id for q in found.questions] == ["q1", "q2", "q3", "q4"]
    assert list(found.systems) == ["one", "two"]
    for name, made in (("one", one), ("two", other)):
        said = found.systems[name]
        assert said.ids == ("q1", "q2", "q3", "q4")
        assert said.probs == pytest.approx([p for row in made[1:5] for p in row["probs"]])


def test_systems_of_one_name_are_counted() -> None:
    found = joined([read_audited([named(rows(4), "mine")]) for _ in range(3)])
    assert list(found.systems) == ["mine", "mine (2)", "mine (3)"]


def test_other_labels_are_refused_with_the_first_question() -> None:
    changed = rows(4)
    changed[2]["label"] = "ham" if changed[2]["label"] != "ham" else "bill"
    with pytest.raises(CoralError, match=r"1 questions have other labels.*first 'q2'.*--swap"):
        joined([read_audited([named(rows(4), "one")]), read_audited([named(changed, "two")])])


def test_sets_without_a_question_in_common_are_refused() -> None:
    others = [row | {"id": f"other {row['id']}"} for row in rows(4)]
    with pytest.raises(CoralError, match="no question in common"):
        joined([read_audited([rows(4)]), read_audited([others])])


def test_a_column_that_is_not_there_is_named() -> None:
    with pytest.raises(CoralError, match=r"no column 'tpoic'.*topic"):
        read_audited([rows(4)]).column("tpoic")
    gaps = rows(4)
    gaps[1]["topic"] = ""
    assert read_audited([gaps]).column("topic") == ["even", "(none)", "even", "odd"]
