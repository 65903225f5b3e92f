"""Sets hold the answer as often as they say, answered questions are wrong no more often, and mapie agrees."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import APSConformityScore, RAPSConformityScore
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import StratifiedShuffleSplit

from coral_lens.errors import CoralError
from coral_lens.metrics.conformal import (
    ANSWER_ALL,
    SCORES,
    Abstention,
    Conformal,
    Regularisation,
    abstains,
    fit_abstention,
    fit_conformal,
    flawless_needed,
    option_scores,
    prediction_sets,
    questions_needed,
    ranking,
)
from coral_lens.ragged import Options

Ragged = tuple[np.ndarray, Options, np.ndarray]
"""Probabilities, options, answers."""


def draw(n: int, rng: np.random.Generator) -> Ragged:
    """Questions of two to six options from a model that is surer than it should be."""
    options = Options.of_sizes(rng.integers(2, 7, size=n))
    scores = 1.5 * rng.normal(size=options.n_rows)
    noise = rng.gumbel(size=len(scores))  # the largest of log q + noise is a draw from q
    return options.softmax(scores), options, options.top(0.6 * scores + noise)


def covered(sets: np.ndarray, options: Options, answers: np.ndarray) -> float:
    return float(sets[options.row(answers)].mean())


@st.composite
def questions(draw: st.DrawFn) -> Ragged:
    """At least ten small questions, many with options of equal probability and of probability 0."""
    weights = draw(st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=5).filter(any), min_size=10, max_size=25))
    answers = [draw(st.integers(0, len(w) - 1)) for w in weights]
    p = np.concatenate([np.array(w) / sum(w) for w in weights])
    return p, Options(np.cumsum([0, *map(len, weights)])), np.array(answers)


KINDS = ("lac", "aps", "raps")


def test_every_kind_is_tested() -> None:
    assert set(KINDS) == set(SCORES)


# -------------------------------------------------------------------------------------------------------- by hand

P = np.array([0.5, 0.2, 0.3, 0.25, 0.75, 0.4, 0.4, 0.2])
OPTIONS = Options(np.array([0, 3, 5, 8]))


def test_an_option_stands_below_the_mass_of_all_more_probable_ones_and_level_with_its_equals() -> None:
    ranks = ranking(P, OPTIONS)
    assert ranks.above == pytest.approx([0, 0.8, 0.5, 0.75, 0, 0, 0, 0.8])
    assert ranks.level == pytest.approx([0.5, 0.2, 0.3, 0.25, 0.75, 0.8, 0.8, 0.2])
    assert ranks.rank.tolist() == [1, 3, 2, 2, 1, 1, 1, 3]


def test_scores_worked_by_hand() -> None:
    assert option_scores(P, OPTIONS, kind="lac") == pytest.approx([0.5, 0.8, 0.7, 0.75, 0.25, 0.6, 0.6, 0.8])
    assert option_scores(P, OPTIONS, kind="aps") == pytest.approx([0, 0.8, 0.5, 0.75, 0, 0, 0, 0.8])
    u = np.array([0.0, 0.2, 0.75])  # the share of its own mass that an option is spared
    assert option_scores(P, OPTIONS, kind="aps", u=u) == pytest.approx([0.5, 1, 0.8, 0.95, 0.6, 0.2, 0.2, 0.85])
    beyond_one = option_scores(P, OPTIONS, kind="raps", regularisation=Regularisation(0.1, k_reg=1))
    assert beyond_one == pytest.approx([0, 1.0, 0.6, 0.85, 0, 0, 0, 1.0])


@pytest.mark.parametrize(
    ("coverage", "place"),
    [(0.5, 5), (0.55, 6), (0.6, 6), (0.88, 9), (0.9, 9)],  # ceil(10 * coverage)
)
def test_the_threshold_is_the_nth_plus_one_quantile_worked_by_hand(coverage: float, place: int) -> None:
    # nine questions, whose answers have the probabilities 0.1 to 0.9 and so LAC scores of 0.9 down to 0.1
    p = np.array([x for i in range(1, 10) for x in (i / 10, 1 - i / 10)])
    fitted = fit_conformal(p, Options.of_sizes([2] * 9), np.zeros(9, np.int64), coverage=coverage)
    assert fitted.threshold == pytest.approx(place / 10)


def test_a_coverage_is_taken_as_it_is_written_and_not_as_its_float() -> None:
    assert 0.55 * 100 > 55  # the trap: rounded up it would be the 56th of 99 scores
    p = np.array([x for i in range(1, 100) for x in (i / 100, 1 - i / 100)])
    fitted = fit_conformal(p, Options.of_sizes([2] * 99), np.zeros(99, np.int64), coverage=0.55)
    assert fitted.threshold == pytest.approx(0.55)


def test_sets_worked_by_hand() -> None:
    def inside(kind: str, threshold: float, *, keep_top: bool = True) -> list[bool]:
        return prediction_sets(Conformal(kind, 0.9, threshold, 99), P, OPTIONS, keep_top=keep_top).tolist()

    assert inside("lac", 0.7) == [True, False, True, False, True, True, True, False]
    assert inside("lac", 0.3, keep_top=False) == [False, False, False, False, True, False, False, False]
    assert inside("lac", 0.3) == [True, False, False, False, True, True, True, False]  # both of two equal tops
    assert inside("aps", 0.6) == [True, False, True, False, True, True, True, False]
    assert inside("aps", 0.0) == [True, False, False, False, True, True, True, False]


def test_no_question_gives_no_set() -> None:
    assert prediction_sets(Conformal("aps", 0.9, 0.5, 99), np.zeros(0), Options.of_sizes([])).shape == (0,)


# ------------------------------------------------------------------------------------------------------- properties


@given(questions(), st.sampled_from(KINDS), st.integers(0, 2**32 - 1))
def test_the_order_of_options_does_not_matter(asked: Ragged, kind: str, seed: int) -> None:
    p, options, answers = asked
    rng = np.random.default_rng(seed)
    old_row = np.concatenate([a + rng.permutation(b - a) for a, b in pairwise(options.edges)])
    new_answers = np.argsort(old_row)[options.row(answers)] - options.starts
    one = fit_conformal(p, options, answers, coverage=0.8, kind=kind)
    other = fit_conformal(p[old_row], options, new_answers, coverage=0.8, kind=kind)
    assert other.threshold == one.threshold
    moved = prediction_sets(one, p[old_row], options)
    assert moved.tolist() == prediction_sets(one, p, options)[old_row].tolist()


@given(questions(), st.sampled_from(KINDS), st.booleans())
def test_a_question_gets_the_same_set_alone_as_among_others(asked: Ragged, kind: str, keep_top: bool) -> None:
    p, options, answers = asked
    fitted = fit_conformal(p, options, answers, coverage=0.8, kind=kind)
    together = prediction_sets(fitted, p, options, keep_top=keep_top)
    parts = [(p[options.of(i)], options.take(slice(i, i + 1))) for i in range(len(options))]
    alone = [prediction_sets(fitted, *part, keep_top=keep_top) for part in parts]
    assert together.tolist() == np.concatenate(alone).tolist()


@given(questions(), st.sampled_from(KINDS), st.floats(0.05, 0.9), st.floats(0.05, 0.9))
def test_a_larger_coverage_gives_larger_sets(asked: Ragged, kind: str, one: float, other: float) -> None:
    p, options, answers = asked
    small, large = (
        prediction_sets(fit_conformal(p, options, answers, coverage=c, kind=kind), p, options, keep_top=False)
        for c in sorted((one, other))
    )
    assert (small <= large).all()


@given(questions(), st.sampled_from(KINDS))
def test_sets_cover_the_very_questions_they_were_fitted_on(asked: Ragged, kind: str) -> None:
    p, options, answers = asked
    fitted = fit_conformal(p, options, answers, coverage=0.8, kind=kind)
    assert covered(prediction_sets(fitted, p, options, keep_top=False), options, answers) >= 0.8


@given(questions(), st.sampled_from(KINDS))
def test_a_set_has_its_most_probable_options_first_and_is_never_empty(asked: Ragged, kind: str) -> None:
    p, options, answers = asked
    sets = prediction_sets(fit_conformal(p, options, answers, coverage=0.5, kind=kind), p, options)
    for a, b in pairwise(options.edges):
        assert sets[a:b].any()
        assert p[a:b][sets[a:b]].min() > p[a:b][~sets[a:b]].max(initial=-1.0)


@given(questions())
def test_deterministic_aps_has_no_empty_set_to_fill(asked: Ragged) -> None:
    p, options, answers = asked
    fitted = fit_conformal(p, options, answers, coverage=0.5, kind="aps")
    plain, kept = (prediction_sets(fitted, p, options, keep_top=keep) for keep in (False, True))
    assert plain.tolist() == kept.tolist()


@given(questions())
def test_raps_without_a_penalty_is_aps(asked: Ragged) -> None:
    p, options, answers = asked
    free = fit_conformal(p, options, answers, coverage=0.8, kind="raps", regularisation=Regularisation(0.0))
    assert free.threshold == fit_conformal(p, options, answers, coverage=0.8, kind="aps").threshold


def test_the_penalty_of_raps_shortens_the_longest_sets() -> None:
    p, options, answers = draw(3000, np.random.default_rng(0))
    sizes = {}
    for kind in ("aps", "raps"):
        sets = prediction_sets(fit_conformal(p, options, answers, coverage=0.8, kind=kind), p, options)
        sizes[kind] = options.sum(sets.astype(np.int64))
    assert (sizes["raps"] >= 5).mean() < 0.5 * (sizes["aps"] >= 5).mean()


# --------------------------------------------------------------------------------------------------------- coverage

RUNS, N_FITTED, N_NEW = 250, 59, 200


def coverages(kind: str, coverage: float, *, keep_top: bool, randomised: bool) -> np.ndarray:
    """The coverage of new questions in many repetitions of fitting and using."""
    rng = np.random.default_rng(7)
    chance = rng if randomised else None
    found = []
    for _ in range(RUNS):
        fitted = fit_conformal(*draw(N_FITTED, rng), coverage=coverage, kind=kind, rng=chance)
        p, options, answers = draw(N_NEW, rng)
        found.append(covered(prediction_sets(fitted, p, options, keep_top=keep_top, rng=chance), options, answers))
    return np.array(found)


@pytest.mark.parametrize(
    ("kind", "randomised"), [("lac", False), ("aps", True), ("raps", True)], ids=["lac", "aps", "raps"]
)
@pytest.mark.parametrize("coverage", [0.7, 0.9])
def test_coverage_is_what_it_says_and_at_most_one_in_n_more(kind: str, randomised: bool, coverage: float) -> None:
    found = coverages(kind, coverage, keep_top=False, randomised=randomised)
    error = 3.5 * found.std() / np.sqrt(RUNS)
    assert coverage - error <= found.mean() <= coverage + 1 / (N_FITTED + 1) + error
    # a single fit's coverage varies, by the beta distribution of the fitted quantile and the draw of new questions
    spread = np.sqrt(coverage * (1 - coverage) * (1 / (N_FITTED + 2) + 1 / N_NEW))
    assert found.std() == pytest.approx(spread, rel=0.2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("coverage", [0.3, 0.7, 0.9])
def test_the_default_deterministic_sets_never_cover_less(kind: str, coverage: float) -> None:
    found = coverages(kind, coverage, keep_top=True, randomised=False)
    assert found.mean() >= coverage - 3.5 * found.std() / np.sqrt(RUNS)


def test_below_the_models_accuracy_aps_sets_are_the_top_option_alone() -> None:
    p, options, answers = draw(2000, np.random.default_rng(1))
    top = p == options.spread(options.max(p))
    assert covered(top, options, answers) > 0.5
    fitted = fit_conformal(p, options, answers, coverage=0.4, kind="aps")
    assert prediction_sets(fitted, p, options).tolist() == top.tolist()


# ------------------------------------------------------------------------------------------------------------ mapie


class Given(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A fitted classifier whose probabilities are its input."""

    def __init__(self, n_options: int = 5) -> None:
        self.n_options = n_options
        self.classes_ = np.arange(n_options)
        self.is_fitted_ = True

    def fit(self, X: Any, y: Any) -> Given:  # noqa: N803
        return self

    def predict_proba(self, X: Any) -> Any:  # noqa: N803
        return np.asarray(X)

    def predict(self, X: Any) -> Any:  # noqa: N803
        return np.asarray(X).argmax(axis=1)


