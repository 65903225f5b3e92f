"""Scores of Predictions as fractions, each with a 95 % bootstrap interval over questions. Never prints, never plots.

A metric is a function of the facts about the questions and of weights, one row per resample. A row of ones gives the
value; rows of multinomial counts give its bootstrap: no resample is ever a step of a Python loop. Questions that
belong together (those of one article) are drawn together: taken for independent, they would make intervals too narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from coral_lens.errors import CoralError, nearest
from coral_lens.metrics.decisions import kl, level_error, ranked_probability
from coral_lens.metrics.display import Shown, Table
from coral_lens.metrics.facts import SMALLEST as SMALLEST
from coral_lens.metrics.facts import Facts as Facts
from coral_lens.metrics.facts import Values as Values
from coral_lens.metrics.facts import Weights as Weights
from coral_lens.metrics.facts import facts_of as facts_of
from coral_lens.metrics.facts import mean_over, most_sure_first
from coral_lens.metrics.selective import risk_at_half
from coral_lens.metrics.smooth import smooth_ece
from coral_lens.records import Predictions

CELLS = 2**20
"""Weights held at a time, resamples times questions: bounds memory, and keeps the working set near the cache."""


# --- means over questions ---------------------------------------------------------------------------------------------


def _accuracy(facts: Facts, weights: Weights) -> Values:
    return mean_over(facts.right, weights)


def _brier(facts: Facts, weights: Weights) -> Values:
    """Squared error summed over options, so between 0 and 2: the paper's Brier equation."""
    return mean_over(facts.per_question((facts.probs - facts.target) ** 2), weights)


def _nll(facts: Facts, weights: Weights) -> Values:
    """Cross-entropy of the answers: where they are soft, the mean over their shares."""
    return mean_over(facts.per_question(-facts.target * np.log(np.maximum(facts.probs, SMALLEST))), weights)


def _brier_top1(facts: Facts, weights: Weights) -> Values:
    """Squared error of the confidence against right or wrong, between 0 and 1: never to be mixed with `brier`."""
    return mean_over(facts.hit * (1 - facts.confidence) ** 2 + (1 - facts.hit) * facts.confidence**2, weights)


def _nll_top1(facts: Facts, weights: Weights) -> Values:
    """Log loss of the confidence against right or wrong; clipped on both sides, for a sure answer that is wrong."""
    sure = np.clip(facts.confidence, SMALLEST, 1 - SMALLEST)
    return mean_over(-facts.hit * np.log(sure) - (1 - facts.hit) * np.log(1 - sure), weights)


# --- gaps between confidence and accuracy, by bin ---------------------------------------------------------------------


def equal_width_bins(probs: Float[np.ndarray, " item"], *, n_bins: int) -> Int[np.ndarray, " item"]:
    """Return the bin [k / n_bins, (k + 1) / n_bins) of each probability; the last bin includes 1.0."""
    edges = np.arange(n_bins + 1) / n_bins
    return np.clip(np.searchsorted(edges, probs, side="right") - 1, 0, n_bins - 1)


def equal_mass_bins(probs: Float[np.ndarray, " item"], *, n_bins: int) -> Int[np.ndarray, " item"]:
    """Return the quantile bin of each probability. Equal probabilities share a bin, whatever the order of questions."""
    rank = np.searchsorted(np.sort(probs), probs, side="left")
    return rank * n_bins // len(probs)


def _sums(
    cells: Int[np.ndarray, " item"],
    question: Int[np.ndarray, " item"],
    values: Float[np.ndarray, " item"],
    weights: Weights,
) -> Float[np.ndarray, "boot cell"]:
    """Return for each resample the sum of the values in each cell, weighted as the questions they belong to."""
    from scipy.sparse import csr_array

    table = csr_array((values, (cells, question)), shape=(int(cells.max()) + 1, weights.shape[1]))
    # not a dense product: BLAS would start threads for a thin matrix, which cost far more than they save on a busy machine
    sums: Float[np.ndarray, "boot cell"] = (table @ weights.T).T
    return sums


def _gap(facts: Facts, bins: Int[np.ndarray, " question"], weights: Weights) -> Values:
    # sum_b |S_b| / N * |acc - conf| is |sum over S_b of (right - confidence)| / N: nothing to divide by in empty bins
    sums = _sums(bins, np.arange(len(bins)), facts.hit - facts.confidence, weights)
    gaps: Values = np.abs(sums).sum(axis=1) / weights.sum(axis=1)
    return gaps


