"""What an extraction takes is reckoned by arithmetic that a reader can do by hand."""

from __future__ import annotations

import pytest
from support.questions import toy_questions

from coral_lens.engine.extract import SHARD_BYTES
from coral_lens.engine.planned import BARE_ROW_BYTES
from coral_lens.engine.reckoning import Case, described, known_case, reckon
from coral_lens.errors import CoralError


def test_hours_bytes_shards_and_price_are_those_worked_by_hand() -> None:
    case = Case(devices=64, speed=100.0, price=2.0)
    taken = reckon(case, shard_bytes=2**25, bare_row_bytes=0)
    # 2 x 12 x 4096^2 x 32 operations with weights for each of 150 million tokens, and 4 x 4096 x 150 x 32 of attention;
    # 12 tokens of each question meet the vocabulary's 32,000; at 10^14 a second
    done = 150e6 * 32 * (2 * 12 * 4096**2 + 4 * 4096 * 150) + 12e6 * 2 * 32_000 * 4096
    assert taken.device_hours == pytest.approx(done / 1e14 / 3600)
    assert taken.hours == pytest.approx(taken.device_hours / 64)
    assert taken.n_bytes == 4_000_000 * (33 * 4096 * 2 + 34)
    assert taken.n_shards == round(4_000_000 * 33 * 8192 / 2**25)
    assert taken.price == pytest.approx(2 * taken.device_hours) == pytest.approx(taken.price_per_million)
    assert taken.bytes_per_second == pytest.approx(taken.n_bytes / taken.hours / 3600)
    one = reckon(described(["kept=1"], case), shard_bytes=2**25, bare_row_bytes=0)
    assert one.device_hours == taken.device_hours
    assert one.n_bytes * 30 < taken.n_bytes
    two = reckon(described(["places=2"], case), shard_bytes=2**25, bare_row_bytes=0)
    assert two.n_bytes == 4_000_000 * (2 * 33 * 4096 * 2 + 34)


def test_a_case_at_hand_has_the_questions_and_options_that_are_there() -> None:
    questions = toy_questions(12)
    case = known_case(questions, None, kept=2, device="cpu")
    assert (case.questions, case.kept) == (12, 2)
    assert case.options * 12 == sum(len(q.options) for q in questions)
    assert case.scored * 12 == sum(len(option) for q in questions for option in q.options) / 4
    assert case.speed > 0
    assert reckon(case, shard_bytes=SHARD_BYTES, bare_row_bytes=BARE_ROW_BYTES).n_shards == 1


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        ("qestions=3", "Did you mean 'questions'"),
        ("questions", "must look like questions=1000000"),
        ("questions=many", "must be a number. Got 'many'"),
        ("questions=0", "questions must be at least 1"),
        ("speed=-1", "speed must be above 0"),
        ("price=nan", "price must"),
        ("questions=inf", "must be a whole number"),
        ("layers=1.5", "layers must be a whole number"),
    ],
)
def test_a_fact_that_is_none_is_refused_in_a_sentence(fact: str, said: str) -> None:
    with pytest.raises(CoralError, match=said):
        described([fact], Case())