N_OPTIONS, SEED = 5, 3


def same_sized(n: int, *, seed: int) -> Ragged:
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(N_OPTIONS, 0.7), size=n)
    return p.ravel(), Options.of_sizes([N_OPTIONS] * n), np.array([rng.choice(N_OPTIONS, p=row) for row in p])


def mapies(score: Any, *, coverage: float) -> SplitConformalClassifier:
    p, _, answers = same_sized(300, seed=0)
    mapie = SplitConformalClassifier(
        Given(N_OPTIONS), confidence_level=coverage, conformity_score=score, random_state=SEED
    )
    return mapie.conformalize(p.reshape(-1, N_OPTIONS), answers)


def mapies_sets(mapie: SplitConformalClassifier, last: bool | str = True) -> np.ndarray:
    p = same_sized(500, seed=1)[0].reshape(-1, N_OPTIONS)
    return mapie.predict_set(p, {"include_last_label": last})[1][:, :, 0].ravel()


class Replayed(np.random.Generator):
    """A generator with mapie's draws: it begins anew at its seed for fitting and again for predicting."""

    def random(self, size: Any = None, *_: Any, **__: Any) -> Any:
        return np.random.RandomState(SEED).uniform(size=size)


@pytest.fixture
def replayed() -> Replayed:
    return Replayed(np.random.PCG64(0))