def _ece(facts: Facts, weights: Weights) -> Values:
    return _gap(facts, equal_width_bins(facts.confidence, n_bins=facts.n_bins), weights)


def _ece_adaptive(facts: Facts, weights: Weights) -> Values:
    """ECE over bins of equal mass. The bins are those of the sample: resamples do not move them."""
    return _gap(facts, equal_mass_bins(facts.confidence, n_bins=facts.n_bins), weights)


def _ece_debiased(facts: Facts, weights: Weights) -> Values:
    """ECE with the sign of each bin's gap learned from one half of the sample and the gap measured on the other.

    Learning and measuring on the same questions is what biases ECE upwards. Keeping them apart, as the cross-validated
    estimators of Berta, Braun, Holzmüller, Bach and Jordan (2026, arXiv:2602.24230) do, gives a mean of 0 for a
    calibrated model and never above the true binned error. Here it is done without a random split, in the normal
    approximation: the halves of a sum S of standard error s are S + s e and S - s e, with e normal, and the mean of
    (S - s e) sign(S + s e) is S (2 Phi(S / s) - 1) - 2 s phi(S / s). (Kumar et al., 2019, debias the squared error; the
    root of that, clipped at 0, is biased upwards again.) Traps: it reads low where the true error is below the noise
    floor, and may fall slightly below 0, where it stays, because clipping would bring the bias back.
    """
    from scipy.special import ndtr

    bins, question = equal_width_bins(facts.confidence, n_bins=facts.n_bins), np.arange(len(facts.right))
    signed = facts.hit - facts.confidence
    total = _sums(bins, question, signed, weights)
    error = np.sqrt(_sums(bins, question, signed**2, weights))
    z = total / np.maximum(error, SMALLEST)
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    debiased: Values = (total * (2 * ndtr(z) - 1) - 2 * error * density).sum(axis=1) / weights.sum(axis=1)
    return debiased


def _cwece(facts: Facts, weights: Weights) -> Values:
    """The mean of the classes' ECE_c, each in proportion to the number of questions that have the class.

    Weighting by N_c cancels the N_c below ECE_c, so the sum of all |gaps| is divided by the number of rows. Where
    every question has n options this is the paper's (1/n) sum_c ECE_c.
    """
    cells = facts.option * facts.n_bins + equal_width_bins(facts.probs, n_bins=facts.n_bins)
    sums = _sums(cells, facts.question, facts.target - facts.probs, weights)
    gaps: Values = np.abs(sums).sum(axis=1) / (weights @ facts.sizes)
    return gaps


# --- does confidence rank right answers before wrong ones -------------------------------------------------------------


def _auroc(facts: Facts, weights: Weights) -> Values:
    """Chance that a right answer is surer than a wrong one, ties counting half; nan if all are right or all wrong."""
    everything, wrong = most_sure_first(facts, weights)
    n_wrong = wrong.sum(axis=1)
    less_sure = n_wrong[:, None] - np.cumsum(wrong, axis=1) + wrong / 2
    won = ((everything - wrong) * less_sure).sum(axis=1)
    pairs = n_wrong * (weights.sum(axis=1) - n_wrong)
    return np.where(pairs > 0, won / np.maximum(pairs, 1), np.nan)


def _aurc(facts: Facts, weights: Weights) -> Values:
    """Mean over k of the error rate among the k surest questions (Geifman and El-Yaniv, 2017).

    Questions of one confidence come in random order, and this is the mean over it, in closed form: from k = a to b,
    errors grow from e by the rate r, and the sum of (e + (k - a) r) / k is (b - a) r + (e - a r)(H_b - H_a).
    """
    everything, wrong = most_sure_first(facts, weights)
    ends, errors = np.cumsum(everything, axis=1), np.cumsum(wrong, axis=1)
    harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, ends.max() + 1))])
    steps = np.diff(harmonic[ends.astype(np.int64)], prepend=0.0, axis=1)
    rate = wrong / np.maximum(everything, 1)
    risks = wrong + (errors - wrong - (ends - everything) * rate) * steps
    areas: Values = risks.sum(axis=1) / ends[:, -1]
    return areas


