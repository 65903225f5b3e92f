"""Answers that flip when options are put into another order, counted by hand."""

from __future__ import annotations

import pytest

from coral_lens.audit.reading import read_audited
from coral_lens.audit.swaps import flips_between, flips_within
from coral_lens.audit.systems import AuditedSet
from coral_lens.errors import CoralError


def asked(*answers: tuple[str, str, list[float]], question: str = "") -> AuditedSet:
    """Questions by id with the order of their options and the probabilities in that order; "x" is right."""
    return read_audited(
        [
            [
                {
                    "id": i,
                    "question": question or f"Which, {i}?",
                    "options": list(order),
                    "probs": p,
                    "label": "x",
                }
                for i, order, p in answers
            ]
        ]
    )


BEFORE = asked(("1", "xy", [0.7, 0.3]), ("2", "xy", [0.6, 0.4]), ("3", "xy", [0.9, 0.1]), ("4", "xy", [0.5, 0.5]))
AFTER = asked(("1", "yx", [0.7, 0.3]), ("2", "yx", [0.2, 0.8]), ("3", "yx", [0.1, 0.9]), ("4", "xy", [0.5, 0.5]))


def test_flips_between_two_files_worked_by_hand() -> None:
    (flips,) = flips_between(BEFORE, AFTER)
    # question 4 was not put into another order; of the others, 1 follows the first place, 2 and 3 the option
    assert flips.n_pairs == 3
    assert flips.flipped.value == pytest.approx(1 / 3)
    assert flips.moved == pytest.approx((0.4 + 0.2 + 0.0) / 3)
    # the first place was chosen in 3 of 3 and then in 1 of 3, where chance has a half
    assert flips.first == pytest.approx((1.0 + 1 / 3) / 2 - 0.5)


def test_a_system_that_looks_at_places_alone_flips_always() -> None:
    one = asked(*((str(i), "xyz", [0.6, 0.3, 0.1]) for i in range(10)))
    other = asked(*((str(i), "zxy", [0.6, 0.3, 0.1]) for i in range(10)))
    (flips,) = flips_between(one, other)
    assert flips.flipped.value == 1.0
    assert flips.first == pytest.approx(1 - 1 / 3)


def test_a_log_may_hold_its_questions_in_several_orders() -> None:
    found = flips_within(asked(("1", "xy", [0.7, 0.3]), ("2", "yx", [0.7, 0.3]), question="The same?"))
    assert [(f.n_pairs, f.flipped.value) for f in found] == [(1, 1.0)]
    assert flips_within(BEFORE) == []


def test_files_without_a_swapped_question_are_refused() -> None:
    with pytest.raises(CoralError, match="no question in common whose options stand in another order"):
        flips_between(BEFORE, BEFORE)
    with pytest.raises(CoralError, match="no question in common"):
        flips_between(BEFORE, asked(("1", "xz", [0.7, 0.3])))