@pytest.mark.parametrize("coverage", [0.5, 0.7, 0.9, 0.95])
def test_lac_is_mapies(coverage: float) -> None:
    mapie = mapies("lac", coverage=coverage)
    fitted = fit_conformal(*same_sized(300, seed=0), coverage=coverage, kind="lac")
    p, options, _ = same_sized(500, seed=1)
    sets = prediction_sets(fitted, p, options, keep_top=False)
    assert sets.tolist() == mapies_sets(mapie).tolist()
    assert fitted.threshold == pytest.approx(float(mapie._conformity_score.quantiles_[0]), abs=1e-12)


@pytest.mark.parametrize("coverage", [0.5, 0.7, 0.9, 0.95])
def test_randomised_aps_is_mapies_given_its_draws(coverage: float, replayed: Replayed) -> None:
    mapie = mapies(APSConformityScore(), coverage=coverage)
    fitted = fit_conformal(*same_sized(300, seed=0), coverage=coverage, kind="aps", rng=replayed)
    p, options, _ = same_sized(500, seed=1)
    sets = prediction_sets(fitted, p, options, keep_top=False, rng=replayed)
    assert sets.tolist() == mapies_sets(mapie, "randomized").tolist()
    assert fitted.threshold == pytest.approx(float(mapie._conformity_score.quantiles_[0]), abs=1e-12)


