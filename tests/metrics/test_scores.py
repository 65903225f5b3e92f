"""Metrics: numbers worked by hand, properties, agreement with scikit-learn, torchmetrics and netcal, simulations."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_lens.errors import CoralError
from coral_lens.metrics import scores as metrics
from coral_lens.metrics.curves import reliability, risk_coverage
from coral_lens.metrics.scores import METRICS, Metrics, facts_of, iter_weights, measure, score
from coral_lens.ragged import Options
from coral_lens.records import UNKNOWN, Predictions

Rows = Sequence[Sequence[float]]


def predictions(rows: Rows, answers: Sequence[int]) -> Predictions:
    return Predictions(
        method="toy",
        model="tiny",
        task="quiz",
        split="test",
        ids=tuple(f"q{i}" for i in range(len(rows))),
        answers=np.asarray(answers, dtype=np.int64),
        offsets=Options.of_sizes([len(row) for row in rows]).edges,
        probs=np.asarray([p for row in rows for p in row], dtype=np.float64),
    )


HAND = predictions([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.1, 0.9], [0.5, 0.5]], [0, 1, 1, 0])
"""Right, wrong, right, and right by the rule that of two equal options the first is chosen."""


def simulated(n: int, *, seed: int, sharpen: float = 1.0, n_options: int = 4) -> Predictions:
    """Answers drawn from a distribution, predictions sharpened away from it: calibrated if `sharpen` is 1."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.normal(size=(n, n_options))
    truth = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    answers = (truth.cumsum(1) > rng.random((n, 1))).argmax(1)
    shown = np.exp(sharpen * logits) / np.exp(sharpen * logits).sum(1, keepdims=True)
    return predictions(shown.tolist(), answers.tolist())


Quiz = tuple[list[list[float]], list[int]]


@st.composite
def quizzes(draw: st.DrawFn) -> Quiz:
    """Ragged questions whose probabilities are coarse, so that ties and bin edges are common; and their answers."""
    parts = draw(st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=5).filter(any), min_size=1, max_size=12))
    rows = [[p / sum(part) for p in part] for part in parts]
    # not yet Predictions: beartype draws random numbers where it checks them, which a strategy must not
    return rows, [draw(st.integers(0, len(row) - 1)) for row in rows]


def picked(source: Predictions, order: Sequence[int]) -> Predictions:
    """The questions of `source` in this order, repeated as often as they are named."""
    rows = [source.probs[source.options.of(i)].tolist() for i in order]
    return predictions(rows, [int(source.answers[i]) for i in order])


# --- numbers worked by hand -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("accuracy", 3 / 4),
        ("brier", (0.38 + 0.86 + 0.02 + 0.5) / 4),
        ("nll", -math.log(0.5 * 0.3 * 0.9 * 0.5) / 4),
        ("brier_top1", (0.25 + 0.36 + 0.01 + 0.25) / 4),
        ("nll_top1", -math.log(0.5 * 0.4 * 0.9 * 0.5) / 4),
        ("ece", (abs(0.5 + 0.5) + abs(-0.6) + abs(0.1)) / 4),
        # class 0: .5 and .5 right, .6 and .1 wrong; class 1: .3 wrong and .3 right share a bin; class 2: two rows only
        ("cwece", ((1.0 + 0.6 + 0.1) + (0.4 + 0.1 + 0.5) + (0.2 + 0.1)) / 10),
        ("auroc", 1 / 3),
        ("aurc", (0 + 1 / 2 + 1 / 3 + 1 / 4) / 4),
    ],
)
def test_four_questions_worked_by_hand(metric: str, expected: float) -> None:
    assert score(HAND, metric) == pytest.approx(expected, abs=1e-12)


def test_adaptive_bins_hold_equal_numbers_and_do_not_split_equal_confidences() -> None:
    assert score(HAND, "ece_adaptive", n_bins=2) == pytest.approx((abs(0.5 + 0.5) + abs(-0.6 + 0.1)) / 4)
    assert np.bincount(metrics.equal_mass_bins(np.linspace(0.1, 0.9, 10), n_bins=5)).tolist() == [2, 2, 2, 2, 2]
    assert metrics.equal_mass_bins(np.array([0.3, 0.3, 0.3, 0.9]), n_bins=4).tolist() == [0, 0, 0, 3]


