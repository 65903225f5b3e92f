"""What labels say of a lens: weight and temperature, and a gain whose interval knows what is independent."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from support.planted import COLUMN, in_articles, planted_labels

from coral_lens.lens.labelled import (
    LARGEST_LAMBDA,
    OWN_SPREAD,
    PRIOR_OF_ENOUGH,
    PRIOR_OF_FEW,
    Judged,
    Labelled,
    Mixture,
    Prior,
    adaptation_of,
    check_labels,
    fit_mixture,
    fit_own,
    fit_scale,
    fit_temperature,
    gain_of,
    judge,
    settle,
)
from coral_lens.lens.trace import Adaptation
from coral_lens.ragged import Options


def found(data: Labelled, before: float, **other: object) -> Adaptation:
    """What these labels say of a lens that has such a weight without them."""
    prior = Prior(before, data.n_units, **other)  # type: ignore[arg-type]
    return adaptation_of(data, prior, judge(data, prior))[0]


# ------------------------------------------------------------------------------------------------------------- the fit


@pytest.mark.parametrize("trust", [0.2, 0.6, 1.2])
def test_many_labels_find_the_weight_that_answers_were_drawn_with(trust: float) -> None:
    weight, temperature, _ = fit_mixture(planted_labels(3000, trust=trust), Prior(0.5, 3000))
    assert weight == pytest.approx(trust, abs=0.1)
    assert temperature == pytest.approx(1.0, abs=0.12)


def test_no_labels_leave_all_as_it_is_and_the_bounds_hold() -> None:
    nothing = planted_labels(4, trust=1.0).take(np.zeros(4, dtype=bool))
    assert fit_mixture(nothing, Prior(0.4, 0))[:2] == pytest.approx((0.4, 1.0), abs=1e-4)
    assert fit_mixture(nothing, Prior(0.8, 0, temperature=1.6))[:2] == pytest.approx((0.8, 1.6), abs=1e-3)
    alone = fit_temperature(nothing, Prior(0.8, 0, temperature=1.6))
    assert alone.temperature == pytest.approx(1.0, abs=1e-3), "of the base alone"
    assert fit_mixture(planted_labels(2000, trust=3.0), Prior(0.5, 2000))[0] == LARGEST_LAMBDA
    assert fit_mixture(planted_labels(2000, trust=-2.0), Prior(0.5, 2000))[0] == 0.0
    assert fit_mixture(planted_labels(2000, trust=-2.0), Prior(0.5, 2000, least=0.1))[0] == 0.1


@pytest.mark.parametrize("before", [0.0, 0.5])
def test_five_labels_are_not_worse_than_none(before: float) -> None:
    """Over forty draws of five labels, on a task that it knows and on one that it does not, believed before or not."""
    for trust in (0.0, 0.6, 1.0):
        rest = planted_labels(1000, trust=trust, seed=999)
        without = rest.brier(Mixture(before, 1.0)).mean()
        fits = [fit_mixture(planted_labels(5, trust=trust, seed=s), Prior(before, 5)) for s in range(40)]
        after = np.mean([rest.brier(fit).mean() for fit in fits])
        assert after <= without + 0.003, (trust, after, without)


def test_over_even_shares_only_the_weight_is_fitted() -> None:
    """Weight 0.8 at temperature 2 and weight 0.4 at temperature 1 are then the same, so the temperature stays."""
    data = planted_labels(800, trust=0.5)
    even = data._replace(base=np.full_like(data.base, np.log(0.25)))
    weight, temperature, _ = fit_mixture(even, Prior(0.1, 800, exits=True, least=0.1))
    assert temperature == 1.0
    assert weight > 0.3
    np.testing.assert_allclose(even.probs(Mixture(0.8, 2.0)), even.probs(Mixture(0.4, 1.0)))
    assert fit_temperature(even, Prior(0.1, 800, exits=True)).temperature == 1.0


# ----------------------------------------------------------------------------------------------------- the task's own probe


def test_labels_teach_what_the_states_know_beside_the_lens() -> None:
    rest = planted_labels(2000, trust=0.6, states=1.5, seed=999)
    without, found = (fit_mixture(planted_labels(60, trust=0.6, states=1.5), Prior(0.6, n)) for n in (19, 60))
    assert without.own is None, "nineteen labels teach a probe nothing"
    assert found.own is not None
    assert np.argmax(np.abs(found.own)) == COLUMN
    assert rest.brier(found).mean() < rest.brier(without).mean() - 0.01


def test_the_probe_is_that_of_a_logistic_regression_with_the_stated_prior() -> None:
    """Two options, a base that knows nothing and no lens: scikit-learn's, on the difference of the two states."""
    rng, n = np.random.default_rng(0), 80
    options = Options.of_sizes([2] * n)
    z = options.centre(rng.normal(size=(2 * n, 3)))
    answers = (z[1::2, 0] + rng.normal(size=n) > z[::2, 0]).astype(np.int64)
    even = np.full(2 * n, np.log(0.5))
    own = fit_own(Labelled(even, even, options, options.one_hot(answers), z=z), Mixture(0.0, 1.0))
    spread = OWN_SPREAD / np.sqrt((z**2).sum(axis=1).mean())
    wanted = LogisticRegression(C=spread**2, fit_intercept=False, tol=1e-8).fit(z[1::2] - z[::2], answers)
    assert own == pytest.approx(wanted.coef_[0], abs=1e-3)