@pytest.mark.parametrize("coverage", [0.7, 0.9, 0.95])
def test_deterministic_aps_is_mapies_at_its_threshold_and_smaller_at_ours(coverage: float) -> None:
    """Mapie fits with randomised scores also where it predicts without, which makes its threshold, and sets, larger."""
    mapie = mapies(APSConformityScore(), coverage=coverage)
    theirs = mapies_sets(mapie)
    p, options, answers = same_sized(500, seed=1)
    at_theirs = Conformal("aps", coverage, float(mapie._conformity_score.quantiles_[0]), 300)
    assert prediction_sets(at_theirs, p, options).tolist() == theirs.tolist()
    ours = prediction_sets(fit_conformal(*same_sized(300, seed=0), coverage=coverage, kind="aps"), p, options)
    assert (ours <= theirs).all()
    assert ours.mean() < 0.95 * theirs.mean()
    assert covered(ours, options, answers) == pytest.approx(coverage, abs=0.04)


@pytest.mark.parametrize("coverage", [0.7, 0.9])
def test_raps_is_mapies_on_its_part_of_the_questions_and_with_its_penalty(coverage: float, replayed: Replayed) -> None:
    """Mapie chooses penalty and k_reg itself, on a part of the questions; and without randomisation it charges an
    option the penalty of the rank before, which is ours with k_reg + 1."""
    mapie = mapies(RAPSConformityScore(), coverage=coverage)
    drawn, plain = mapies_sets(mapie, "randomized"), mapies_sets(mapie, True)
    score = mapie._conformity_score
    p, _, answers = same_sized(300, seed=0)
    split = StratifiedShuffleSplit(n_splits=1, test_size=len(score.X_raps), random_state=SEED)
    (kept, _), wide = next(split.split(p.reshape(-1, N_OPTIONS), answers)), p.reshape(-1, N_OPTIONS)
    part = wide[kept].ravel(), Options.of_sizes([N_OPTIONS] * len(kept)), answers[kept]
    penalty, k_reg = float(np.squeeze(score.lambda_star)), int(score.k_star[0])
    chosen = Regularisation(penalty, k_reg)
    fitted = fit_conformal(*part, coverage=coverage, kind="raps", regularisation=chosen, rng=replayed)
    assert fitted.threshold == pytest.approx(float(score.quantiles_[0]), abs=1e-12)
    p, options, _ = same_sized(500, seed=1)
    assert prediction_sets(fitted, p, options, keep_top=False, rng=replayed).tolist() == drawn.tolist()
    rank_before = Conformal("raps", coverage, fitted.threshold, 270, False, Regularisation(penalty, k_reg + 1))
    assert prediction_sets(rank_before, p, options).tolist() == plain.tolist()