def test_debiased_ece_of_two_questions_worked_by_hand() -> None:
    both_right = predictions([[0.5, 0.5], [0.5, 0.5]], [0, 0])  # one bin, S = 1, s^2 = 1/2, S / s = sqrt(2)
    expected = math.erf(1) - 2 * math.sqrt(0.5) * math.exp(-1) / math.sqrt(2 * math.pi)
    assert score(both_right, "ece_debiased") == pytest.approx(expected / 2)


def test_debiased_ece_is_the_mean_over_random_halves() -> None:
    """What the closed form stands for: the sign from S + s e, the gap from S - s e."""
    sample = simulated(60, seed=3, sharpen=2.0)
    facts, noise = facts_of(sample, n_bins=1), np.random.default_rng(0).normal(size=400_000)
    total = (facts.right - facts.confidence).sum()
    error = np.sqrt(((facts.right - facts.confidence) ** 2).sum())
    halves = (total - error * noise) * np.sign(total + error * noise)
    assert score(sample, "ece_debiased", n_bins=1) == pytest.approx(halves.mean() / 60, abs=5e-4)


def test_a_bin_holds_its_lower_edge_and_the_last_one_also_1() -> None:
    edges = np.array([float(f"0.{k * 4:02d}") for k in range(25)] + [1.0])
    assert metrics.equal_width_bins(edges, n_bins=25).tolist() == [*range(25), 24]
    assert metrics.equal_width_bins(np.nextafter(edges[1:], 0), n_bins=25).tolist() == list(range(25))


def test_one_and_just_below_one_share_the_last_bin() -> None:
    sure = predictions([[1.0, 0.0], [0.98, 0.02]], [1, 0])
    assert score(sure, "ece") == pytest.approx(abs(-1.0 + 0.02) / 2)


def test_a_sure_wrong_answer_costs_27_6_and_is_counted() -> None:
    result = measure(predictions([[1.0, 0.0], [0.999, 0.001]], [1, 1]), n_boot=10)
    assert result.n_zero_answer == 1
    assert result.scores["nll"].value == pytest.approx((-math.log(1e-12) - math.log(0.001)) / 2)
    assert result.scores["nll_top1"].value == pytest.approx((-math.log(1e-12) - math.log(0.001)) / 2, rel=1e-4)


def test_perfect_predictions_have_no_error_and_no_auroc() -> None:
    scores = measure(predictions([[1.0, 0.0], [0.0, 0.0, 1.0]], [0, 2]), n_boot=20).scores
    assert scores["accuracy"].value == 1
    for name in ("ece", "cwece", "brier", "nll", "brier_top1", "ece_debiased", "ece_adaptive", "aurc"):
        assert (scores[name].value, scores[name].low, scores[name].high) == (0, 0, 0), name
    assert math.isnan(scores["auroc"].value)
    assert str(scores["auroc"]) == "n/a"
    assert str(scores["accuracy"]) == "1.000 [1.000, 1.000]"


# --- properties -------------------------------------------------------------------------------------------------------


@given(quizzes(), st.randoms())
@settings(deadline=None, max_examples=60)
def test_the_order_of_questions_does_not_matter(drawn: Quiz, random: st.randoms) -> None:
    quiz = predictions(*drawn)
    order = list(range(len(quiz)))
    random.shuffle(order)
    for name in METRICS:
        assert score(picked(quiz, order), name) == pytest.approx(score(quiz, name), abs=1e-12, nan_ok=True), name