def test_a_probe_of_states_that_know_nothing_costs_about_a_point_at_most() -> None:
    """Over forty draws of fifty labels, on tasks that the lens knows and that it does not."""
    for trust in (0.0, 0.6):
        rest, costs = planted_labels(1000, trust=trust, states=0.0, seed=999), []
        for seed in range(40):
            data = planted_labels(50, trust=trust, states=0.0, seed=seed)
            prior = Prior(0.6, data.n_units)
            found = settle(data, prior, judge(data, prior).scale, worse=False)
            assert found.own is not None
            costs.append(rest.brier(found).mean() - rest.brier(fit_mixture(data._replace(z=None), prior)).mean())
        assert np.mean(costs) < 0.012, (trust, np.mean(costs))


def test_states_that_are_all_alike_have_no_probe() -> None:
    data = planted_labels(40, trust=0.5, states=0.0)
    assert fit_own(data._replace(z=np.zeros_like(data.z)), Mixture(0.5, 1.0)) is None
    assert fit_own(data._replace(z=None), Mixture(0.5, 1.0)) is None


def test_logits_that_are_twice_too_sure_are_halved() -> None:
    data = planted_labels(5000, trust=1.0)
    assert fit_scale(data, 2.0 * data.lens) == pytest.approx(0.5, abs=0.03)
    assert fit_scale(data.take(np.arange(5000) < 2), 2.0 * data.lens[:8]) > 0.6, "two questions change little"


def test_a_mixture_is_scaled_as_a_whole() -> None:
    data = planted_labels(60, trust=0.6, states=1.5)
    prior = Prior(0.6, 60)
    plain, scaled = fit_mixture(data, prior), settle(data, prior, 0.5, worse=False)
    np.testing.assert_allclose(data.scores(scaled), 0.5 * data.scores(plain))
    worse = settle(data, prior, 0.5, worse=True)
    assert (worse.weight, worse.own) == (0.0, None)
    assert worse.temperature == fit_temperature(data, prior).temperature


# -------------------------------------------------------------------------------------------------------- what is said


def test_a_lens_that_is_clearly_worse_is_left_out() -> None:
    """Also where the prior would leave it some weight."""
    data = planted_labels(20, trust=0.0, seed=25)
    said = found(data, 1.5)
    assert said.gain.high < 0.0 == said.weight < fit_mixture(data, Prior(1.5, 20))[0]
    assert said.is_left_out
    assert "the lens is worse here and is left out, temperature" in str(said)


def test_a_lens_that_helps_says_by_how_much() -> None:
    said = found(planted_labels(100, trust=1.0), 0.5)
    assert 0 < said.gain.low < said.gain.value < said.gain.high
    assert said.weight > 0.6
    assert "clearly better. Weight of the lens" in str(said)
    assert "(0.50 without labels)" in str(said)


@pytest.mark.parametrize(("n", "articles"), [(10, 10), (60, 5), (60, 1)])
def test_a_few_labels_call_no_lens_clearly_better(n: int, articles: int) -> None:
    """Of ten questions, of five articles and of one, an interval that leaves out 0 is no more than chance can do."""
    said = found(in_articles(planted_labels(n, trust=1.5, seed=3), articles), 0.5)
    assert said.gain.low > 0.0, "they do speak for it"
    assert "clearly better" not in str(said)
    assert ": better on these, which are too few to tell. Weight of the lens" in str(said)


@pytest.mark.parametrize(("trust", "before"), [(0.0, 0.0), (-1.0, 0.5)])
def test_a_lens_without_weight_is_called_worse_only_where_it_was_measured_worse(trust: float, before: float) -> None:
    """Its likeliest weight is 0, in every fold too: nothing is gained and nothing lost."""
    data = planted_labels(60, trust=trust)
    said = found(data._replace(lens=data.base) if trust == 0.0 else data, before)
    assert (said.weight, said.gain.low, said.gain.high) == (0.0, 0.0, 0.0)
    assert "worse" not in str(said)
    assert f"the lens has 0 as its likeliest weight ({before:.2f} without labels) and is left out" in str(said)


def test_labels_of_two_articles_rule_no_lens_out_however_many_they_are() -> None:
    data = planted_labels(20, trust=0.0, seed=25)
    said = found(in_articles(data, 2), 1.5)
    assert said.gain.high < 0.0, "they do speak against it"
    assert not said.is_left_out
    assert said.weight > 0.0
    assert "worse on these, which are too few to tell" in str(said)
    assert found(in_articles(data, 20), 1.5).is_left_out
    assert in_articles(data, 1).n_units == 1


