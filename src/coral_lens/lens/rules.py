"""The rules by which a probe's scores correct probabilities. Only arithmetic, over questions with any number of options.

    residual    p' = max(p + gamma * (r_hat - mean r_hat), 0), renormalised     `steer`, the paper's Eq. 4
    listwise    p' = softmax(base_weight * log p + gamma * score)               `tilt`, beyond the paper

A new rule is an entry of `RULES`. Beside them stand what they start from (the base probabilities p and the residuals
y - p that a probe learns) and temperature scaling: one number, which moves confidence and never the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Float, Int

from coral_lens.errors import CoralError
from coral_lens.lens.settings import BaseRule
from coral_lens.ragged import Options
from coral_lens.records import UNKNOWN, OptionTable

RuleName = Literal["residual", "listwise"]

FLOOR = 1e-4
"""Smaller corrected probabilities, such as one that the paper's rule clipped to 0, count as this where logarithms are taken:
no evidence is infinitely strong."""


# ------------------------------------------------------------------------------------- base probabilities and residuals

BASE_SCORES: dict[str, Callable[[OptionTable], Float[np.ndarray, " row"]]] = {
    "sum": lambda t: t.logprobs,
    "token": lambda t: t.logprobs / t.n_tokens,
    "char": lambda t: t.logprobs / t.n_chars,
    "pmi": lambda t: t.logprobs - neutral_of(t),
}
"""The score whose softmax is the base probability: lm-eval's acc, the mean per token, lm-eval's acc_norm, and by how much the
question makes an option likelier than a neutral context does (pointwise mutual information)."""


def neutral_of(table: OptionTable) -> Float[np.ndarray, " row"]:
    """Return the log-probabilities of options after a neutral context."""
    if table.neutral is None:
        raise CoralError(
            "The base rule `pmi` needs options that were scored after a neutral context too; score the questions anew, for a "
            "store with `coral extract --neutral`, for a study with `neutral = true`."
        )
    return table.neutral


def base_probs(
    table: OptionTable, rule: str | Callable[[OptionTable], Float[np.ndarray, " row"]]
) -> Float[np.ndarray, " row"]:
    """Return the unsteered model's distribution over the options of each question, by the name of a score or by the score."""
    return table.options.softmax(BASE_SCORES[rule](table) if isinstance(rule, str) else rule(table))


def choose_base(
    table: OptionTable,
    rounds: Sequence[Bool[np.ndarray, " question"]],
    metric: Callable[[Float[np.ndarray, " row"]], float],
) -> BaseRule:
    """Return the rule whose probabilities of the validation questions have the lowest metric.

    `rounds` says which questions validate in each; the others give each rule the temperature that suits it. The metric is told
    the probabilities of all rows, and looks at those that validate.
    """
    costs: dict[BaseRule, float] = {}
    for rule in get_args(BaseRule):
        p = base_probs(table, rule)
        scaled = p.copy()
        for held_out in rounds:
            rows, temperature = table.options.rows(held_out), temperature_on(p, table, ~held_out)
            scaled[rows] = apply_temperature(p, table.options, temperature=temperature)[rows]
        costs[rule] = metric(scaled)
    return min(costs, key=lambda rule: costs[rule])


def uniform_probs(options: Options) -> Float[np.ndarray, " row"]:
    """Return the distribution of who has not looked: all options of a question are alike."""
    return options.spread(1.0 / options.sizes)


def log_of(p: Float[np.ndarray, " row"]) -> Float[np.ndarray, " row"]:
    """Return log p, finite where p is 0."""
    return np.log(np.maximum(p, 1e-300))


def correct_rows(table: OptionTable) -> Float[np.ndarray, " row"]:
    """Return y: 1 for the correct option of each question and 0 for the others, or the shares of a soft answer.

    Every question must have an answer.
    """
    assert (table.answers != UNKNOWN).all(), "an unlabelled question has no y"
    return table.options.one_hot(table.answers) if table.targets is None else table.targets


def residuals(table: OptionTable, p: Float[np.ndarray, " row"]) -> Float[np.ndarray, " row"]:
    """Return r = y - p, what the probe learns to predict (the paper's Eq. 1)."""
    return correct_rows(table) - p


# -------------------------------------------------------------------------------------------------------- the two rules


def steer(
    p: Float[np.ndarray, " row"], r_hat: Float[np.ndarray, " row"], options: Options, *, gamma: float
) -> Float[np.ndarray, " row"]:
    """Return p' = max(p + gamma * (r_hat - mean r_hat), 0), renormalised per question (the paper's Eq. 4)."""
    if gamma == 0.0:
        return p
    # centred residuals sum to 0 over a question, so clipping leaves a total of at least 1: safe to divide
    return options.normalise(np.maximum(p + gamma * options.centre(r_hat), 0.0))


