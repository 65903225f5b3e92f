"""What a run's confidence is worth, in numbers: reliability, risk at a coverage, scores by subject, and position bias.

It reads predictions alone, and therefore works on any run and on anyone's lm-eval logs. Every share has its 95 % interval.
Never draws.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from jaxtyping import Bool, Float, Int

from coral_lens.metrics.curves import Reliability, reliability
from coral_lens.metrics.scores import Score, Values, equal_width_bins, facts_of, iter_weights, score_of
from coral_lens.ragged import Options
from coral_lens.records import TASKS_OF_FAMILY, Predictions, task_family
from coral_lens.report.runs import Evaluation, Run
from coral_lens.report.tables.run import in_order, subject_of

N_BINS = 10
"""Bins of a reliability diagram: wide enough that a bin of a few hundred questions says something. ECE itself uses 25."""
COVERAGES = np.arange(1, 21) / 20
N_BOOT = 1000


def wilson(right: Float[np.ndarray, " bin"], count: Int[np.ndarray, " bin"]) -> tuple[np.ndarray, np.ndarray]:
    """Return the 95 % Wilson interval of a share; sensible even for 0 of 3."""
    z, share = 1.959964, right / count
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return np.maximum(middle - half, 0.0), np.minimum(middle + half, 1.0)


def wilson_score(n_right: float, n: int) -> Score:
    """Return a share with its Wilson interval."""
    low, high = wilson(np.array([float(n_right)]), np.array([n]))
    return Score(n_right / n, float(low[0]), float(high[0]))


# --- test sets and methods ------------------------------------------------------------------------------------------------


def pooled(run: Run) -> list[Evaluation]:
    """Return the test sets, with families of them (MMLU's subjects, logged one by one) taken together."""
    families: dict[tuple[str, ...], list[Evaluation]] = {}
    for e in in_order(run):
        families.setdefault((task_family(e.name), *e.predictions), []).append(e)
    evaluations = []
    for (family, *_), members in families.items():
        large = len(members) >= TASKS_OF_FAMILY
        evaluations += [union_of(members, f"{family} ({len(members)} tasks)")] if large else members
    return evaluations


def union_of(members: Sequence[Evaluation], name: str) -> Evaluation:
    """Return several test sets of the same methods as one."""
    questions = tuple(q for e in members for q in e.questions)
    predictions = {
        method: end_to_end([e.predictions[method] for e in members], name) for method in members[0].predictions
    }
    return Evaluation(name, questions, predictions, all(e.trained_on for e in members))


def end_to_end(parts: Sequence[Predictions], task: str) -> Predictions:
    """Return predictions one after the other."""
    first = parts[0]
    return Predictions(
        method=first.method,
        model=first.model,
        task=task,
        split=first.split,
        ids=tuple(i for p in parts for i in p.ids),
        answers=np.concatenate([p.answers for p in parts]),
        offsets=Options.of_sizes(np.concatenate([p.options.sizes for p in parts])).edges,
        probs=np.concatenate([p.probs for p in parts]),
        groups=tuple(g for p in parts for g in (p.groups or p.ids)) if any(p.groups for p in parts) else (),
        targets=None if all(p.targets is None for p in parts) else np.concatenate([targets_in(p) for p in parts]),
        ordered=None if all(p.ordered is None for p in parts) else np.concatenate([ordered_in(p) for p in parts]),
    )


def targets_in(predictions: Predictions) -> Float[np.ndarray, " row"]:
    """Return the target of each option."""
    if predictions.targets is not None:
        return predictions.targets
    return predictions.options.one_hot(predictions.answers)


def ordered_in(predictions: Predictions) -> Bool[np.ndarray, " question"]:
    """Return which questions are scores."""
    return np.zeros(len(predictions), dtype=bool) if predictions.ordered is None else predictions.ordered


def methods_drawn(methods: Sequence[str]) -> list[str]:
    """Return the few methods that a figure shows: before, the plain remedy, and after; without a lens, the first three."""
    subject = subject_of(methods)
    known = [m for m in ("base", "temperature", subject) if m in methods]
    return [str(m) for m in known] if "base" in methods else list(methods)[:3]


# --- reliability and risk ---------------------------------------------------------------------------------------------


def both_bins(predictions: Predictions, *, n_bins: int = N_BINS) -> dict[str, Reliability]:
    """Return the diagram over bins of equal width and over bins of equally many questions."""
    return {
        name: reliability(predictions, n_bins=n_bins, adaptive=name == "adaptive")
        for name in ("equal width", "adaptive")
    }


@dataclass(frozen=True, slots=True)
class Risk:
    """The error rate when only the surest questions are answered."""

    coverage: Float[np.ndarray, " point"]
    """The share that is answered."""
    risk: Float[np.ndarray, " point"]
    low: Float[np.ndarray, " point"]
    high: Float[np.ndarray, " point"]
    threshold: Float[np.ndarray, " point"]
    """The confidence of the least sure answer that is given."""


def risk_with_interval(predictions: Predictions, *, n_boot: int = N_BOOT, seed: int = 0) -> Risk:
    """Return the risk at each twentieth of coverage; questions of equal confidence count in proportion."""
    facts = facts_of(predictions)
    order = np.argsort(-facts.confidence, kind="stable")
    sure, wrong = facts.confidence[order], 1.0 - facts.right[order]
    last = np.flatnonzero(np.append(np.diff(sure) != 0, True))
    value = risks_at(wrong, last, np.ones((1, len(wrong))))[0]
    resamples = iter_weights(len(wrong), n_boot=n_boot, seed=seed, groups=predictions.groups)
    draws = np.concatenate([risks_at(wrong, last, w[:, order]) for w in resamples])
    low, high = np.quantile(draws, [0.025, 0.975], axis=0)
    needed = np.ceil(COVERAGES * len(wrong) - 1e-9).astype(np.int64)
    return Risk(COVERAGES, value, np.minimum(low, value), np.maximum(high, value), sure[needed - 1])


def risks_at(
    wrong: Float[np.ndarray, " question"], last: Int[np.ndarray, " level"], weights: Float[np.ndarray, "boot question"]
) -> Float[np.ndarray, "boot point"]:
    """Return the error rate at each coverage; `last` is where each level of confidence ends, the surest first."""
    start = np.zeros((len(weights), 1))
    reached = np.hstack([start, np.cumsum(weights, axis=1)[:, last]])
    errors = np.hstack([start, np.cumsum(weights * wrong, axis=1)[:, last]])
    answered = weights.sum(axis=1, keepdims=True) * COVERAGES
    resamples = zip(answered, reached, errors, strict=True)
    return np.array([np.interp(wanted, n, e) / wanted for wanted, n, e in resamples])


# --- right as often as sure, over all questions or a subject ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConfidenceSummary:
    """How right and how sure one method is on some questions."""

    test: str
    """The test set."""
    task: str
    """The task that its questions come from: MMLU has many."""
    method: str
    n_questions: int
    accuracy: Score
    confidence: Score
    """Mean confidence."""
    overconfidence: Score
    """Mean confidence minus accuracy: above 0 it is too sure. (Unlike an ECE it is not biased by small numbers.)"""
    gain: Score | None
    """Accuracy minus that of the base on the same questions; None for the base itself or without one."""


def confidence_summary(
    predictions: Predictions, *, base: Predictions | None, n_boot: int = N_BOOT, where: tuple[str, str] = ("", "")
) -> ConfidenceSummary:
    """Return how right and how sure a method is on the questions of one test set and task."""
    facts = facts_of(predictions)
    n = len(predictions)
    measured = {"sure": facts.confidence, "over": facts.confidence - facts.right}
    if base is not None and base.method != predictions.method:
        measured["gain"] = facts.right - facts_of(base).right
    if predictions.groups:
        measured["right"] = facts.right
    means = {name: mean_score(values, predictions.groups, n_boot=n_boot) for name, values in measured.items()}
    accuracy = means.get("right") or wilson_score(float(facts.right.sum()), n)
    return ConfidenceSummary(*where, predictions.method, n, accuracy, means["sure"], means["over"], means.get("gain"))


def mean_score(
    values: Float[np.ndarray, " question"], groups: Sequence[str] = (), *, n_boot: int, seed: int = 0
) -> Score:
    """Return a mean over questions with its bootstrap interval."""
    resamples = iter_weights(len(values), n_boot=n_boot, seed=seed, groups=groups)
    draws: list[Values] = [w @ values / w.sum(axis=1) for w in resamples]
    return score_of(float(values.mean()), np.concatenate(draws), kind="mean")


def subject_summaries(run: Run, *, n_boot: int = N_BOOT) -> list[ConfidenceSummary]:
    """Return every method on every task of every test set, in the order of the report."""
    summaries = []
    for evaluation in in_order(run):
        tasks = np.array([q.task for q in evaluation.questions])
        for name in dict.fromkeys(tasks.tolist()):
            parts = {m: p.take(tasks == name) for m, p in evaluation.predictions.items()}
            base, where = parts.get("base"), (evaluation.name, str(name))
            summaries += [confidence_summary(p, base=base, n_boot=n_boot, where=where) for p in parts.values()]
    return summaries


# --- position bias ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PositionBias:
    """How often a method chooses the option at one place, against how often it is right there."""

    method: str
    position: str
    n_questions: int
    """Questions that have an option at this place."""
    right: Score
    chosen: Score
    excess: Score
    """Chosen minus right, over the same questions: 0 without position bias."""


_LETTER = re.compile(r"\s*\(?([A-Za-z0-9])[.):]?\s*")


def is_lettered(evaluation: Evaluation, style: Mapping[str, object] | None = None) -> bool:
    """Whether the model sees the options listed and answers with a letter: only then can it prefer a position."""
    if style and style.get("kind") == "letters" and all(q.task == "questions" for q in evaluation.questions):
        return True
    return all(_LETTER.fullmatch(option) for q in evaluation.questions for option in q.options)


def position_bias(predictions: Predictions, *, n_boot: int = N_BOOT) -> list[PositionBias]:
    """Return the bias towards every place at which a question has an option."""
    facts = facts_of(predictions)
    chosen = predictions.options.top(predictions.probs)
    biases = []
    for k in range(int(facts.sizes.max())):
        has = facts.sizes > k
        n, picked, right = int(has.sum()), (chosen == k)[has], (predictions.answers == k)[has]
        excess = mean_score(picked.astype(float) - right, tuple(compress(predictions.groups, has)), n_boot=n_boot)
        shares = wilson_score(float(right.sum()), n), wilson_score(float(picked.sum()), n)
        place = chr(ord("A") + k) if k < 26 else str(k + 1)
        biases.append(PositionBias(predictions.method, place, n, *shares, excess))
    return biases


def histogram(predictions: Predictions, *, n_bins: int = 20) -> Iterator[tuple[float, float, int, int]]:
    """Yield for each bin of confidence its edges, and how many answers in it are right and wrong."""
    facts = facts_of(predictions)
    number = equal_width_bins(facts.confidence, n_bins=n_bins)
    right = np.bincount(number, facts.right, minlength=n_bins).astype(np.int64)
    count = np.bincount(number, minlength=n_bins)
    for k in range(n_bins):
        yield k / n_bins, (k + 1) / n_bins, int(right[k]), int(count[k] - right[k])