def test_a_lens_that_exits_early_and_is_worse_is_hardly_believed_and_never_left_out() -> None:
    """It has no base: at weight 0 every question would get its first option."""
    data = planted_labels(200, trust=-1.0)
    even = data._replace(base=np.full_like(data.base, np.log(0.25)))
    said = found(even, 0.5, exits=True, least=0.1)
    assert said.worse
    assert said.weight == 0.1
    assert not said.is_left_out
    assert "left out" not in str(said)
    assert "better than even chances" in str(said)
    assert "hardly believed, since there is no base: weight 0.10." in str(said)


# --------------------------------------------------------------------------------------------------------------- the gain


@pytest.mark.parametrize("states", [None, 0.0, 1.5])
def test_the_interval_holds_the_true_gain_nearly_always(states: float | None) -> None:
    """Of forty draws of fifty labels, without a probe and with one that has nothing or much to learn; the truth is measured on
    three thousand other questions."""
    rest, hits = planted_labels(3000, trust=0.5, states=states, seed=999), 0
    for seed in range(40):
        data = planted_labels(50, trust=0.5, states=states, seed=seed)
        prior = Prior(0.5, data.n_units)
        said, mixture = adaptation_of(data, prior, judge(data, prior))
        alone = rest.brier(fit_temperature(data, prior)).mean()
        hits += said.gain.low <= alone - rest.brier(mixture).mean() <= said.gain.high
    assert hits >= 33


def test_the_interval_of_the_gain_draws_whole_articles() -> None:
    """Ten copies of each of twelve questions say no more than twelve questions, and none is judged by labels of its copies."""
    few = planted_labels(12, trust=1.0)
    base, own, y = (np.tile(rows.reshape(12, 4), (10, 1)).ravel() for rows in (few.base, few.lens, few.y))
    alone = Labelled(base, own, Options.of_sizes([4] * 120), y)
    copies = in_articles(alone, 12)
    gains = {name: found(data, 0.5).gain for name, data in (("copies", copies), ("alone", alone))}
    assert gains["copies"].high - gains["copies"].low > 2 * (gains["alone"].high - gains["alone"].low)
    assert gains["copies"].value < gains["alone"].value
    assert copies.take(np.arange(120) < 24).units.tolist() == [*copies.units[:24]]


def test_folds_are_held_back_no_more_than_all_labels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twenty-one labels a fold leaves eighteen or nineteen; they are enough all the same."""
    assert (Prior(0.5, 19).spreads, Prior(0.5, 20).spreads) == (PRIOR_OF_FEW, PRIOR_OF_ENOUGH)
    data, seen = planted_labels(21, trust=1.0), []
    monkeypatch.setattr(
        "coral_lens.lens.labelled.fit_mixture",
        lambda part, prior: (seen.append((len(part.options), prior)), Mixture(0.5, 1.0))[1],
    )
    judge(data, prior := Prior(0.5, data.n_units))
    assert {n for n, _ in seen} == {18, 19}
    assert {one.spreads for _, one in seen} == {prior.spreads} == {PRIOR_OF_ENOUGH}


def test_the_interval_of_very_many_labels_takes_little_memory() -> None:
    n = 20_000
    options = Options.of_sizes([2] * n)
    even = np.full(2 * n, np.log(0.5))
    data = Labelled(even, even, options, options.one_hot(np.zeros(n, dtype=np.int64)))
    judged = Judged(np.full(2 * n, 0.5), np.tile([0.6, 0.4], n))
    tracemalloc.start()
    gain = gain_of(data, judged)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6
    assert (gain.low, gain.value, gain.high) == pytest.approx((0.18, 0.18, 0.18))


# ----------------------------------------------------------------------------------------------------------- who answers


def test_who_answers_is_judged_by_labels_of_other_questions() -> None:
    """By its own labels the mixture is right everywhere, by those of others nowhere."""
    options = Options.of_sizes([2] * 40)
    y = options.one_hot(np.zeros(40, dtype=np.int64))
    right, wrong = np.log(np.tile([0.9, 0.1], 40)), np.tile([0.1, 0.9], 40)
    data = Labelled(right, right, options, y)
    check = check_labels(data, Judged(wrong, wrong), True)
    assert (check.lens, check.used) == (0.0, False)


def test_who_answers_is_decided_by_articles_and_not_by_their_questions() -> None:
    """Of twenty-five articles one has three answers more and another one fewer: these are two articles, not four."""
    base = np.tile([0.4, 0.6], 100)
    mixed = base.copy()
    better = np.repeat((np.arange(100) % 25 == 0) & (np.arange(100) < 75), 2)
    mixed[better] = np.tile([0.6, 0.4], 3)
    mixed[-2:], base[-2:] = [0.4, 0.6], [0.6, 0.4]
    options = Options.of_sizes([2] * 100)
    data = Labelled(np.log(base), np.log(base), options, options.one_hot(np.zeros(100, dtype=np.int64)))
    assert check_labels(data, Judged(base, mixed), False).used
    assert not check_labels(in_articles(data, 25), Judged(base, mixed), False).used
