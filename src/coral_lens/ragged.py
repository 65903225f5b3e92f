"""Options side by side: what is computed within each question over a flat array of (question, option) rows.

Questions have different numbers of options, so their values lie one after another in one array and `Options` says where each
question begins. The same numpy calls in the same order everywhere: two places that compute a sum agree to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, Num


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """The options of several questions: question i owns rows edges[i] to edges[i + 1]."""

    edges: Int[np.ndarray, " edge"]

    @classmethod
    def of_sizes(cls, sizes: Sequence[int] | Int[np.ndarray, " question"]) -> Options:
        """Return the options of questions that have so many each."""
        return cls(np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))]).astype(np.int64))

    def __len__(self) -> int:
        return len(self.edges) - 1

    @property
    def n_rows(self) -> int:
        return int(self.edges[-1])

    @property
    def starts(self) -> Int[np.ndarray, " question"]:
        """The first row of each question."""
        return self.edges[:-1]

    @property
    def sizes(self) -> Int[np.ndarray, " question"]:
        """How many options each question has."""
        return np.diff(self.edges)

    @property
    def question(self) -> Int[np.ndarray, " row"]:
        """The number of the question that each row belongs to."""
        return self.spread(np.arange(len(self)))

    @property
    def option(self) -> Int[np.ndarray, " row"]:
        """The number of each row within its question."""
        return np.arange(self.n_rows) - self.spread(self.starts)

    def of(self, question: int) -> slice:
        """Return the rows of one question."""
        return slice(int(self.edges[question]), int(self.edges[question + 1]))

    # ------------------------------------------------------------------------------------------- one value a question

    def sum(self, values: Num[np.ndarray, "row ..."]) -> Num[np.ndarray, "question ..."]:
        """Return the sum over the options of each question."""
        return np.add.reduceat(values, self.starts, axis=0) if len(self) else values[:0]

    def mean(self, values: Float[np.ndarray, "row ..."]) -> Float[np.ndarray, "question ..."]:
        """Return the mean over the options of each question, in the type of the values."""
        sizes = self.sizes.reshape(-1, *[1] * (values.ndim - 1)).astype(values.dtype)
        return self.sum(values) / sizes

    def max(self, values: Num[np.ndarray, " row"]) -> Num[np.ndarray, " question"]:
        """Return the largest value of each question."""
        return np.maximum.reduceat(values, self.starts) if len(self) else values[:0]

    def top(self, values: Num[np.ndarray, " row"]) -> Int[np.ndarray, " question"]:
        """Return which option of each question has the largest value; the first among equals."""
        largest = np.where(values == self.spread(self.max(values)), self.option, self.n_rows)
        return np.minimum.reduceat(largest, self.starts) if len(self) else largest

    def row(self, option: Int[np.ndarray, " question"]) -> Int[np.ndarray, " question"]:
        """Return the row of one option of each question, such as its answer."""
        return self.starts + option

    # ------------------------------------------------------------------------------------------------ one value a row

    def one_hot(self, option: Int[np.ndarray, " question"]) -> Float[np.ndarray, " row"]:
        """Return 1 at one option of each question, such as its answer, and 0 at the others."""
        marks = np.zeros(self.n_rows)
        marks[self.row(option)] = 1.0
        return marks

    def spread(self, values: Num[np.ndarray, "question ..."] | Bool[np.ndarray, " question"]) -> np.ndarray:
        """Return a value of each question at every one of its rows."""
        return np.repeat(values, self.sizes, axis=0)

    def centre(self, values: Float[np.ndarray, "row ..."]) -> Float[np.ndarray, "row ..."]:
        """Subtract from each option the mean over the options of its question."""
        return values - self.spread(self.mean(values))

    def normalise(self, values: Float[np.ndarray, " row"]) -> Float[np.ndarray, " row"]:
        """Divide by the sum over the options of the question: what comes out sums to 1."""
        return values / self.spread(self.sum(values))

    def softmax(self, scores: Float[np.ndarray, " row"]) -> Float[np.ndarray, " row"]:
        """Return the softmax over the options of each question."""
        return self.normalise(np.exp(scores - self.spread(self.max(scores))))

    # ------------------------------------------------------------------------------------------------- some questions

    def rows(self, mask: Bool[np.ndarray, " question"]) -> Bool[np.ndarray, " row"]:
        """Return which rows belong to the questions of a mask."""
        return self.spread(mask)

    def rows_of(self, questions: Sequence[int] | Int[np.ndarray, " chosen"]) -> Int[np.ndarray, " chosen_row"]:
        """Return the rows of numbered questions, in the order of the numbers."""
        numbers = np.asarray(questions, dtype=np.int64)
        chosen = self.take(numbers)
        return chosen.spread(self.starts[numbers] - chosen.starts) + np.arange(chosen.n_rows)

    def take(self, questions: Bool[np.ndarray, " question"] | Int[np.ndarray, " chosen"] | slice) -> Options:
        """Return the options of some questions alone, by a mask, by numbers or by a slice."""
        return Options.of_sizes(self.sizes[questions])
