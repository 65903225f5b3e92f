"""What lenses are fitted on: the rows of a store as a probe sees them, and which questions train and which choose.

No function here or behind it takes test questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int

from coral_lens.errors import CoralError
from coral_lens.lens.features import build_inputs
from coral_lens.lens.probes.standardise import Standardiser, fit_standardiser, iter_rows
from coral_lens.lens.settings import BaseRule
from coral_lens.lens.weighing import Weighing
from coral_lens.metrics.scores import score
from coral_lens.ragged import Options
from coral_lens.records import OptionTable, Predictions, Question, groups_of
from coral_lens.storage.arrays import allocate, side_by_side


@dataclass(frozen=True)
class Sample:
    """Standardised inputs of the options of some questions, with what is to be learned from them."""

    z: Float[np.ndarray, "row feature"]
    p: Float[np.ndarray, " row"]
    r: Float[np.ndarray, " row"]
    options: Options
    answers: Int[np.ndarray, " question"]
    targets: Float[np.ndarray, " row"] | None = None
    """The share of each option where answers are soft; None: all of it is on the answer."""
    device: str = "cpu"
    """Where a network is trained on it."""
    n_free: int = 0
    """How many of the last inputs are no states, so that a linear fit lets their weights be as large as they will."""


@dataclass(frozen=True)
class TrainingData:
    """Labelled questions with base probabilities, residuals and, layer by layer, their states."""

    questions: Sequence[Question]
    table: OptionTable
    p: Float[np.ndarray, " row"]
    """Base probabilities, temperature-scaled already if the lens starts from scaled ones."""
    r: Float[np.ndarray, " row"]
    layer: Callable[[int], Float[np.ndarray, "row width"]]
    rounds: tuple[Bool[np.ndarray, " question"], ...]
    """Which questions validate in each round; the others train. One round is the paper's single split."""
    device: str = "cpu"
    """Where networks are trained."""
    base: BaseRule | Weighing = "token"
    """The score whose softmax the base probabilities are, before any scaling."""

    @property
    def options(self) -> Options:
        """The options of each question, side by side."""
        return self.table.options

    @cached_property
    def is_validation(self) -> Bool[np.ndarray, " question"]:
        """Which questions are validation questions in at least one round."""
        return np.any(self.rounds, axis=0)

    def features(self, layers: Sequence[int], inputs: Sequence[str]) -> Float[np.ndarray, "row feature"]:
        """Return the inputs of a probe that reads these layers side by side."""
        states = side_by_side(self.layer, layers)
        if not all(np.isfinite(chunk).all() for _, chunk in iter_rows(states)):
            raise CoralError(
                f"The states of layer {' and '.join(map(str, layers))} are not all finite numbers; the model or its dtype "
                "is broken there: extract again with --dtype float32, or leave the layer out with --layers."
            )
        return build_inputs(states, self.p, self.options, inputs)

    def sample(
        self, features: Float[np.ndarray, "row feature"], mask: Bool[np.ndarray, " question"], by: Standardiser
    ) -> Sample:
        """Return the rows of the marked questions."""
        rows = np.flatnonzero(self.options.rows(mask))
        z = allocate(len(rows), features.shape[1])
        for place, chunk in iter_rows(features, rows):
            by(chunk, out=z[place])
        targets = None if self.table.targets is None else self.table.targets[rows]
        answers, n_free = self.table.answers[mask], int(self.table.counts is not None)
        return Sample(z, self.p[rows], self.r[rows], self.options.take(mask), answers, targets, self.device, n_free)

    def standardiser(
        self, features: Float[np.ndarray, "row feature"], mask: Bool[np.ndarray, " question"]
    ) -> Standardiser:
        """Return the standardiser of the marked questions: those that train."""
        return fit_standardiser(features, np.flatnonzero(self.options.rows(mask)))

    def scores(
        self, probs: Float[np.ndarray, " row"], names: Sequence[str], mask: Bool[np.ndarray, " question"] | None = None
    ) -> dict[str, float]:
        """Score probabilities of all rows on the marked questions, by default those that validate."""
        predictions = self.predictions(probs, self.is_validation if mask is None else mask)
        return {name: score(predictions, name) for name in names}

    def predictions(self, probs: Float[np.ndarray, " row"], mask: Bool[np.ndarray, " question"]) -> Predictions:
        """Return probabilities of all rows as the predictions of the marked questions."""
        marked = np.flatnonzero(mask).tolist()
        return Predictions(
            method="candidate",
            model="",
            task="validation",
            split="",
            ids=tuple(map(str, marked)),
            answers=self.table.answers[mask],
            offsets=self.options.take(mask).edges,
            probs=probs[self.options.rows(mask)],
            groups=groups_of([self.questions[i] for i in marked]),
            targets=None if self.table.targets is None else self.table.targets[self.options.rows(mask)],
        )


def usable_device(name: str | None) -> str:
    """Return where networks are trained: on the device asked for, by default on the GPU if there is one."""
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, ImportError) as error:  # torch without CUDA asserts
        reason = str(error).partition("\n")[0]
        raise CoralError(f"--device {name} cannot be used here ({reason}); take cpu, or leave it out.") from None
    return name


def fold_masks(questions: Sequence[Question], n_folds: int, *, seed: int) -> tuple[Bool[np.ndarray, " question"], ...]:
    """Return the validation questions of each of n folds; a group (question or article) is never divided."""
    groups = sorted({q.group for q in questions})
    if len(groups) < n_folds:
        raise CoralError(
            f"{n_folds} folds need at least {n_folds} groups of questions. Got {len(groups)}; give more questions."
        )
    at = dict(zip(groups, np.random.default_rng(seed).permutation(len(groups)) % n_folds, strict=True))
    fold = np.array([at[q.group] for q in questions])
    return tuple(fold == k for k in range(n_folds))
