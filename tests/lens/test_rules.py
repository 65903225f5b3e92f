"""Base probabilities and the paper's correction, against numbers worked by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import scipy.special
from hypothesis import given
from hypothesis import strategies as st

from coral_lens.errors import CoralError
from coral_lens.lens.rules import (
    BASE_SCORES,
    RULES,
    ProbeScores,
    RuleName,
    base_probs,
    choose_base,
    correct_rows,
    log_of,
    residuals,
    steer,
)
from coral_lens.ragged import Options
from coral_lens.records import UNKNOWN, OptionTable


def table(
    logprobs: list[float], sizes: list[int], answers: list[int], *, tokens: list[int], chars: list[int]
) -> OptionTable:
    return OptionTable(
        logprobs=np.array(logprobs),
        n_tokens=np.array(tokens),
        n_chars=np.array(chars),
        n_bytes=np.array(chars),
        offsets=Options.of_sizes(sizes).edges,
        answers=np.array(answers),
    )


RAGGED = table([-2.0, -6.0, -1.0, -1.0, -4.0], [2, 3], [1, 0], tokens=[1, 3, 1, 1, 4], chars=[4, 6, 2, 1, 8])


@pytest.mark.parametrize(
    ("rule", "scores"),
    [
        ("sum", [-2.0, -6.0, -1.0, -1.0, -4.0]),
        ("token", [-2.0, -2.0, -1.0, -1.0, -1.0]),
        ("char", [-0.5, -1.0, -0.5, -1.0, -0.5]),
    ],
)
def test_the_base_rules_score_by_sum_by_token_and_by_character(rule: str, scores: list[float]) -> None:
    assert BASE_SCORES[rule](RAGGED).tolist() == scores
    first, second = scipy.special.softmax(scores[:2]), scipy.special.softmax(scores[2:])
    np.testing.assert_allclose(base_probs(RAGGED, rule), [*first, *second], rtol=1e-14)  # type: ignore[arg-type]


def test_pmi_is_what_the_question_adds_to_a_neutral_context() -> None:
    scored = replace(RAGGED, neutral=np.array([-1.0, -6.0, -3.0, -1.0, -1.0]))
    assert BASE_SCORES["pmi"](scored).tolist() == [-1.0, 0.0, 2.0, 0.0, -3.0]
    with pytest.raises(CoralError, match="--neutral"):
        base_probs(RAGGED, "pmi")


def test_the_base_that_is_best_by_its_own_temperature_is_chosen_by_the_questions_that_validate() -> None:
    """Options of frequent words: their neutral log-probability drowns what the question says, and pmi takes it out."""
    rng = np.random.default_rng(0)
    n = 300
    said, often = rng.normal(size=4 * n), 4.0 * rng.normal(size=4 * n)
    options = Options.of_sizes([4] * n)
    ones, fold = np.ones(4 * n, dtype=np.int64), np.arange(n) % 3
    scored = OptionTable(said + often, ones, ones, ones, options.edges, options.top(said), neutral=often)

    def chosen(rounds: Sequence[np.ndarray] = tuple(fold == k for k in range(3)), **columns: np.ndarray) -> str:
        changed, held_out = replace(scored, **columns), options.rows(np.any(rounds, axis=0))
        costs = lambda probs: float(((probs - options.one_hot(changed.answers)) ** 2)[held_out].sum())  # noqa: E731
        return choose_base(changed, rounds, costs)

    assert chosen() == "pmi"
    assert chosen(logprobs=said) == "sum"
    assert chosen(logprobs=2.0 * said, n_tokens=ones + 1) in ("sum", "token")
    mostly = np.where(fold == 0, options.top(said + often), scored.answers)
    assert chosen(answers=mostly) == "pmi"
    assert chosen([fold == 0], answers=mostly) == "sum", "two questions of three say pmi, but they do not validate"


def test_options_with_equal_scores_share_the_probability() -> None:
    np.testing.assert_allclose(base_probs(RAGGED, "token"), [1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3], rtol=1e-15)


def test_residuals_are_one_minus_p_for_the_answer_and_minus_p_for_the_others() -> None:
    assert correct_rows(RAGGED).tolist() == [0, 1, 1, 0, 0]
    p = np.array([0.75, 0.25, 0.5, 0.375, 0.125])
    assert residuals(RAGGED, p).tolist() == [-0.75, 0.75, 0.5, -0.375, -0.125]


def test_an_unlabelled_question_has_no_residual() -> None:
    unlabelled = table([-1.0, -2.0], [2], [UNKNOWN], tokens=[1, 1], chars=[1, 1])
    with pytest.raises(AssertionError, match="unlabelled"):
        residuals(unlabelled, np.array([0.5, 0.5]))


def test_the_correction_worked_by_hand_without_clipping() -> None:
    # mean 0.25, centred (-0.25, 0.25), moved (0.25, 0.75) and (0.25 + 0, ...): sums stay 1
    p = np.array([0.5, 0.5, 0.25, 0.5, 0.25])
    r_hat = np.array([0.0, 0.5, 0.1, 0.4, 0.1])
    steered = steer(p, r_hat, Options.of_sizes([2, 3]), gamma=1.0)
    np.testing.assert_allclose(steered, [0.25, 0.75, 0.15, 0.7, 0.15], rtol=1e-14)


def test_the_correction_worked_by_hand_with_clipping() -> None:
    # mean 0, gamma 2: (0.1 - 0.6, 0.9 + 0.6) is clipped to (0, 1.5); of three, (0.2 - 0.8, 0.3 + 0.4, 0.5 + 0.4) to
    # (0, 0.7, 0.9), which sums to 1.6
    p = np.array([0.1, 0.9, 0.2, 0.3, 0.5])
    r_hat = np.array([-0.3, 0.3, -0.4, 0.2, 0.2])
    steered = steer(p, r_hat, Options.of_sizes([2, 3]), gamma=2.0)
    np.testing.assert_allclose(steered, [0.0, 1.0, 0.0, 0.7 / 1.6, 0.9 / 1.6], rtol=1e-14)
    assert steered[0] == steered[2] == 0.0


Drawn = tuple[np.ndarray, np.ndarray, list[int]]
"""Scores, predicted residuals, and how many options each question has."""


@st.composite
def ragged(draw: st.DrawFn) -> Drawn:
    sizes = draw(st.lists(st.integers(2, 6), min_size=1, max_size=6))
    rows = sum(sizes)
    score = st.floats(-60, 0)
    scores = np.array(draw(st.lists(score, min_size=rows, max_size=rows)))
    r_hat = np.array(draw(st.lists(st.floats(-5, 5), min_size=rows, max_size=rows)))
    return scores, r_hat, sizes


@given(ragged())
def test_softmax_is_scipys_question_by_question(some: Drawn) -> None:
    scores, _, sizes = some
    options = Options.of_sizes(sizes)
    ours = options.softmax(scores)
    for first, last in pairwise(options.edges):
        np.testing.assert_allclose(ours[first:last], scipy.special.softmax(scores[first:last]), rtol=1e-12)


def test_softmax_survives_scores_that_would_overflow() -> None:
    steep = Options.of_sizes([3, 1]).softmax(np.array([1e4, 1e4, -1e4, -1e4]))
    assert steep.tolist() == [0.5, 0.5, 0.0, 1.0]


@given(ragged(), st.floats(0, 3))
def test_steered_probabilities_sum_to_one_and_are_never_negative(some: Drawn, gamma: float) -> None:
    scores, r_hat, sizes = some
    options = Options.of_sizes(sizes)
    steered = steer(options.softmax(scores), r_hat, options, gamma=gamma)
    assert (steered >= 0).all()
    np.testing.assert_allclose(np.add.reduceat(steered, options.starts), 1.0, rtol=1e-12)


@given(ragged())
def test_gamma_zero_is_the_unsteered_model_to_the_bit(some: Drawn) -> None:
    scores, r_hat, sizes = some
    options = Options.of_sizes(sizes)
    p = options.softmax(scores)
    assert steer(p, r_hat, options, gamma=0.0).tobytes() == p.tobytes()


@given(ragged(), st.floats(0.25, 3), st.floats(-2, 2))
def test_only_differences_between_the_options_of_a_question_matter(some: Drawn, gamma: float, shift: float) -> None:
    scores, r_hat, sizes = some
    options = Options.of_sizes(sizes)
    p = options.softmax(scores)
    by_question = np.repeat(np.arange(len(options)) * shift, options.sizes)
    steered = steer(p, r_hat, options, gamma=gamma)
    np.testing.assert_allclose(steer(p, r_hat + by_question, options, gamma=gamma), steered, atol=1e-12)


def test_a_perfect_prediction_of_the_residual_at_gamma_one_is_the_truth() -> None:
    p = base_probs(RAGGED, "sum")
    steered = steer(p, residuals(RAGGED, p), RAGGED.options, gamma=1.0)
    np.testing.assert_allclose(steered, correct_rows(RAGGED), atol=1e-15)


# ------------------------------------------------------------------------------------------------- the table of rules


def drawn_scores(seed: int = 0) -> ProbeScores:
    rng = np.random.default_rng(seed)
    options = Options.of_sizes([3, 4])
    p = options.softmax(rng.normal(size=7))
    return ProbeScores(p, 0.7 * np.log(p), rng.normal(size=7), options)


def test_the_residual_rule_is_the_papers_equation_and_predicts_residuals() -> None:
    said = drawn_scores()
    rule = RULES["residual"]
    assert rule.correct(said, 1.5).tobytes() == steer(said.p, said.scores, said.options, gamma=1.5).tobytes()
    assert rule.change(said) is said.scores


def test_the_listwise_rule_is_a_softmax_of_both_parts_and_predicts_its_change_at_full_strength() -> None:
    said = drawn_scores()
    rule = RULES["listwise"]
    grown = said.p**0.7 * np.exp(0.5 * said.scores)
    sums = np.repeat([grown[:3].sum(), grown[3:].sum()], [3, 4])
    assert rule.correct(said, 0.5) == pytest.approx(grown / sums)
    assert rule.change(said) == pytest.approx(rule.correct(said, 1.0) - said.p)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_may_leave_the_model_alone_and_knows_full_strength(name: RuleName) -> None:
    rule, said = RULES[name], drawn_scores()
    assert rule.gammas[0] == 0.0
    assert 1.0 in rule.gammas
    untouched = {"residual": said.p, "listwise": said.options.softmax(said.base)}[name]
    assert rule.correct(said, 0.0).tobytes() == untouched.tobytes()


def test_log_of_zero_is_finite_and_of_the_rest_the_logarithm() -> None:
    assert log_of(np.array([0.5, 1.0])).tolist() == np.log([0.5, 1.0]).tolist()
    assert np.isfinite(log_of(np.zeros(2))).all()