# -------------------------------------------------------------------------------------------------------- abstention


def test_twenty_two_right_answers_show_a_risk_of_one_in_ten() -> None:
    # 0.9^22 = 0.0985 and 0.9^21 = 0.109
    assert flawless_needed(0.1) == 22
    assert flawless_needed(0.5, delta=0.125) == 3
    enough, short = (fit_abstention(np.linspace(0.5, 1, n), np.ones(n, bool), risk=0.1) for n in (22, 21))
    assert (enough.threshold, enough.n_answered, enough.n_wrong) == (ANSWER_ALL, 22, 0)
    assert short.abstains_always
    assert "21 held-out questions cannot show" in str(short)
    assert "it takes at least 22 answers without a single error" in str(short)


def test_the_search_ends_at_the_first_threshold_that_fails_worked_by_hand() -> None:
    # risk 1/2 and delta 1/8: 3 of 3 right, 4 of 4 right, then from 6 on one error: (1 + 6) / 64 <= 1/8 < (1 + 5) / 32
    confidence = np.array([0.99, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7])
    correct = np.array([True, True, True, True, False, True, True])
    fitted = fit_abstention(confidence, correct, risk=0.5, delta=0.125)
    assert (fitted.threshold, fitted.n_answered, fitted.n_wrong) == (0.8, 4, 0)
    assert abstains(fitted, np.array([0.9, 0.8001, 0.8, 0.1])).tolist() == [False, False, True, True]
    assert "answers above a confidence of 0.8" in str(fitted)
    late = np.array([True, True, True, True, True, False, True])  # at 6 one error is allowed, and so at 7
    assert fit_abstention(confidence, late, risk=0.5, delta=0.125).threshold == ANSWER_ALL


def test_questions_of_equal_confidence_are_answered_together_or_not_at_all() -> None:
    confidence, correct = np.array([0.9] * 30 + [0.5] * 30), np.array([True] * 30 + [False] * 30)
    fitted = fit_abstention(confidence, correct, risk=0.1)
    assert (fitted.threshold, fitted.n_answered) == (0.5, 30)
    shuffled = np.random.default_rng(0).permutation(60)
    assert fit_abstention(confidence[shuffled], correct[shuffled], risk=0.1) == fitted
    assert fit_abstention(np.full(60, 0.9), correct, risk=0.1).abstains_always


def test_where_nothing_can_be_guaranteed_it_abstains_on_everything_and_says_so() -> None:
    fitted = fit_abstention(np.linspace(0, 1, 200), np.arange(200) % 2 == 0, risk=0.1)
    assert fitted.threshold is None
    assert abstains(fitted, np.array([0.0, 1.0])).all()
    assert str(fitted).startswith(
        "always abstains: these 200 held-out questions cannot show an error rate of at most 0.1"
    )
    assert fit_abstention(np.zeros(0), np.zeros(0, bool), risk=0.1).abstains_always


@pytest.mark.parametrize(
    ("n", "why"), [(40, "and too many of the surest answers were wrong"), (10, "single error; give")]
)
def test_it_says_how_many_answers_without_an_error_a_promise_takes(n: int, why: str) -> None:
    fitted = fit_abstention(np.linspace(0, 1, n), np.zeros(n, bool), risk=0.2)
    assert "it takes at least 11 answers without a single error" in str(fitted), "0.8^11 <= 0.1 < 0.8^10"
    assert why in str(fitted)
    assert not fit_abstention(np.ones(11), np.ones(11, bool), risk=0.2).abstains_always
    assert fit_abstention(np.ones(10), np.ones(10, bool), risk=0.2).abstains_always


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=80), st.floats(0.05, 0.6))
def test_the_record_counts_what_its_threshold_answers(asked: list[tuple[int, bool]], risk: float) -> None:
    confidence, correct = np.array([c / 20 for c, _ in asked]), np.array([ok for _, ok in asked], dtype=bool)
    fitted = fit_abstention(confidence, correct, risk=risk)
    answered = ~abstains(fitted, confidence)
    assert (fitted.n_answered, fitted.n_wrong) == (answered.sum(), (answered & ~correct).sum())
    assert fitted.n_wrong <= risk * fitted.n_answered


