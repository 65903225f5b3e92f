"""Sets of options with a stated coverage, and a flag to abstain at a stated risk. Never changes a probability.

Both are fitted on held-out questions and both guarantees rest on one thing: that the questions to come are drawn as
those were. Questions that trained the probe or chose its layer are not held out, a new task is not drawn alike, and
questions of one article count as fewer than they are. Coverage and risk are averages over questions, not promises
about one question, one subject or one number of options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from math import ceil, log
from typing import Any, TypeVar, cast

import numpy as np
from jaxtyping import Bool, Float, Int

from coral_lens.errors import CoralError, nearest
from coral_lens.ragged import Options
from coral_lens.records import UNKNOWN

SLACK = 1e-9
"""Sums of one question's probabilities differ in the last digits by their order: a score this close above counts as equal."""
ANSWER_ALL = -1.0
"""The threshold below every confidence."""
SUREST = (0.25,)
"""Share of the questions, the surest, at which the search for a threshold begins."""

# --- scores: how strange an option would be as the answer --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Regularisation:
    """The penalty of RAPS on long sets; the same for a question of three options and one of ten."""

    penalty: float = 0.1
    """Added to the score for every rank beyond `k_reg` (the paper's lambda)."""
    k_reg: int = 2
    """The number of options that a set may have without penalty."""

    def __post_init__(self) -> None:
        if not self.penalty >= 0:
            raise CoralError(f"The penalty of RAPS must not be negative. Got {self.penalty} instead; 0 is plain APS.")
        if self.k_reg < 0:
            raise CoralError(f"k_reg, a number of options, must not be negative. Got {self.k_reg} instead.")


@dataclass(frozen=True, slots=True)
class Ranking:
    """Where each option stands among those of its question. Options of equal probability stand in the same place."""

    above: Float[np.ndarray, " row"]
    """The mass of all options that are more probable."""
    level: Float[np.ndarray, " row"]
    """The mass of the options that are exactly as probable, itself among them."""
    rank: Int[np.ndarray, " row"]
    """1 for the most probable; the number of more probable options, plus one."""