@given(quizzes(), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_a_resample_scores_as_the_questions_that_it_repeats(drawn: Quiz, seed: int) -> None:
    """The weights of the bootstrap are exact, and not an approximation. Adaptive bins stay those of the sample."""
    quiz = predictions(*drawn)
    weights = next(iter_weights(len(quiz), n_boot=1, seed=seed))
    repeated = picked(quiz, np.repeat(np.arange(len(quiz)), weights[0].astype(int)).tolist())
    assert len(repeated) == len(quiz)
    for name in METRICS.keys() - {"ece_adaptive"}:
        by_weight = METRICS[name].compute(facts_of(quiz), weights)[0]
        assert by_weight == pytest.approx(score(repeated, name), abs=1e-9, nan_ok=True), name


@given(quizzes())
@settings(deadline=None, max_examples=60)
def test_ranges(drawn: Quiz) -> None:
    quiz = predictions(*drawn)
    limit = {"brier": 2.0, "nll": -math.log(1e-12), "nll_top1": -math.log(1e-12) + 1e-3}
    for name in METRICS:
        low = -1.0 if name == "ece_debiased" else 0.0
        value = score(quiz, name)
        assert (name == "auroc" and math.isnan(value)) or low <= value <= limit.get(name, 1.0) + 1e-12, name
    assert score(quiz, "ece_debiased") <= score(quiz, "ece") + 1e-12
    assert score(quiz, "ece_adaptive", n_bins=1) == pytest.approx(score(quiz, "ece", n_bins=1))
    # fewer bins let gaps of opposite sign cancel; 5 divides 25
    assert score(quiz, "ece", n_bins=5) <= score(quiz, "ece") + 1e-12


@given(quizzes())
@settings(deadline=None, max_examples=60)
def test_options_of_probability_0_change_nothing_but_the_number_of_rows(drawn: Quiz) -> None:
    quiz = predictions(*drawn)
    rows = [quiz.probs[quiz.options.of(i)].tolist() for i in range(len(quiz))]
    padded = predictions([row + [0.0] * (6 - len(row)) for row in rows], quiz.answers.tolist())
    for name in METRICS.keys() - {"cwece"}:
        assert score(padded, name) == pytest.approx(score(quiz, name), abs=1e-12, nan_ok=True), name
    assert score(padded, "cwece") * len(padded.probs) == pytest.approx(score(quiz, "cwece") * len(quiz.probs))


@given(quizzes())
@settings(deadline=None, max_examples=60)
def test_cwece_is_the_mean_over_classes_weighted_by_their_questions(drawn: Quiz) -> None:
    quiz = predictions(*drawn)

    def ece_of(probs: list[float], hits: list[int]) -> float:
        bins = [min(24, sum(p >= k / 25 for k in range(1, 26))) for p in probs]
        gaps = [abs(sum(h - p for h, p, b in zip(hits, probs, bins, strict=True) if b == k)) for k in range(25)]
        return sum(gaps) / len(probs)

    classes: dict[int, tuple[list[float], list[int]]] = {}
    for i, answer in enumerate(quiz.answers):
        for j, p in enumerate(quiz.probs[quiz.options.of(i)]):
            probs, hits = classes.setdefault(j, ([], []))
            probs.append(float(p))
            hits.append(int(j == answer))
    expected = sum(len(p) * ece_of(p, h) for p, h in classes.values()) / sum(len(p) for p, _ in classes.values())
    assert score(quiz, "cwece") == pytest.approx(expected, abs=1e-12)


@given(quizzes(), st.booleans())
@settings(deadline=None, max_examples=60)
def test_the_reliability_diagram_shows_the_bins_of_the_ece(drawn: Quiz, adaptive: bool) -> None:
    quiz = predictions(*drawn)
    diagram = reliability(quiz, adaptive=adaptive)
    from_diagram = (diagram.count * np.abs(diagram.accuracy - diagram.confidence)).sum() / len(quiz)
    assert from_diagram == pytest.approx(score(quiz, "ece_adaptive" if adaptive else "ece"), abs=1e-12)
    assert diagram.count.sum() == len(quiz)
    assert diagram.count.min() > 0
    assert (diagram.low - 1e-12 <= diagram.confidence).all()
    assert (diagram.confidence <= diagram.high + 1e-12).all()
    assert (diagram.high[:-1] <= diagram.low[1:]).all()


@given(quizzes())
@settings(deadline=None, max_examples=60)
def test_aurc_is_the_mean_of_the_risk_coverage_curve(drawn: Quiz) -> None:
    quiz = predictions(*drawn)
    curve = risk_coverage(quiz)
    assert curve.risk.mean() == pytest.approx(score(quiz, "aurc"), abs=1e-12)
    assert curve.risk[-1] == pytest.approx(1 - score(quiz, "accuracy"), abs=1e-12)
    assert curve.coverage[-1] == 1
    assert (np.diff(curve.threshold) <= 0).all()


def test_questions_of_equal_confidence_make_a_flat_risk_curve() -> None:
    tied = predictions([[0.5, 0.5]] * 4, [0, 1, 1, 1])
    assert risk_coverage(tied).risk.tolist() == [0.75] * 4
    assert score(tied, "aurc") == pytest.approx(0.75)
    assert score(tied, "auroc") == 0.5


# --- agreement with others --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample() -> tuple[Predictions, np.ndarray, np.ndarray]:
    made = simulated(700, seed=1, sharpen=1.4, n_options=5)
    return made, made.probs.reshape(700, 5), made.answers


def test_nll_brier_and_auroc_agree_with_scikit_learn(sample: tuple[Predictions, np.ndarray, np.ndarray]) -> None:
    from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

    made, probs, answers = sample
    right, sure = probs.argmax(1) == answers, probs.max(1)
    assert score(made, "nll") == pytest.approx(log_loss(answers, probs, labels=range(5)))
    # option by option: releases before 1.7 know no Brier score of several classes
    assert score(made, "brier") == pytest.approx(sum(brier_score_loss(answers == k, probs[:, k]) for k in range(5)))
    assert score(made, "nll_top1") == pytest.approx(log_loss(right, sure))
    assert score(made, "brier_top1") == pytest.approx(brier_score_loss(right, sure))
    assert score(made, "auroc") == pytest.approx(roc_auc_score(right, sure))
    tied = np.clip(np.round(sure, 1), 0.5, 1.0)
    coarse = predictions(np.stack([tied, 1 - tied], axis=1).tolist(), (~right).astype(int).tolist())
    assert score(coarse, "auroc") == pytest.approx(roc_auc_score(right, tied))


def test_ece_agrees_with_torchmetrics_which_gives_1_a_bin_of_its_own(
    sample: tuple[Predictions, np.ndarray, np.ndarray],
) -> None:
    import torch
    from torchmetrics.classification import MulticlassCalibrationError

    made, probs, answers = sample
    theirs = MulticlassCalibrationError(num_classes=5, n_bins=25, norm="l1")
    assert score(made, "ece") == pytest.approx(float(theirs(torch.tensor(probs), torch.tensor(answers))), abs=1e-6)
    sure = [[1.0, 0.0], [0.98, 0.02]]
    split = MulticlassCalibrationError(num_classes=2, n_bins=25, norm="l1")(torch.tensor(sure), torch.tensor([1, 0]))
    assert float(split) == pytest.approx((1.0 + 0.02) / 2)
    assert score(predictions(sure, [1, 0]), "ece") == pytest.approx((1.0 - 0.02) / 2)


def test_ece_agrees_with_netcal_also_at_1(sample: tuple[Predictions, np.ndarray, np.ndarray]) -> None:
    from netcal.metrics import ECE

    made, probs, answers = sample
    assert score(made, "ece") == pytest.approx(float(ECE(25).measure(probs, answers)))
    sure = [[1.0, 0.0, 0.0], [0.98, 0.02, 0.0], [0.1, 0.7, 0.2]]
    # netcal takes answers of two kinds for a binary problem, so all three occur
    theirs = float(ECE(25).measure(np.array(sure), np.array([1, 0, 2])))
    assert theirs == pytest.approx((abs(-1.0 + 0.02) + 0.7) / 3)
    assert score(predictions(sure, [1, 0, 2]), "ece") == pytest.approx(theirs)


# --- intervals and the noise floor, by simulation ---------------------------------------------------------------------


def test_resamples_draw_as_many_questions_as_there_are_in_any_chunking(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.concatenate(list(iter_weights(8, n_boot=50, seed=0)))
    assert whole.shape == (50, 8)
    assert (whole.sum(1) == 8).all()
    assert whole.std(axis=0).min() > 0.5  # questions are drawn independently: counts have a variance of 7 / 8
    monkeypatch.setattr(metrics, "CELLS", 56)
    chunks = list(iter_weights(8, n_boot=50, seed=0))
    assert [len(chunk) for chunk in chunks] == [7] * 7 + [1]
    assert (np.concatenate(chunks) == whole).all()


def test_questions_of_one_group_are_drawn_together() -> None:
    groups = ("a", "b", "a", "c", "b", "a")
    whole = np.concatenate(list(iter_weights(6, n_boot=200, seed=0, groups=groups)))
    assert (whole[:, 0] == whole[:, 2]).all()
    assert (whole[:, 0] == whole[:, 5]).all()
    assert (whole[:, 1] == whole[:, 4]).all()
    assert (whole[:, [0, 1, 3]].sum(axis=1) == 3).all()  # three groups, three draws
    assert not (whole[:, 0] == whole[:, 1]).all()


@given(quizzes(), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_a_resample_of_groups_scores_as_the_questions_that_it_repeats(drawn: Quiz, seed: int) -> None:
    quiz = predictions(*drawn)
    groups = [f"article {i // 3}" for i in range(len(quiz))]
    weights = next(iter_weights(len(quiz), n_boot=1, seed=seed, groups=groups))
    repeated = picked(quiz, np.repeat(np.arange(len(quiz)), weights[0].astype(int)).tolist())
    for name in METRICS.keys() - {"ece_adaptive"}:
        by_weight = METRICS[name].compute(facts_of(quiz), weights)[0]
        assert by_weight == pytest.approx(score(repeated, name), abs=1e-9, nan_ok=True), name


def test_four_copies_of_each_question_say_no_more_than_one() -> None:
    """Taken for independent, they would halve the interval."""
    alone = simulated(200, seed=0)
    copies = picked(alone, np.repeat(np.arange(200), 4).tolist())
    grouped = replace(copies, groups=tuple(f"article {i // 4}" for i in range(800)))
    width = {
        name: (found := measure(quiz, n_boot=2000).scores["brier"]).high - found.low
        for name, quiz in {"alone": alone, "copies": copies, "grouped": grouped}.items()
    }
    assert width["grouped"] == pytest.approx(width["alone"], rel=0.1)
    assert width["copies"] == pytest.approx(width["alone"] / 2, rel=0.1)


def test_the_seed_decides_the_interval_and_nothing_else() -> None:
    quiz = simulated(80, seed=0)
    first, again, other = (measure(quiz, n_boot=50, seed=seed).scores["brier"] for seed in (0, 0, 1))
    assert first == again
    assert first.value == other.value
    assert first.low != other.low


def test_a_calibrated_accuracy_interval_covers_the_truth_19_times_in_20() -> None:
    truth = score(simulated(200_000, seed=999), "accuracy")
    scores = [measure(simulated(150, seed=s), n_boot=200).scores["accuracy"] for s in range(200)]
    covered = np.mean([s.low <= truth <= s.high for s in scores])
    assert 0.89 <= covered <= 0.99
    assert np.mean([s.high - s.low for s in scores]) == pytest.approx(2 * 1.96 * np.sqrt(0.614 * 0.386 / 150), rel=0.05)


def test_ece_intervals_contain_their_estimate_where_percentiles_miss_it() -> None:
    missed = 0
    for seed in range(40):
        quiz = simulated(300, seed=seed)
        for name, s in measure(quiz, n_boot=100).scores.items():
            assert s.low <= s.value <= s.high, name
            assert s.low >= min(s.value, 0), name
            if METRICS[name].kind == "gap" and s.low > 0:
                assert 1 / 3 < (s.high - s.value) / (s.value - s.low) < 3, name  # around the estimate, not above it
        draws = METRICS["ece"].compute(facts_of(quiz), next(iter_weights(300, n_boot=100, seed=0)))
        missed += score(quiz, "ece") < np.quantile(draws, 0.025)
    assert missed >= 8  # about a third of 40: without the shift this is what a reader would see


def test_only_gaps_are_shifted_onto_their_estimate() -> None:
    draws = np.array([0.5, np.nan, 0.2, 0.3])
    assert metrics.centred(0.1, draws, kind="gap") == pytest.approx([0.3, 0.0, 0.1])
    assert metrics.centred(0.1, draws, kind="rank").tolist() == [0.5, 0.2, 0.3]
    shifted = metrics.score_of(0.1, np.array([0.2, 0.3, 0.9]), kind="gap")
    assert (shifted.low, shifted.value) == pytest.approx((0.005, 0.1))


def test_an_auroc_that_no_resample_has_keeps_its_value_without_an_interval() -> None:
    alone = metrics.score_of(0.5, np.array([np.nan, np.nan]), kind="rank")
    assert alone.value == 0.5
    assert math.isnan(alone.low)
    assert math.isnan(alone.high)


def test_ece_intervals_cover_the_mean_of_the_figure_itself() -> None:
    scores = [measure(simulated(200, seed=s, sharpen=2.0), n_boot=100).scores["ece"] for s in range(100)]
    mean = np.mean([s.value for s in scores])
    assert np.mean([s.low <= mean <= s.high for s in scores]) >= 0.88
    assert np.mean([s.high - s.low for s in scores]) == pytest.approx(4 * np.std([s.value for s in scores]), rel=0.25)


def test_the_floor_is_8_5_points_at_300_questions_and_half_of_it_at_1200() -> None:
    small, large = (measure(simulated(n, seed=5), n_boot=200).ece_floor for n in (300, 1200))
    assert small == pytest.approx(0.085, abs=0.007)
    assert large == pytest.approx(0.043, abs=0.004)


def test_the_floor_is_the_ece_of_calibrated_predictions_whatever_the_sharpness_of_the_model() -> None:
    shown = np.mean([score(simulated(300, seed=s), "ece") for s in range(200)])
    floors = [metrics.ece_floor(facts_of(simulated(300, seed=s)), n_simulations=50, seed=0) for s in range(20)]
    assert np.mean(floors) == pytest.approx(shown, abs=0.004)
    wrong_all_the_time = predictions([[0.8, 0.2]] * 100, [1] * 100)
    # one bin of 100 with confidence 0.8: the mean absolute deviation of Binomial(100, 0.8) / 100
    assert metrics.ece_floor(facts_of(wrong_all_the_time), n_simulations=4000, seed=0) == pytest.approx(
        np.sqrt(2 / np.pi) * 0.04, rel=0.04
    )


def test_debiased_ece_is_0_on_average_when_calibrated_and_near_the_truth_when_far_from_it() -> None:
    calibrated = [score(simulated(300, seed=s), "ece_debiased") for s in range(200)]
    assert abs(np.mean(calibrated)) < 0.006  # the plain ECE is at 0.083
    truth = score(simulated(200_000, seed=999, sharpen=3.0), "ece")
    far = np.mean([score(simulated(1200, seed=s, sharpen=3.0), "ece_debiased") for s in range(50)])
    assert truth - 0.02 < far <= truth + 0.004


# --- records and refusals ---------------------------------------------------------------------------------------------


def test_metrics_survive_json_also_without_an_auroc() -> None:
    for answers in ([0, 1, 1, 0], [0, 0, 1, 0]):
        quiz = predictions([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.1, 0.9], [0.5, 0.5]], answers)
        result = measure(quiz, n_boot=20, seed=3, n_bins=10)
        text = json.dumps(result.to_dict(), allow_nan=False)
        again = Metrics.from_dict(json.loads(text))
        assert json.dumps(again.to_dict()) == text
        assert again.scores["ece"] == result.scores["ece"]
        assert (again.method, again.n_questions, again.n_bins, again.n_boot, again.seed) == ("toy", 4, 10, 20, 3)
    assert math.isnan(again.scores["auroc"].low)


def test_a_file_that_is_no_record_of_metrics_is_refused_with_the_keys() -> None:
    data = measure(HAND, n_boot=5).to_dict()
    del data["seed"]
    with pytest.raises(CoralError, match=r"extra, seed missing or unknown"):
        Metrics.from_dict(data | {"extra": 1})


def test_questions_without_an_answer_are_refused_by_count_and_first_id() -> None:
    quiz = predictions([[0.5, 0.5]] * 3, [0, UNKNOWN, UNKNOWN])
    for refused in (measure, reliability, risk_coverage):
        with pytest.raises(CoralError, match=r"2 of 3 questions .*first: 'q1'.*leave them out"):
            refused(quiz)


def test_no_questions_no_bins_no_resamples_and_unknown_metrics_are_refused() -> None:
    with pytest.raises(CoralError, match=r"'toy' on quiz test hold no question"):
        measure(predictions([], []))
    with pytest.raises(CoralError, match=r"n_bins must be at least 1. Got 0"):
        measure(HAND, n_bins=0)
    with pytest.raises(CoralError, match=r"n_boot must be at least 1. Got 0"):
        measure(HAND, n_boot=0)
    with pytest.raises(CoralError, match=r"Unknown metric 'eec'. Did you mean 'ece'"):
        score(HAND, "eec")


def test_the_registry_says_which_way_is_better() -> None:
    assert {name for name, metric in METRICS.items() if metric.higher_is_better} == {"accuracy", "auroc"}
    assert list(measure(HAND, n_boot=5).scores) == list(METRICS)
