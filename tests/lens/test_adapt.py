"""Thirty labels: how far a lens is believed on one new task is learned from some of its questions."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.planted import PlantedStore, brier
from support.questions import toy_questions

import coral_lens
from coral_lens.engine.model import Model
from coral_lens.errors import CoralError
from coral_lens.lens.adapt import LARGEST_LAMBDA, Labelled, adapt_on, adaptation_of, fit_mixture, learning_curve
from coral_lens.lens.artefact import Lens
from coral_lens.lens.calibrate import calibrate_on
from coral_lens.lens.fit import fit, fit_store
from coral_lens.lens.folder import load_lens
from coral_lens.lens.settings import FitSettings, Guarantees
from coral_lens.ragged import Options
from coral_lens.records import UNKNOWN

SIGNAL = {1: 2.0}


@pytest.fixture(scope="module")
def lens() -> Lens:
    return fit_store(PlantedStore(120, signal=SIGNAL, tasks={"a": 1.0, "b": 1.0}), FitSettings(layers=(1,)))


def new_task(n: int, seed: int, *, trust: float = 1.0) -> PlantedStore:
    """A task in which the signal is multiplied."""
    return PlantedStore(n, signal=SIGNAL, tasks={"questions": trust}, seed=seed)


def labelled(n: int, *, trust: float, seed: int = 0) -> Labelled:
    """Questions whose answers are drawn from base * lens^trust."""
    rng, options = np.random.default_rng(seed), Options.of_sizes([4] * n)
    base, own = (np.log(options.softmax(scale * rng.normal(size=4 * n))) for scale in (0.5, 1.5))
    truth = options.softmax((1 - trust) * base + trust * own).reshape(n, 4)
    answers = np.array([rng.choice(4, p=row) for row in truth])
    return Labelled(base, own, options, options.one_hot(answers))


# ------------------------------------------------------------------------------------------------------ what is found


@pytest.mark.parametrize("trust", [0.2, 0.6, 1.2])
def test_many_labels_find_the_weight_that_answers_were_drawn_with(trust: float) -> None:
    weight, temperature = fit_mixture(labelled(3000, trust=trust), 0.5)
    assert weight == pytest.approx(trust, abs=0.1)
    assert temperature == pytest.approx(1.0, abs=0.12)


def test_no_labels_leave_all_as_it_is_and_the_bounds_hold() -> None:
    nothing = labelled(4, trust=1.0).take(np.zeros(4, dtype=bool))
    assert fit_mixture(nothing, 0.4) == pytest.approx((0.4, 1.0), abs=1e-4)
    assert fit_mixture(labelled(2000, trust=3.0), 0.5)[0] == LARGEST_LAMBDA
    assert fit_mixture(labelled(2000, trust=-2.0), 0.5)[0] == 0.0


def test_five_labels_are_not_worse_than_none() -> None:
    """Over forty draws of five labels, on a task that it knows and on one that it does not."""
    for trust in (0.0, 0.6, 1.0):
        rest, before = labelled(1000, trust=trust, seed=999), 0.5
        without = rest.brier(before, 1.0).mean()
        after = [
            rest.brier(*((f := adaptation_of(labelled(5, trust=trust, seed=s), before)).weight, f.temperature)).mean()
            for s in range(40)
        ]
        assert np.mean(after) <= without + 0.003, (trust, np.mean(after), without)


def test_a_lens_that_is_clearly_worse_is_left_out() -> None:
    found = adaptation_of(labelled(100, trust=-1.0), 0.5)
    assert found.is_left_out
    assert found.weight == 0.0
    assert "the lens is worse here and is left out" in str(found)


def test_a_lens_that_helps_says_by_how_much() -> None:
    found = adaptation_of(labelled(100, trust=1.0), 0.5)
    assert 0 < found.gain.low < found.gain.value < found.gain.high
    assert found.weight > 0.6
    assert "clearly better. Weight of the lens" in str(found)
    assert "(0.50 without labels)" in str(found)


def test_the_interval_holds_the_true_gain_nearly_always() -> None:
    """Of forty draws of fifty labels; the truth is measured on three thousand others."""
    rest, hits = labelled(3000, trust=0.5, seed=999), 0
    for seed in range(40):
        data = labelled(50, trust=0.5, seed=seed)
        found = adaptation_of(data, 0.5)
        alone = rest.brier(0.0, fit_mixture(data, 0.0, at_most=0.0)[1]).mean()
        hits += found.gain.low <= alone - rest.brier(found.weight, found.temperature).mean() <= found.gain.high
    assert hits >= 34


def test_the_interval_of_the_gain_draws_whole_articles() -> None:
    """Ten copies of each of twelve questions say no more than twelve questions, and none is judged by labels of its copies."""
    few = labelled(12, trust=1.0)
    base, own, y = (np.tile(rows.reshape(12, 4), (10, 1)).ravel() for rows in (few.base, few.lens, few.y))
    alone = Labelled(base, own, Options.of_sizes([4] * 120), y)
    copies = alone._replace(groups=tuple(f"article {i % 12}" for i in range(120)))
    found = {name: adaptation_of(data, 0.5).gain for name, data in (("copies", copies), ("alone", alone))}
    assert found["copies"].high - found["copies"].low > 2 * (found["alone"].high - found["alone"].low)
    assert found["copies"].value < found["alone"].value
    assert copies.take(np.arange(120) < 24).units.tolist() == [*copies.units[:24]]


def test_the_learning_curve_begins_without_labels_and_falls_where_they_teach() -> None:
    curve = learning_curve(labelled(200, trust=1.2), 0.1)
    assert [point.questions for point in curve.points] == [0, 5, 10, 20, 30, 50, 100]
    scores = [point.scores["brier"] for point in curve.points]
    assert scores[-1] < scores[0] - 0.02
    assert curve.enough > 0


# -------------------------------------------------------------------------------------------------------- in the lens


@pytest.mark.parametrize(("trust", "better"), [(1.0, True), (-1.0, False)])
def test_fifty_labels_help_where_the_lens_knows_and_undo_harm_where_it_misleads(
    lens: Lens, trust: float, better: bool
) -> None:
    adapted = adapt_on(lens, new_task(50, 3, trust=trust))
    fresh = new_task(300, 4, trust=trust)
    before, after = (one.apply(fresh)["listwise tempered"] for one in (lens, adapted))
    assert brier(fresh, after) < brier(fresh, before)
    assert adapted.trust is not None
    assert adapted.adaptation is not None
    assert adapted.adaptation.is_left_out == (not better)
    if not better:
        assert adapted.trust.elsewhere == 0.0
        assert brier(fresh, after) < brier(fresh, lens.apply(fresh)["temperature"]) + 0.02


def test_labels_of_fixed_options_are_believed(lens: Lens) -> None:
    """Without labels, options that are the same in every question take the lens out."""
    few, fresh = new_task(60, 3), new_task(60, 4)
    for store in (few, fresh):
        two = np.flatnonzero(store.table.options.sizes == 2)
        store.questions = [replace(store.questions[two[0]], id=q.id, text=q.text) for q in store.questions]
    without, after = (one.read(fresh).weights for one in (lens, adapt_on(lens, few)))
    assert without is not None
    assert after is not None
    assert without.max() == 0.0 < after.max()


def test_the_questions_that_adapted_it_are_never_counted_and_promises_are_dropped(lens: Lens) -> None:
    calibrated, _ = calibrate_on(lens, new_task(60, 7), Guarantees(coverage=0.8))
    few = new_task(30, 3)
    adapted = adapt_on(calibrated, few)
    assert adapted.is_seen(few.questions).all()
    assert adapted.sets is None
    assert not adapted.is_home(few.questions).any()


def test_the_labels_that_adapted_it_promise_nothing_and_may_adapt_it_again(lens: Lens, tmp_path: Path) -> None:
    few, more = new_task(40, 3), new_task(60, 4)
    adapt_on(lens, few).save(tmp_path / "lens")
    adapted = load_lens(tmp_path / "lens")
    with pytest.raises(CoralError, match="fitted on or adapted by all of these questions"):
        calibrate_on(adapted, few, Guarantees(coverage=0.8))
    calibrated, left_out = calibrate_on(adapted, more, Guarantees(coverage=0.8))
    assert left_out == 0
    assert calibrated.sets is not None
    again, left_out = calibrate_on(calibrated, more, Guarantees(coverage=0.8))
    assert (again.sets, left_out) == (calibrated.sets, 0), "what calibrated it may do so again"
    assert adapt_on(adapted, few).adaptation == adapted.adaptation
    assert again.is_seen([*few.questions, *more.questions]).all()


def test_no_questions_are_no_questions_that_it_has_seen(lens: Lens, tiny: Model) -> None:
    for call, verb in ((coral_lens.adapt, "adapt"), (coral_lens.calibrate, "calibrate")):
        given = (Guarantees(),) if verb == "calibrate" else ()
        with pytest.raises(CoralError, match=f"There are no questions to {verb} the lens on"):
            call(lens, tiny, [], *given)


def test_adapting_again_starts_from_the_same_prior(lens: Lens) -> None:
    few, more = new_task(30, 3), new_task(60, 4)
    twice, once = adapt_on(adapt_on(lens, few), more), adapt_on(lens, more)
    assert twice.adaptation == once.adaptation


def test_the_papers_lens_can_be_adapted_too() -> None:
    lens = fit_store(PlantedStore(120, signal=SIGNAL), FitSettings(lens="ridge", layers=(1,)))
    adapted = adapt_on(lens, new_task(50, 3, trust=-1.0))
    assert adapted.method == "coral tempered"
    assert adapted.trust is not None
    assert adapted.trust.elsewhere == 0.0


def test_an_adapted_lens_is_saved_and_read_with_its_curve(lens: Lens, tmp_path: Path) -> None:
    adapted = adapt_on(lens, new_task(50, 3), with_curve=True)
    adapted.save(tmp_path / "lens")
    again = load_lens(tmp_path / "lens")
    assert again.adaptation == adapted.adaptation
    assert again.trust == adapted.trust
    fresh = new_task(20, 4)
    assert again.apply(fresh)[again.method].tobytes() == adapted.apply(fresh)[adapted.method].tobytes()


def test_too_few_labels_unlabelled_and_seen_questions_are_refused(lens: Lens) -> None:
    with pytest.raises(CoralError, match=r"at least 5 labelled questions.*Got 4"):
        adapt_on(lens, new_task(4, 3))
    few = new_task(10, 3)
    few.questions[2] = replace(few.questions[2], answer=UNKNOWN)
    with pytest.raises(CoralError, match="'2' has no answer; `coral adapt` needs the right option"):
        adapt_on(lens, few)
    with pytest.raises(CoralError, match="adapt it on questions that it has not seen"):
        adapt_on(lens, PlantedStore(120, signal=SIGNAL, tasks={"a": 1.0, "b": 1.0}))
    with pytest.raises(CoralError, match="use the lens before that"):
        adapt_on(lens, new_task(10, 3)).at_home()
    calibrated = calibrate_on(adapt_on(lens, new_task(10, 3)), new_task(60, 4), Guarantees(coverage=0.8))[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what is refused is not warned of
        with pytest.raises(CoralError, match="use the lens before that"):
            calibrated.at_home()


def test_it_is_adapted_with_a_model_in_one_call(tiny: Model) -> None:
    lens = fit(tiny, toy_questions(40), FitSettings(layers=(1,)), bar=False)
    few = toy_questions(12, seed=5)
    assert lens.adapt(tiny, few).adaptation == coral_lens.adapt(lens, tiny, few).adaptation