def ranking(p: Float[np.ndarray, " row"], options: Options) -> Ranking:
    """Return the ranking of the options within each question.

    Trap: one cumulative sum over all rows, cut at the questions, is shorter, but then the last digits of a question's
    masses depend on its neighbours, and so whether an option is in the set. Here each question is summed by itself.
    """
    if not len(options):
        return Ranking(np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
    question, place = options.question, options.option
    order = np.lexsort((-p, question))  # by question, and within it by falling probability
    falling = np.zeros((len(options), options.sizes.max()))
    falling[question, place] = p[order]
    upto = np.cumsum(falling, axis=1)[question, place]
    new = (place == 0) | (p[order] != np.roll(p[order], 1))
    first = np.maximum.accumulate(np.where(new, np.arange(len(p)), 0))  # where the row's run of equals begins
    last = np.append(first[1:] != first[:-1], True)
    run = np.cumsum(new) - 1
    above = np.where(place[first] == 0, 0.0, upto[first - 1])
    out = Ranking(np.empty(len(p)), np.empty(len(p)), np.empty(len(p), np.int64))
    out.above[order], out.level[order], out.rank[order] = above, upto[last][run] - above, place[first] + 1
    return out


Chance = Float[np.ndarray, " row"]
"""How much of its own mass an option is spared: 1 without randomisation, uniform in [0, 1) with it."""


def _lac(p: Float[np.ndarray, " row"], _ranks: Ranking, _u: Chance, _r: Regularisation) -> Float[np.ndarray, " row"]:
    """Sadinle, Lei and Wasserman (2019): the sets of smallest average size, which are empty where nothing stands out."""
    return 1.0 - p


def _aps(_p: Float[np.ndarray, " row"], ranks: Ranking, u: Chance, _r: Regularisation) -> Float[np.ndarray, " row"]:
    """Romano, Sesia and Candès (2020): the mass down to the option, without the share u of its own."""
    return ranks.above + (1.0 - u) * ranks.level


def _raps(p: Float[np.ndarray, " row"], ranks: Ranking, u: Chance, r: Regularisation) -> Float[np.ndarray, " row"]:
    """Angelopoulos, Bates, Malik and Jordan (2021): APS with a penalty on late ranks."""
    return _aps(p, ranks, u, r) + r.penalty * np.maximum(ranks.rank - r.k_reg, 0)


SCORES: dict[str, Callable[..., Float[np.ndarray, " row"]]] = {"lac": _lac, "aps": _aps, "raps": _raps}
"""The score of every option, were it the answer. It must not know which one is, nor what other questions hold."""


def option_scores(
    p: Float[np.ndarray, " row"],
    options: Options,
    *,
    kind: str,
    regularisation: Regularisation | None = None,
    u: Float[np.ndarray, " question"] | None = None,
) -> Float[np.ndarray, " row"]:
    """Return the score of each option. With `u`, one uniform draw per question, APS and RAPS are randomised.

    Without it an option is charged the mass above it and nothing of its own. So the most probable option scores 0, no
    set is empty, and a question's set is its shortest list of options that holds more than the threshold. (Charging
    the option its whole mass is valid too, but refuses the top option of the very questions the model is sure of.)
    """
    shares = np.ones(len(p)) if u is None else options.spread(u)
    return SCORES[kind](p, ranking(p, options), shares, regularisation or Regularisation())


# --- prediction sets ---------------------------------------------------------------------------------------------------

R = TypeVar("R")


def _from_dict(cls: type[R], data: Mapping[str, Any]) -> R:
    if wrong := {f.name for f in fields(cast(Any, cls))} ^ set(data):
        raise CoralError(
            f"Not a record of {cls.__name__.lower()}: {', '.join(sorted(wrong))} missing or unknown; fit it again."
        )
    return cls(**data)


@dataclass(frozen=True, slots=True)
class Conformal:
    """A fitted rule that says which options belong to the set of a question."""

    kind: str
    """A name in SCORES."""
    coverage: float
    """The share of questions whose answer is in the set, at least, on average over draws of the held-out questions."""
    threshold: float
    """An option is in the set if its score is at most this."""
    n_questions: int
    """How many it was fitted on. Over one such draw the coverage itself has a spread of about sqrt(c (1 - c) / n)."""
    randomised: bool = False
    """Whether sets are drawn, to cover the stated share exactly; then `prediction_sets` needs a generator as well."""
    regularisation: Regularisation | None = None
    """The penalty of RAPS; None for the other kinds."""

    def __post_init__(self) -> None:
        _check_kind(self.kind, regularised=self.regularisation is not None, randomised=self.randomised)

    def __str__(self) -> str:
        return f"{self.kind} sets of coverage {self.coverage:g}, from {self.n_questions} questions"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Conformal:
        """Return what `to_dict` wrote."""
        inner = data.get("regularisation")
        return _from_dict(cls, {**data, "regularisation": inner and _from_dict(Regularisation, inner)})


def questions_needed(coverage: float) -> int:
    """Return the smallest number of held-out questions that can tell a set of this coverage from the set of everything."""
    exact = _share("coverage", coverage)
    return ceil(exact / (1 - exact))


def fit_conformal(
    p: Float[np.ndarray, " row"],
    options: Options,
    answers: Int[np.ndarray, " question"],
    *,
    coverage: float,
    kind: str = "lac",
    regularisation: Regularisation | None = None,
    rng: np.random.Generator | None = None,
) -> Conformal:
    """Fit the threshold on held-out questions: the ceil((n + 1) coverage)-th smallest score of their answers.

    If the next question is drawn as they were, its answer's score is as likely to take any place among theirs, hence
    at most that one with probability >= coverage. Deterministic unless given a generator (APS and RAPS only). Give the
    same generator, and not the same seed, to `prediction_sets`: its draws must be new ones.
    """
    _check_kind(kind, regularised=regularisation is not None, randomised=rng is not None)
    _check_probs(p, options)
    _check_answers(answers, options)
    n, needed = len(answers), questions_needed(coverage)
    if n < needed:
        raise CoralError(
            f"A coverage of {coverage:g} needs at least {needed} held-out questions: with fewer, only the set of all "
            f"options has it. Got {n}; give more questions or ask for a coverage of at most {n / (n + 1):.3g}."
        )
    if kind == "raps":
        regularisation = regularisation or Regularisation()
    u = None if rng is None else rng.random(n)
    scores = option_scores(p, options, kind=kind, regularisation=regularisation, u=u)[options.row(answers)]
    threshold = float(np.sort(scores)[ceil(_share("coverage", coverage) * (n + 1)) - 1])
    return Conformal(kind, float(coverage), threshold, n, rng is not None, regularisation)


def prediction_sets(
    conformal: Conformal,
    p: Float[np.ndarray, " row"],
    options: Options,
    *,
    keep_top: bool = True,
    rng: np.random.Generator | None = None,
) -> Bool[np.ndarray, " row"]:
    """Return which options are in the set of their question.

    LAC sets, and randomised ones, may be empty: the model is less sure than nearly always when it was right. With
    `keep_top`, the default, the most probable option is in the set even then (all of them, if several are equal). A
    set that grows cannot lose its answer, so coverage can only rise, and a person asked to choose is never shown
    nothing. Without it, coverage is as close to the stated one as can be.
    """
    _check_probs(p, options)
    if conformal.randomised != (rng is not None):
        fitted, fix = ("with", "give a generator") if conformal.randomised else ("without", "leave out the generator")
        raise CoralError(f"These {conformal.kind} sets were fitted {fitted} randomisation; {fix}.")
    u = None if rng is None else rng.random(len(options))
    scores = option_scores(p, options, kind=conformal.kind, regularisation=conformal.regularisation, u=u)
    inside: Bool[np.ndarray, " row"] = scores <= conformal.threshold + SLACK
    if keep_top and len(p):
        inside |= p == options.spread(options.max(p))
    return inside


def _share(name: str, value: float) -> Fraction:
    """Return a share between 0 and 1 exactly as it was written: in floats, 0.55 * 100 is above 55, and rounds up to 56."""
    if not 0.0 < value < 1.0:
        raise CoralError(f"{name} must lie between 0 and 1, both excluded. Got {value} instead.")
    return Fraction(repr(float(value)))


def _check_kind(kind: str, *, regularised: bool, randomised: bool) -> None:
    if kind not in SCORES:
        raise CoralError(f"Unknown kind of prediction set {kind!r}.{nearest(kind, SCORES)} Known: {', '.join(SCORES)}.")
    if kind == "lac" and randomised:
        raise CoralError("LAC sets have no randomised version; leave out the generator, or choose aps or raps.")
    if kind != "raps" and regularised:
        raise CoralError(f"Only raps has a regularisation, but the kind is {kind!r}; leave it out.")


def _check_probs(p: Float[np.ndarray, " row"], options: Options) -> None:
    edges = options.edges
    if edges[0] != 0 or edges[-1] != len(p) or (options.sizes < 1).any():
        raise CoralError(
            f"The edges of the options must rise from 0 to the number of rows, {len(p)}, with an option for every "
            f"question. Got {edges[0]} to {edges[-1]}; see ragged.Options.of_sizes."
        )
    sums = options.sum(p)
    bad = np.flatnonzero(~(np.abs(sums - 1.0) <= 1e-5))
    if len(bad) or (p < 0).any():
        fault = f"sum to {sums[bad[0]]:.6g} in question number {bad[0]}" if len(bad) else f"go down to {p.min():.6g}"
        raise CoralError(
            f"Probabilities must be 0 or more and sum to 1 over each question, but they {fault}; softmax them."
        )


def _check_answers(answers: Int[np.ndarray, " question"], options: Options) -> None:
    if len(answers) != len(options):
        raise CoralError(f"One answer per question is needed. Got {len(answers)} for {len(options)} questions.")
    unknown = np.flatnonzero(answers == UNKNOWN)
    if len(unknown):
        raise CoralError(
            f"{len(unknown)} of {len(answers)} held-out questions have no answer (first: number {unknown[0]}); "
            "prediction sets are fitted on labelled questions, leave the others out."
        )
    wrong = np.flatnonzero((answers < 0) | (answers >= options.sizes))
    if len(wrong):
        i = wrong[0]
        raise CoralError(
            f"Question number {i} has answer {answers[i]}, but its options are 0 to {options.sizes[i] - 1}."
        )


# --- abstention --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Abstention:
    """A fitted rule that says on which questions the model should not answer."""

    risk: float
    """The error rate among answered questions that is not to be exceeded."""
    delta: float
    """The chance, over draws of the held-out questions, that it is exceeded all the same."""
    threshold: float | None
    """Answer if the confidence is above this, and not if it is equal. None: no threshold is safe, so never answer."""
    n_questions: int
    """How many it was fitted on."""
    n_answered: int
    """How many of those are above the threshold."""
    n_wrong: int
    """How many of the answered were wrong."""

    @property
    def abstains_always(self) -> bool:
        """Whether the risk could not be guaranteed at any threshold."""
        return self.threshold is None

    def __str__(self) -> str:
        promise = f"an error rate of at most {self.risk:g} with certainty {1 - self.delta:g}"
        if self.threshold is None:
            needed = flawless_needed(self.risk, delta=self.delta)
            found = "" if self.n_questions < needed else ", and too many of the surest answers were wrong"
            return (
                f"always abstains: these {self.n_questions} held-out questions cannot show {promise}: it takes at least "
                f"{needed} answers without a single error{found}; give more questions or allow a higher risk"
            )
        share = f"{self.n_answered} of {self.n_questions} held-out questions, {self.n_wrong} of them wrongly"
        return f"answers above a confidence of {self.threshold:.4g}: {promise}; it answered {share}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Abstention:
        """Return what `to_dict` wrote."""
        return _from_dict(cls, data)


def flawless_needed(risk: float, *, delta: float = 0.1) -> int:
    """Return how many answers, all of them right, it takes to show the risk: the first n with (1 - risk)^n <= delta."""
    return max(1, ceil(log(delta) / log(1.0 - risk) - SLACK))


def fit_abstention(
    confidence: Float[np.ndarray, " question"],
    correct: Bool[np.ndarray, " question"],
    *,
    risk: float,
    delta: float = 0.1,
    starts: Sequence[float] = SUREST,
) -> Abstention:
    """Fit the lowest confidence threshold that is shown to keep the error rate among answered questions within `risk`.

    With probability >= 1 - delta the true rate above the threshold is at most `risk`. Thresholds are the held-out
    confidences themselves, tested from a start that is fixed beforehand (the surest quarter, or as many as a flawless
    record needs) downwards, each by the exact binomial test, that is by the Clopper-Pearson bound; the first that
    fails ends it. Only one test can do harm, the first at a threshold that is too low, and so the whole search errs no
    more often than one test (fixed-sequence testing: Angelopoulos et al., Learn then Test, 2021). Several `starts` find a
    threshold too where the surest quarter is not good enough; `delta` is divided between them.

    Traps. The lowest threshold whose *empirical* error is within `risk` breaks its promise about every second time.
    Questions strictly above a held-out confidence are a fair sample of all such questions; with the one at the
    threshold they are not, hence "above". And the argument takes for granted that among surer answers no more are
    wrong; where that fails (see the reliability diagram) the certainty is approximate.
    """
    _check_abstention(confidence, correct, risk=risk, delta=delta)
    n = len(confidence)
    values, below = np.unique(-confidence, return_counts=True)
    answered = np.cumsum(below)
    wrong = np.cumsum(~correct[np.argsort(-confidence, kind="stable")])[answered - 1] if n else answered
    thresholds = np.append(-values[1:], ANSWER_ALL)  # below each distinct confidence: the next one, and in the end none
    begun = _starts(n, starts, risk=risk, delta=delta)
    shown = _shown(wrong, answered, risk=risk, delta=delta / len(begun))
    i = max(_end_of_run(shown, answered, start) for start in begun)
    if i < 0:
        return Abstention(float(risk), float(delta), None, n, 0, 0)
    return Abstention(float(risk), float(delta), float(thresholds[i]), n, int(answered[i]), int(wrong[i]))


def _starts(n: int, shares: Sequence[float], *, risk: float, delta: float) -> set[int]:
    """Return the numbers of answers at which the search begins; those that come to the same share no `delta` out.

    A start with fewer answers than a flawless record needs could show nothing, so it waits for that many. No answer is looked at.
    """
    for n_chains in range(1, len(shares) + 1):
        needed = flawless_needed(risk, delta=delta / n_chains)
        starts = {max(needed, int(share * n)) for share in shares}
        if len(starts) <= n_chains:
            break
    return starts


def _end_of_run(shown: Bool[np.ndarray, " item"], answered: Int[np.ndarray, " item"], start: int) -> int:
    """Return the last place that is shown, and all from the first with `start` answers up to it; -1 where that one is not."""
    tested = shown[answered >= start]
    run = len(tested) if tested.all() else int(np.argmin(tested))
    return int(np.argmax(answered >= start)) + run - 1 if run else -1


def abstains(abstention: Abstention, confidence: Float[np.ndarray, " question"]) -> Bool[np.ndarray, " question"]:
    """Return on which questions the model should not answer."""
    if abstention.threshold is None:
        return np.ones(len(confidence), dtype=bool)
    return ~(confidence > abstention.threshold)


def _shown(
    wrong: Int[np.ndarray, " item"], answered: Int[np.ndarray, " item"], *, risk: float, delta: float
) -> Bool[np.ndarray, " item"]:
    """Return where so few errors are unlikely (at most delta) if the true rate were `risk`."""
    from scipy.stats import binom

    return np.asarray(binom.cdf(wrong, answered, risk) <= delta * (1 + SLACK))


def _check_abstention(
    confidence: Float[np.ndarray, " question"], correct: Bool[np.ndarray, " question"], *, risk: float, delta: float
) -> None:
    _share("risk", risk)
    _share("delta", delta)
    if len(confidence) != len(correct):
        raise CoralError(f"One confidence per question is needed. Got {len(confidence)} for {len(correct)} questions.")
    if not ((confidence >= 0) & (confidence <= 1)).all():
        raise CoralError("Confidences must lie between 0 and 1; give the probability of the chosen option.")
    if correct.dtype != np.bool_:
        raise CoralError(
            f"`correct` must say true or false of each question. Got {correct.dtype}; leave unlabelled ones out."
        )