def error_rates(name: str, confidence: np.ndarray) -> np.ndarray:
    """The true chance of an error at each confidence."""
    unsure = 1 - confidence
    return {
        "smooth": 0.5 * unsure**2,
        "overconfident": 0.02 + 0.6 * unsure,
        "step": np.where(unsure < 0.3, 0.02, 0.6),
        "always at the risk": np.full(len(confidence), 0.1001),
        "not monotone": np.where(unsure < 0.03, 0.3, np.where(unsure < 0.4, 0.06, 0.5)),
    }[name]


@pytest.mark.parametrize("world", ["smooth", "overconfident", "step", "always at the risk", "not monotone"])
def test_the_risk_is_exceeded_in_no_more_than_delta_of_the_repetitions(world: str) -> None:
    rng, runs, delta, risk = np.random.default_rng(2), 600, 0.1, 0.1
    broken, empirical = 0, 0
    for _ in range(runs):
        confidence = rng.random(250)
        correct = rng.random(250) >= error_rates(world, confidence)
        fitted = fit_abstention(confidence, correct, risk=risk, delta=delta)
        if fitted.threshold is not None:
            broken += true_risk(world, fitted.threshold) > risk
        # what not to do: the lowest threshold at which the observed error rate is within the risk
        order = np.argsort(-confidence)
        within = np.flatnonzero(np.cumsum(~correct[order]) <= risk * np.arange(1, 251))
        empirical += bool(len(within)) and true_risk(world, confidence[order][within[-1]]) > risk
    assert broken / runs <= delta + 3 * np.sqrt(delta * (1 - delta) / runs)
    assert empirical > 3 * broken


def true_risk(world: str, threshold: float) -> float:
    return float(error_rates(world, np.linspace(max(threshold, 0.0), 1, 400)).mean())


def test_much_is_answered_where_the_model_is_good() -> None:
    rng, shares = np.random.default_rng(3), []
    for _ in range(50):
        confidence = rng.random(1000)
        correct = rng.random(1000) >= error_rates("smooth", confidence)
        shares.append(fit_abstention(confidence, correct, risk=0.1).n_answered / 1000)
    # u^2 / 6 = 0.1 at u = 0.775, the share that an oracle would answer
    assert 0.65 < np.mean(shares) < 0.775


# -------------------------------------------------------------------------------------------------- records, errors


def test_records_come_back_from_json() -> None:
    asked = draw(200, np.random.default_rng(0))
    for kind in KINDS:
        fitted = fit_conformal(*asked, coverage=0.9, kind=kind)
        assert Conformal.from_dict(json.loads(json.dumps(fitted.to_dict(), allow_nan=False))) == fitted
        assert str(fitted) == f"{kind} sets of coverage 0.9, from 200 questions"
    for risk in (0.001, 0.4):
        rule = fit_abstention(np.linspace(0, 1, 200), np.linspace(0, 1, 200) > 0.2, risk=risk)
        assert Abstention.from_dict(json.loads(json.dumps(rule.to_dict(), allow_nan=False))) == rule


def test_a_record_of_something_else_is_refused() -> None:
    with pytest.raises(CoralError, match="Not a record of conformal: alpha, threshold missing or unknown"):
        Conformal.from_dict({"kind": "lac", "coverage": 0.9, "alpha": 1, "n_questions": 9, "randomised": False})
    with pytest.raises(CoralError, match="Not a record of abstention"):
        Abstention.from_dict({})


@pytest.mark.parametrize("coverage", [0.0, 1.0, -0.1, 90, float("nan")])
def test_a_coverage_outside_zero_and_one_is_refused(coverage: float) -> None:
    with pytest.raises(CoralError, match=r"coverage must lie between 0 and 1, both excluded\. Got"):
        fit_conformal(*draw(50, np.random.default_rng(0)), coverage=float(coverage))


