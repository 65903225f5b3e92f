"""Do no harm: a correction that grows weaker the further a question lies from what the lens was fitted on.

    log q' = exp(a0 + a1 * s) * log p + exp(b0 + b1 * s) * (log q - log p0)

with p the base probabilities, q the plain lens's, p0 the part of log q that is log p itself, and s from 0 (the question is no
further than a typical training question) to 1 (shift 1.5 and beyond: far). The four numbers are learned by cross-entropy on
simulated shift: lenses that were fitted without one part of the training mixture (a task, a subject, or a cluster of
questions) predict that part. Test tasks are never used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from coral_lens.lens.rules import FLOOR, log_of
from coral_lens.ragged import Options
from coral_lens.records import Question
from coral_lens.storage.arrays import row_chunks

FAR = 1.5
"""The shift from which a question counts as far: of held-out questions of the training tasks, nine in ten are nearer."""
PRIOR = 1.0
"""Standard deviation of the prior on each of the four numbers."""
FEWEST_IN_PART = 30
"""Questions that a part of the mixture must have to be left out as a whole."""
MOST_DOMAINS = 6
"""Parts of the mixture that are left out in turn; with more tasks, several are left out together."""
N_CLUSTERS = 4
"""Parts that a mixture of one task is divided into, by the places of its questions."""
MOST_CLUSTERED = 10_000
"""Questions at most that find these parts; the others are then put to the nearest."""


@dataclass(frozen=True)
class Tempering:
    """Logarithms of the weights of base and correction, and how much each falls until a question is far (never rising)."""

    base: float
    base_slope: float
    lens: float
    lens_slope: float

    def __call__(self, evidence: Evidence) -> Float[np.ndarray, " row"]:
        """Return the tempered probabilities."""
        return tempered((self.base, self.base_slope, self.lens, self.lens_slope), evidence)


@dataclass(frozen=True)
class Evidence:
    """What the base and the lens say about each option, and how far off each question is."""

    base: Float[np.ndarray, " row"]
    """The base's part of the lens's logits: its weight times log p, as the log of a distribution."""
    lens: Float[np.ndarray, " row"]
    """The lens's own part."""
    distance: Float[np.ndarray, " question"]
    """0 where the question is no further than a typical training question, 1 where it is far, in between by log shift."""
    options: Options
    targets: Float[np.ndarray, " row"] | None = None
    """Of labelled questions with soft answers: the share of each option."""


def evidence_of(
    base: Float[np.ndarray, " row"],
    q: Float[np.ndarray, " row"],
    shift: Float[np.ndarray, " question"],
    options: Options,
) -> Evidence:
    """Divide a lens's probabilities q into the part of the base (its weight times log p) and the lens's own.

    Trap: both have the same floor. If q alone had one, an option that base and lens agree to be hopeless would show
    strong evidence for it, and a lens's weight above the base's would make it the answer.
    """
    log_base, log_q = (np.log(np.maximum(x, FLOOR)) for x in (options.softmax(base), q))
    # a constant per question changes no probability; without the mean, the two parts can be weighed against each other
    lens = options.centre(log_q - log_base)
    distance = np.clip(np.log(np.maximum(shift, 1e-12)) / np.log(FAR), 0.0, 1.0)
    return Evidence(log_base, lens, distance, options)


def tempered(theta: Sequence[float] | np.ndarray, evidence: Evidence) -> Float[np.ndarray, " row"]:
    """Return softmax of the two parts, weighted by the question's distance."""
    options = evidence.options
    base = options.spread(np.exp(theta[0] + theta[1] * evidence.distance))
    lens = options.spread(np.exp(theta[2] + theta[3] * evidence.distance))
    return options.softmax(base * evidence.base + lens * evidence.lens)


def fit_tempering(parts: Sequence[tuple[Evidence, Int[np.ndarray, " _"], float]]) -> Tempering:
    """Return the tempering with the lowest cross-entropy; each part comes with its answers and the weight of a question.

    Slopes are at most 0: more shift never means more trust. A prior pulls all four numbers to 0, where the lens is left as it
    is: with few questions they would otherwise be fitted to noise.
    """
    from scipy.optimize import minimize

    n = sum(weight * len(answers) for _, answers, weight in parts)
    n_questions = sum(len(answers) for _, answers, _ in parts)

    def loss(theta: np.ndarray) -> float:
        total = 0.0
        for evidence, answers, weight in parts:
            options, targets = evidence.options, evidence.targets
            y = options.one_hot(answers) if targets is None else targets
            total -= weight * float(options.sum(y * log_of(tempered(theta, evidence))).sum())
        return total / n + float(theta @ theta) / (2 * PRIOR**2 * n_questions)

    bounds = [(-4.0, 3.0), (-4.0, 0.0), (-4.0, 3.0), (-4.0, 0.0)]
    theta = minimize(loss, np.array([0.0, -0.1, 0.0, -0.1]), method="L-BFGS-B", bounds=bounds).x
    return Tempering(*map(float, theta))


def domains_of(questions: Sequence[Question], places: Float[np.ndarray, "question width"], *, seed: int) -> list[str]:
    """Return the part of the mixture that each question belongs to: its task, or a cluster if there is one task only.

    Small tasks are put together, and so are tasks beyond the most that are left out in turn.
    """
    tasks = [q.task for q in questions]
    counts = {task: tasks.count(task) for task in sorted(set(tasks))}
    large = [task for task, n in counts.items() if n >= FEWEST_IN_PART]
    if len(large) >= 2:
        order = {task: i for i, task in enumerate(large)}
        return [
            f"part {order.get(task, 0) % MOST_DOMAINS}"
            if len(large) > MOST_DOMAINS
            else task
            if task in order
            else large[0]
            for task in tasks
        ]
    return clusters_of(places, seed=seed)


def clusters_of(places: Float[np.ndarray, "question width"], *, seed: int) -> list[str]:
    """Return a cluster for each question, by its place; where questions are many, a part of them finds the clusters."""
    from sklearn.cluster import KMeans

    n = max(2, min(N_CLUSTERS, len(places) // FEWEST_IN_PART))
    every = -(-len(places) // MOST_CLUSTERED)
    drawn = places[::every]
    mean, scale = drawn.mean(axis=0), np.maximum(drawn.std(axis=0), 1e-6)
    clusters = KMeans(n, n_init=4, random_state=seed).fit((drawn - mean) / scale)
    if every == 1:
        return [f"cluster {c}" for c in clusters.labels_]
    return [
        f"cluster {c}" for rows in row_chunks(*places.shape) for c in clusters.predict((places[rows] - mean) / scale)
    ]