# --- the registry -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Metric:
    """How a metric is shown, compared and computed."""

    label: str
    higher_is_better: bool
    kind: Literal["mean", "gap", "rank"]
    """`mean` over questions; `gap` between confidence and accuracy, whose bootstrap is biased; `rank` of confidence."""
    compute: Callable[[Facts, Weights], Values]
    applies: Callable[[Predictions], bool] = lambda _: True
    """Whether it means something for these predictions."""


METRICS: dict[str, Metric] = {
    "accuracy": Metric("Accuracy", True, "mean", _accuracy),
    "ece": Metric("ECE", False, "gap", _ece),
    "cwece": Metric("cwECE", False, "gap", _cwece),
    "brier": Metric("Brier", False, "mean", _brier),
    "nll": Metric("NLL", False, "mean", _nll),
    "brier_top1": Metric("Brier (top-1)", False, "mean", _brier_top1),
    "nll_top1": Metric("NLL (top-1)", False, "mean", _nll_top1),
    "ece_debiased": Metric("ECE (debiased)", False, "gap", _ece_debiased),
    "ece_adaptive": Metric("ECE (adaptive)", False, "gap", _ece_adaptive),
    "auroc": Metric("AUROC", True, "rank", _auroc),
    "aurc": Metric("AURC", False, "rank", _aurc),
}

"""The metrics of every table."""
MORE: dict[str, Metric] = {
    "kl": Metric("KL", False, "mean", kl, lambda p: p.targets is not None),
    "rps": Metric("RPS", False, "mean", ranked_probability, lambda p: p.ordered is not None),
    "mae": Metric("MAE", False, "mean", level_error, lambda p: p.ordered is not None),
    "risk_half": Metric("Risk at 50 %", False, "rank", risk_at_half, lambda _: False),
    "smooth_ece": Metric("smooth ECE", False, "gap", smooth_ece, lambda _: False),
}
"""Metrics of soft answers and of scores, which are measured where there are such; and those that are measured when named."""


def metric_named(name: str) -> Metric:
    """Return the metric, or refuse an unknown name with the nearest known one."""
    known = METRICS | MORE
    if name not in known:
        raise CoralError(f"Unknown metric {name!r}.{nearest(name, known)} Known: {', '.join(known)}.")
    return known[name]


def metrics_for(predictions: Predictions, more: Sequence[str] = ()) -> dict[str, Metric]:
    """Return the metrics of every table, those that predictions with soft answers or levels also have, and others by name."""
    return METRICS | {name: m for name, m in MORE.items() if m.applies(predictions) or name in more}


def score(predictions: Predictions, metric: str, *, n_bins: int = 25) -> float:
    """Return one metric's value without an interval: cheap enough to choose a layer or a strength by."""
    facts = facts_of(predictions, n_bins=n_bins)
    return float(metric_named(metric).compute(facts, np.ones((1, len(predictions))))[0])


# --- intervals --------------------------------------------------------------------------------------------------------


def _chunks(n_boot: int, n_questions: int) -> list[int]:
    size = max(1, CELLS // n_questions)
    return [min(size, n_boot - done) for done in range(0, n_boot, size)]


def iter_weights(n_questions: int, *, n_boot: int, seed: int, groups: Sequence[str] = ()) -> Iterator[Weights]:
    """Yield, in chunks, how often each resample drew each question. The same arguments give the same resamples.

    With groups, whole groups are drawn, as many as there are, and all questions of a group come along each time.
    """
    if n_boot < 1:
        raise CoralError(f"n_boot must be at least 1. Got {n_boot} instead.")
    rng, member, n = np.random.default_rng(seed), np.arange(n_questions), n_questions
    if groups:
        names, member = np.unique(np.asarray(groups), return_inverse=True)
        n = len(names)
    for rows in _chunks(n_boot, n_questions):
        drawn = rng.integers(n, size=(rows, n)) + n * np.arange(rows)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n)
        yield counts[:, member].astype(np.float64)


def centred(value: float, draws: Values, *, kind: str) -> Float[np.ndarray, " kept"]:
    """Return the bootstrap values that exist, and for a `gap` metric shift them so that their median is the value.

    A resample adds noise of its own to noise that the absolute value already counts as error. So the bootstrap of an
    ECE lies above the estimate, and a plain percentile interval can miss its own estimate.
    """
    kept: Values = draws[~np.isnan(draws)]
    return kept - np.median(kept) + value if kind == "gap" else kept


