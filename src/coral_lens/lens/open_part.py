"""What a lens for open questions has beside all others: how candidates are written and weighed, and what `none of these` is.

`None of these` is no text whose states would say anything: its state is the mean state of the training candidates, an answer of
which nothing is known. So a candidate's score is how far its own states speak for it or against it, and with a single candidate
the lens is the plain probe of whether an answer is right. Such a probe has an intercept: one more column of the states is 1 for
candidates and 0 for `none of these`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from coral_lens.engine.settings import Sampling
from coral_lens.lens.weighing import Weighing, none_rows
from coral_lens.ragged import Options
from coral_lens.records import OptionTable, Question, Scored

Reference = Mapping[int, Float[np.ndarray, " width"]]
"""By layer, the mean state of the training candidates, and 0 for the intercept."""


class CandidateStates:
    """Scored open questions in which the state of `none of these` is the reference: a `Scored` like any other.

    Without a reference, the candidates of the questions themselves are the training candidates.
    """

    def __init__(self, store: Scored, sampling: Sampling, reference: Reference | None = None) -> None:
        self._store, self._reference, self.sampling = store, reference, sampling

    @property
    def manifest(self) -> dict[str, Any]:
        """That of the store, and how candidates were written."""
        return self._store.manifest | {"sampling": asdict(self.sampling)}

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that can be read."""
        return self._store.layers

    @property
    def questions(self) -> Sequence[Question]:
        """The questions in order."""
        return self._store.questions

    @property
    def table(self) -> OptionTable:
        """Their scores."""
        return self._store.table

    def layer(self, layer: int, place: str = "answer") -> Float[np.ndarray, "row width"]:
        """Return one layer's pooled states and the intercept, with the reference for `none of these`."""
        states, is_none = self._store.layer(layer, place), none_rows(self.table.options)
        out = np.ones((len(states), states.shape[1] + 1), dtype=states.dtype)
        out[:, :-1] = states
        out[is_none] = self._reference[layer] if self._reference else reference_of(states, ~is_none)
        return out

    def reference(self, layers: Sequence[int]) -> dict[int, Float[np.ndarray, " width"]]:
        """Return what `none of these` is in some layers."""
        rows = ~none_rows(self.table.options)
        return {layer: reference_of(self._store.layer(layer), rows) for layer in layers}


def reference_of(states: Float[np.ndarray, "row width"], rows: Bool[np.ndarray, " row"]) -> Float[np.ndarray, " wider"]:
    """Return the mean state of candidates, and 0 in the place of the intercept."""
    return np.append(states[rows].mean(axis=0, dtype=np.float64), 0.0)


@dataclass(frozen=True)
class OpenPart:
    """What makes a lens one for open questions."""

    sampling: Sampling
    """How the model writes candidates; it was fitted on such."""
    weighing: Weighing
    """The base probabilities of candidates."""
    reference: Reference = field(default_factory=dict)
    """The state of `none of these`, of each layer that the lens reads."""

    def states(self, store: Scored) -> Scored:
        """Return scored questions as the lens sees them."""
        return CandidateStates(store, self.sampling, self.reference)

    def to_json(self) -> dict[str, Any]:
        """Return what a lens keeps of it in its JSON."""
        return {"sampling": asdict(self.sampling), "weighing": asdict(self.weighing)}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> OpenPart:
        """Read what `to_json` wrote; the reference is a tensor."""
        return OpenPart(Sampling(**record["sampling"]), Weighing(**record["weighing"]))

    def stacked(self, layers: Sequence[int]) -> Float[np.ndarray, "layer width"]:
        """Return the reference as a lens keeps it in its tensors, a row for each layer that it reads."""
        return np.stack([self.reference[layer] for layer in layers])


def chosen_options(
    probs: Float[np.ndarray, " row"], options: Options, *, is_open: bool
) -> Int[np.ndarray, " question"]:
    """Return which option of each question is the answer: the likeliest, of an open question the likeliest candidate.

    `None of these` is never an answer: where it is the likeliest, no candidate is likely.
    """
    return options.top(np.where(none_rows(options), -1.0, probs) if is_open else probs)