def tilt(
    base: Float[np.ndarray, " row"], scores: Float[np.ndarray, " row"], options: Options, *, gamma: float
) -> Float[np.ndarray, " row"]:
    """Return softmax(base + gamma * scores) per question, `base` being the base's weight times log p.

    Not in the paper. Gamma 0 leaves plain temperature scaling.
    """
    return options.softmax(base + gamma * scores)


@dataclass(frozen=True)
class ProbeScores:
    """What a probe says of every option, with what a rule needs beside it to correct their probabilities."""

    p: Float[np.ndarray, " row"]
    """The base probabilities that are corrected."""
    base: Float[np.ndarray, " row"]
    """The base's part of the listwise rule's logits: its weight times log p."""
    scores: Float[np.ndarray, " row"]
    """The probe's output: under the paper's rule, r_hat."""
    options: Options


@dataclass(frozen=True)
class Rule:
    """One way to correct probabilities."""

    method: str
    """The name of its predictions."""
    noun: str
    """What a lens of this rule is called in a sentence, after its kind."""
    correct: Callable[[ProbeScores, float], Float[np.ndarray, " row"]]
    """The corrected probabilities at strength gamma."""
    change: Callable[[ProbeScores], Float[np.ndarray, " row"]]
    """The change of probability that the scores stand for at full strength: the estimate of the residual."""
    gammas: tuple[float, ...]
    """The strengths to choose from."""


GAMMAS = tuple(0.25 * k for k in range(13))
"""The paper's 0.25 to 3.0, and 0: a probe that helps nowhere then does nothing."""
SHRINKAGES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""For the listwise rule, whose scores already have their scale; 0 is plain temperature scaling."""

RULES: dict[RuleName, Rule] = {
    "residual": Rule(
        method="coral",
        noun="probe",
        correct=lambda s, gamma: steer(s.p, s.scores, s.options, gamma=gamma),
        change=lambda s: s.scores,
        gammas=GAMMAS,
    ),
    "listwise": Rule(
        method="listwise",
        noun="lens",
        correct=lambda s, gamma: tilt(s.base, s.scores, s.options, gamma=gamma),
        change=lambda s: tilt(s.base, s.scores, s.options, gamma=1.0) - s.p,
        gammas=SHRINKAGES,
    ),
}


# --------------------------------------------------------------------------------------------------------- temperature

BOUNDS = (0.02, 50.0)
"""The lowest and the highest temperature that is fitted."""


def apply_temperature(
    p: Float[np.ndarray, " row"], options: Options, *, temperature: float
) -> Float[np.ndarray, " row"]:
    """Return softmax(log p / T) over the options of each question."""
    return options.softmax(log_of(p) / temperature)


def scale_corrected(q: Float[np.ndarray, " row"], options: Options, *, temperature: float) -> Float[np.ndarray, " row"]:
    """Scale corrected probabilities by a temperature; 1 leaves them as they are.

    Trap: the paper's rule clips at 0. If that counted as 0 here, a single right option that was clipped would push the fitted
    temperature to infinity.
    """
    if temperature == 1.0:
        return q
    return apply_temperature(np.maximum(q, FLOOR), options, temperature=temperature)


def fit_temperature(
    p: Float[np.ndarray, " row"],
    options: Options,
    answers: Int[np.ndarray, " question"],
    *,
    targets: Float[np.ndarray, " row"] | None = None,
) -> float:
    """Return the temperature with the lowest NLL, of soft answers if there are targets.

    The NLL is convex in 1 / T, so a bounded search finds it.
    """
    from scipy.optimize import minimize_scalar

    logs, y = log_of(p), options.one_hot(answers) if targets is None else targets
    # relative to the right option: the NLL is then a log-sum-exp, exact where a probability would underflow
    behind = logs - options.spread(options.sum(y * logs))

    def nll(inverse: float) -> float:
        return float(np.logaddexp.reduceat(inverse * behind, options.starts).mean())

    low, high = (1.0 / b for b in reversed(BOUNDS))
    return float(1.0 / minimize_scalar(nll, bounds=(low, high), method="bounded", options={"xatol": 1e-6}).x)


def temperature_on(p: Float[np.ndarray, " row"], table: OptionTable, mask: Bool[np.ndarray, " question"]) -> float:
    """Return the temperature with the lowest NLL on the marked questions of a table."""
    options = table.options
    rows = options.rows(mask)
    targets = None if table.targets is None else table.targets[rows]
    return fit_temperature(p[rows], options.take(mask), table.answers[mask], targets=targets)
