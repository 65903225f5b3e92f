"""The tempering of lenses of earlier versions: a correction that grows weaker the further off a question lies.

    log q' = exp(a0 + a1 * s) * log p + exp(b0 + b1 * s) * (log q - log p0)

with p the base probabilities, q the plain lens's, p0 the part of log q that is log p itself, and s from 0 (the question is no
further than a typical training question) to 1 (shift 1.5 and beyond: far). Saved lenses that have these four numbers answer by
them; none is fitted any more, because a small shift says nothing of whether a lens knows a task: see `trust`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from coral_lens.lens.rules import FLOOR
from coral_lens.ragged import Options
from coral_lens.records import FAR


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