@dataclass(frozen=True, slots=True)
class Score:
    """A value with its 95 % interval; all nan where the metric does not exist: the AUROC of all right or all wrong."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return "n/a" if np.isnan(self.value) else f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def score_of(value: float, draws: Values, *, kind: str) -> Score:
    """Return the value with its percentile interval; around a `gap` metric, one shifted onto it and never below 0.

    Trap: the interval of an ECE says how far the figure itself would move with other questions, as many as these. It
    does not say that the true error lies within: the figure is biased upwards, see `Metrics.ece_floor`.
    """
    kept = centred(value, draws, kind=kind)
    if np.isnan(value) or not len(kept):
        return Score(value, float("nan"), float("nan"))
    low, high = np.quantile(kept, [0.025, 0.975])
    if kind == "gap":
        low = max(low, 0.0)
    return Score(value, float(min(low, value)), float(max(high, value)))


@dataclass(frozen=True, slots=True, repr=False)
class Metrics(Shown):
    """Everything that a table says about one set of predictions, and what it was computed from."""

    method: str
    model: str
    task: str
    split: str
    n_questions: int
    n_zero_answer: int
    """Questions whose correct option has probability 0: each costs NLL 27.6 by clipping, without it infinity."""
    ece_floor: float
    """The ECE that a perfectly calibrated model with these very confidences would show on average, by simulation."""
    n_bins: int
    n_boot: int
    seed: int
    scores: dict[str, Score]
    """By the names in METRICS."""

    def table(self) -> Table:
        """Return every score with its interval."""
        where = f"{self.task} {self.split}".rstrip()
        rows = tuple((name, s.value, s.low, s.high) for name, s in self.scores.items())
        floor = f"A perfectly calibrated model with these confidences would show an ECE of {self.ece_floor:.4g}."
        title = f"{self.method} on {where}: {self.n_questions} questions, 95 % intervals"
        return Table(title, ("metric", "value", "low", "high"), rows, (floor,))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; nan becomes None, because JSON has no nan."""
        scores = {
            name: {part: None if np.isnan(x) else x for part, x in asdict(s).items()} for name, s in self.scores.items()
        }
        return asdict(self) | {"scores": scores}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Metrics:
        """Return what `to_dict` wrote."""
        if wrong := {f.name for f in fields(cls)} ^ set(data):
            raise CoralError(f"Not a record of metrics: {', '.join(sorted(wrong))} missing or unknown; evaluate again.")
        scores = {
            name: Score(**{part: float("nan") if x is None else x for part, x in s.items()})
            for name, s in data["scores"].items()
        }
        return cls(**{**data, "scores": scores})


def ece_floor(facts: Facts, *, n_simulations: int, seed: int) -> float:
    """Return the mean ECE when each question is right with a probability of exactly its confidence."""
    rng, sure = np.random.default_rng(seed), facts.confidence
    bins, total = equal_width_bins(sure, n_bins=facts.n_bins), 0.0
    for rows in _chunks(n_simulations, len(sure)):
        signed = (rng.random((rows, len(sure))) < sure) - sure
        total += float(np.abs(_sums(bins, np.arange(len(sure)), np.ones(len(sure)), signed)).sum())
    return total / (n_simulations * len(sure))


def measure(
    predictions: Predictions, *, n_boot: int = 1000, seed: int = 0, n_bins: int = 25, more: Sequence[str] = ()
) -> Metrics:
    """Return every metric with its interval, the ECE floor and the number of answers of probability 0.

    Soft answers and scores have metrics of their own; `more` names others that are not in every table, such as `smooth_ece`.
    """
    facts, metrics = facts_of(predictions, n_bins=n_bins), metrics_for(predictions, more)
    draws: dict[str, list[Values]] = {name: [] for name in metrics}
    for weights in iter_weights(len(predictions), n_boot=n_boot, seed=seed, groups=predictions.groups):
        for name, metric in metrics.items():
            draws[name].append(metric.compute(facts, weights))
    values = {name: score(predictions, name, n_bins=n_bins) for name in metrics}
    return Metrics(
        method=predictions.method,
        model=predictions.model,
        task=predictions.task,
        split=predictions.split,
        n_questions=len(predictions),
        n_zero_answer=int((facts.probs[facts.target == 1] <= 0).sum()),
        ece_floor=ece_floor(facts, n_simulations=n_boot, seed=seed),
        n_bins=n_bins,
        n_boot=n_boot,
        seed=seed,
        scores={k: score_of(values[k], np.concatenate(draws[k]), kind=m.kind) for k, m in metrics.items()},
    )