def test_too_few_questions_are_refused_with_the_number_needed() -> None:
    assert [questions_needed(c) for c in (0.5, 0.8, 0.9, 0.95, 0.99)] == [1, 4, 9, 19, 99]
    asked = draw(18, np.random.default_rng(0))
    with pytest.raises(CoralError, match=r"at least 19 held-out questions.*Got 18.*at most 0\.947"):
        fit_conformal(*asked, coverage=0.95)
    assert fit_conformal(*draw(19, np.random.default_rng(0)), coverage=0.95).n_questions == 19


@given(st.fractions(min_value="1/100", max_value="99/100", max_denominator=1000))
def test_one_question_fewer_than_needed_would_ask_for_a_score_that_is_not_there(coverage: Any) -> None:
    written = round(float(coverage), 3)
    n = questions_needed(written)
    thousandths = round(written * 1000)
    assert -(-thousandths * (n + 1) // 1000) <= n  # ceil((n + 1) coverage), in whole numbers
    assert -(-thousandths * n // 1000) > n - 1


def test_questions_that_cannot_be_learned_from_are_refused() -> None:
    p, options, answers = draw(20, np.random.default_rng(0))
    unlabelled, beyond = answers.copy(), answers.copy()
    unlabelled[[3, 5]], beyond[4] = -1, 9
    for wrong, message in (
        (unlabelled, r"2 of 20 held-out questions have no answer \(first: number 3\)"),
        (beyond, "Question number 4 has answer 9, but its options are 0 to"),
        (answers[1:], "One answer per question is needed. Got 19 for 20"),
    ):
        with pytest.raises(CoralError, match=message):
            fit_conformal(p, options, wrong, coverage=0.9)


def test_what_is_not_a_distribution_over_the_options_is_refused() -> None:
    p, options, answers = draw(20, np.random.default_rng(0))
    for wrong in (np.log(p), p * 2, np.full(len(p), np.nan)):
        with pytest.raises(CoralError, match="must be 0 or more and sum to 1 over each question, but they sum to"):
            fit_conformal(wrong, options, answers, coverage=0.9)
    with pytest.raises(CoralError, match=r"but they go down to -0\.5"):
        prediction_sets(Conformal("lac", 0.9, 0.5, 9), np.array([1.5, -0.5]), Options.of_sizes([2]))
    with pytest.raises(CoralError, match="edges of the options must rise from 0 to the number of rows"):
        prediction_sets(Conformal("lac", 0.9, 0.5, 9), p, Options(options.edges[:-1]))


def test_options_that_do_not_go_together_are_refused() -> None:
    asked, rng = draw(50, np.random.default_rng(0)), np.random.default_rng(0)
    with pytest.raises(CoralError, match="LAC sets have no randomised version"):
        fit_conformal(*asked, coverage=0.9, rng=rng)
    with pytest.raises(CoralError, match="Only raps has a regularisation"):
        fit_conformal(*asked, coverage=0.9, kind="aps", regularisation=Regularisation())
    drawn = fit_conformal(*asked, coverage=0.9, kind="aps", rng=rng)
    with pytest.raises(CoralError, match="fitted with randomisation; give a generator"):
        prediction_sets(drawn, *asked[:2])
    with pytest.raises(CoralError, match="fitted without randomisation; leave out the generator"):
        prediction_sets(fit_conformal(*asked, coverage=0.9), *asked[:2], rng=rng)
    with pytest.raises(CoralError, match=r"Unknown kind of prediction set 'rasp'\. Did you mean 'raps'"):
        fit_conformal(*asked, coverage=0.9, kind="rasp")
    with pytest.raises(CoralError, match="Unknown kind of prediction set 'laq'"):
        Conformal.from_dict(fit_conformal(*asked, coverage=0.9).to_dict() | {"kind": "laq"})
    for penalty, k_reg in ((-0.1, 1), (float("nan"), 1), (0.1, -1)):
        with pytest.raises(CoralError, match="must not be negative"):
            Regularisation(penalty, k_reg)


def test_an_abstention_that_cannot_be_fitted_is_refused() -> None:
    sure, right = np.linspace(0, 1, 30), np.ones(30, bool)
    for risk, delta in ((0.0, 0.1), (1.0, 0.1), (0.1, 0.0), (0.1, 1.0)):
        with pytest.raises(CoralError, match="must lie between 0 and 1, both excluded"):
            fit_abstention(sure, right, risk=risk, delta=delta)
    for wrong in (sure * 2, sure - 1, sure * np.nan):
        with pytest.raises(CoralError, match="Confidences must lie between 0 and 1"):
            fit_abstention(wrong, right, risk=0.1)
