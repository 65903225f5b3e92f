"""What probes share: how states are standardised, and how a prediction of residuals is judged.

A probe leads from an option's pooled state to its predicted residual; it sees standardised states and never probabilities.
States may be float16, float32 or mapped from a file: they are read in chunks of rows, and no copy of them all is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from coral_lens.errors import CoralError
from coral_lens.storage.arrays import release, row_chunks

RowNumbers = Int[np.ndarray, " some"]
"""Numbers of the rows of a matrix that are meant; None means all."""


def iter_rows(
    states: Float[np.ndarray, "row width"], rows: RowNumbers | None = None
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield the wanted rows of a matrix, chunk by chunk, each chunk with its place among them."""
    n = len(states) if rows is None else len(rows)
    for place in row_chunks(n, states.shape[1]):
        yield place, states[place] if rows is None else states[rows[place]]
        release(states)


def column_means(states: Float[np.ndarray, "row width"], rows: RowNumbers | None = None) -> Float[np.ndarray, " width"]:
    """Return the mean of each column in float64, and refuse states that are not numbers."""
    n = len(states) if rows is None else len(rows)
    if not n:
        raise CoralError("There are no states to fit a probe on: 0 rows. Give more questions.")
    total = np.zeros(states.shape[1])
    for place, chunk in iter_rows(states, rows):
        subtotal = chunk.sum(axis=0, dtype=np.float64)
        if not np.isfinite(subtotal).all():
            refuse_numbers(chunk, first=place.start)
        total += subtotal
    return total / n


def refuse_numbers(states: Float[np.ndarray, "row width"], *, first: int) -> None:
    """Name the first value that is NaN or infinite."""
    row, column = np.argwhere(~np.isfinite(states))[0]
    raise CoralError(
        f"The state of row {first + row} is {states[row, column]} in column {column}; a probe cannot learn from it. "
        "Extract the activations again, with float32 weights if the model overflows in half precision."
    )


def refuse_residuals(r: Float[np.ndarray, " row"]) -> None:
    """Name the first residual that is not a number."""
    if not np.isfinite(r).all():
        row = int(np.flatnonzero(~np.isfinite(r))[0])
        raise CoralError(f"The residual of row {row} is {r[row]}; check the probabilities that it comes from.")


@dataclass(frozen=True)
class Standardiser:
    """z = (h - mean) / scale with training statistics; a constant column has scale 1."""

    mean: Float[np.ndarray, " width"]
    scale: Float[np.ndarray, " width"]

    def __call__(
        self, states: Float[np.ndarray, "row width"], out: Float[np.ndarray, "row width"] | None = None
    ) -> Float[np.ndarray, "row width"]:
        """Return standardised states in float32, or write them to `out`, which may be mapped from a file."""
        z = np.empty(states.shape, np.float32) if out is None else out
        for place, chunk in iter_rows(states):
            z[place] = (chunk - self.mean) / self.scale
            release(z)
        return z

    @classmethod
    def identity(cls, width: int) -> Standardiser:
        """Return the one that leaves states as they are."""
        return cls(np.zeros(width, np.float32), np.ones(width, np.float32))


def fit_standardiser(states: Float[np.ndarray, "row width"], rows: RowNumbers | None = None) -> Standardiser:
    """Return the standardiser of training states, from two passes in float64; `rows` are those that train."""
    mean = column_means(states, rows)
    squares = np.zeros_like(mean)
    for _, chunk in iter_rows(states, rows):
        squares += ((chunk - mean) ** 2).sum(axis=0)
    scale = np.sqrt(squares / (len(states) if rows is None else len(rows)))
    # each column against its own mean: beside a massive activation, an ordinary column is not constant
    scale[scale <= 1e-6 * np.abs(mean)] = 1.0
    return Standardiser(mean.astype(np.float32), scale.astype(np.float32))


@runtime_checkable
class Probe(Protocol):
    """A fitted probe. Its tensors and its kind are all that a lens keeps of it."""

    kind: str

    def predict(self, z: Float[np.ndarray, "row width"]) -> Float[np.ndarray, " row"]:
        """Return the predicted residual of each standardised state."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights to save."""


class FittedProbe(NamedTuple):
    """A probe as a fit leaves it, with the two numbers that a listwise fit learns beside it."""

    probe: Probe
    base_weight: float = 1.0
    """Weight of log p under the listwise rule."""
    scale: float = 1.0
    """Scale of the probe's output: gamma counts in units of it."""


def predict_states(
    probe: Probe, standardiser: Standardiser, states: Float[np.ndarray, "row width"], rows: RowNumbers | None = None
) -> Float[np.ndarray, " some"]:
    """Return what a probe predicts of states that are not standardised yet."""
    predicted = [probe.predict(standardiser(chunk)) for _, chunk in iter_rows(states, rows)]
    return np.concatenate([np.zeros(0), *predicted])


def r_squared(r: Float[np.ndarray, " row"], r_hat: Float[np.ndarray, " row"]) -> float:
    """Return the share of the residuals' variance that is predicted; negative if worse than their mean."""
    total = float(((r - r.mean()) ** 2).sum())
    return 1.0 - float(((r - r_hat) ** 2).sum()) / total if total > 0 else 0.0
