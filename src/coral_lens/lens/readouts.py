"""Read-outs: which of a model's states stand for an option. A lens reads its layers through one of them.

    answer        the mean over the option's own tokens, which are scored (the paper's)
    less-letter   the same less the mean state of its letter: what is left is not which letter it is
    listed        the mean over the option's text where the prompt lists it; an option that is not listed, at its own tokens
    context       that of `listed` times the state of the last token before the options, column by column: whether they match

The last three are for tasks whose letters are scored, where an option's own tokens are the same in every question. A new one is
an entry of `READ_OUTS`.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from coral_lens.data.settings import Style
from coral_lens.engine.activations import JoinedStore, ScoredShards
from coral_lens.engine.listings import lists_options
from coral_lens.engine.settings import StatePlace
from coral_lens.errors import CoralError
from coral_lens.lens.settings import ReadName
from coral_lens.records import Question, Scored
from coral_lens.storage.arrays import allocate, release, row_chunks

if TYPE_CHECKING:
    from coral_lens.engine.model import Model

States = Float[np.ndarray, "row width"]
Letters = Float[np.ndarray, "letter width"]
"""The mean state of each letter, and in the last row that of all."""


class ReadOut(NamedTuple):
    """How the states of an option are put together."""

    places: tuple[StatePlace, ...]
    """Where the model is read; always at the options' own tokens, too."""
    states: Callable[[Scored, int], States]
    less_letter: bool = False
    """Whether the mean state of its letter is subtracted."""


def matched(store: Scored, layer: int) -> States:
    """Return the states of listed options times that of the last token before them."""
    states, context = store.layer(layer, "listed"), store.layer(layer, "context")
    out = allocate(*states.shape)
    for rows in row_chunks(*states.shape):
        out[rows] = states[rows] * context[rows]
        release(states, context, out)
    return out


READ_OUTS: dict[ReadName, ReadOut] = {
    "answer": ReadOut(("answer",), lambda store, layer: store.layer(layer)),
    "less-letter": ReadOut(("answer",), lambda store, layer: store.layer(layer), less_letter=True),
    "listed": ReadOut(("answer", "listed"), lambda store, layer: store.layer(layer, "listed")),
    "context": ReadOut(("answer", "listed", "context"), matched),
}


def places_of(name: str) -> tuple[StatePlace, ...]:
    """Return where the model is read for a read-out; for `auto`, everywhere."""
    return READ_OUTS["context"].places if name == "auto" else READ_OUTS[name].places  # type: ignore[index]


def available(store: Scored) -> list[ReadName]:
    """Return the read-outs that a store can give."""
    places = store.places if isinstance(store, ScoredShards | JoinedStore) else ("answer",)
    return [name for name, read_out in READ_OUTS.items() if set(read_out.places) <= set(places)]


# ------------------------------------------------------------------------------------------------------------- letters


def letter_numbers(questions: Sequence[Question], *, lettered: bool) -> Int[np.ndarray, " row"]:
    """Return for each option the number of its letter, or -1 where its text is scored; `lettered`: the style asks by letters."""
    numbers: list[int] = []
    for question in questions:
        n = len(question.options)
        letters = [option.strip() for option in question.options] == list(string.ascii_uppercase[:n])
        numbers += range(n) if lettered or letters else [-1] * n
    return np.array(numbers, dtype=np.int64)


def fit_letters(states: States, numbers: Int[np.ndarray, " row"]) -> Letters:
    """Return the mean state of each letter, and of all of them; labels have no part in it."""
    n_letters = int(numbers.max(initial=-1)) + 1
    total, count = np.zeros((n_letters + 1, states.shape[1])), np.zeros(n_letters + 1)
    for rows in row_chunks(*states.shape):
        for letter in range(n_letters):
            here = states[rows][numbers[rows] == letter]
            total[letter] += here.sum(axis=0, dtype=np.float64)
            count[letter] += len(here)
        release(states)
    total[-1], count[-1] = total[:-1].sum(axis=0), count[:-1].sum()
    return (total / np.maximum(count, 1.0)[:, None]).astype(np.float32)


def subtract_letters(states: States, numbers: Int[np.ndarray, " row"], letters: Letters) -> States:
    """Return the states less the mean state of their letter; of a letter that is not known, or of none, less that of all."""
    last = len(letters) - 1
    at = np.where((numbers >= 0) & (numbers < last), numbers, last)
    out = allocate(*states.shape)
    for rows in row_chunks(*states.shape):
        out[rows] = states[rows] - letters[at[rows]]
        release(states, out)
    return out


@dataclass(frozen=True)
class Reading:
    """A read-out of the states of a lens's layers, with what it knows of letters."""

    name: ReadName = "answer"
    letters: Float[np.ndarray, "layer letter width"] | None = None
    """The mean states of letters at each layer that the lens reads; None where they are not needed."""
    lettered: bool = False
    """Whether the style of the lens asks by letters."""

    def states(self, store: Scored, layer: int, place: int = 0) -> States:
        """Return the states of a layer, which is the lens's layer number `place`."""
        states = READ_OUTS[self.name].states(store, layer)
        if self.letters is None:
            return states
        numbers = letter_numbers(store.questions, lettered=self.lettered)
        return subtract_letters(states, numbers, self.letters[place])


def training_layers(store: Scored, name: ReadName, *, lettered: bool) -> Callable[[int], States]:
    """Return what gives the states of a layer of training questions, their letters' means subtracted if that is asked for."""
    read_out = READ_OUTS[name]

    def layer(number: int) -> States:
        states = read_out.states(store, number)
        if not read_out.less_letter:
            return states
        numbers = letter_numbers(store.questions, lettered=lettered)
        return subtract_letters(states, numbers, fit_letters(states, numbers))

    return layer


def reading_of(store: Scored, name: ReadName, layers: Sequence[int], *, lettered: bool) -> Reading:
    """Return the read-out of a lens that was fitted on a store and reads these layers."""
    if not READ_OUTS[name].less_letter:
        return Reading(name, lettered=lettered)
    numbers = letter_numbers(store.questions, lettered=lettered)
    means = [fit_letters(READ_OUTS[name].states(store, layer), numbers) for layer in layers]
    return Reading(name, np.stack(means), lettered)


def refuse_without_lists(
    name: ReadName | Literal["auto"], model: Model, questions: Sequence[Question], style: Style
) -> None:
    """Refuse a read-out of listed options where no prompt lists any: a lens of their own tokens would be called by its name.

    Where some prompts do, the options of the others are read at their own tokens, as those of any question that it answers.
    """
    if name in ("answer", "auto"):
        return
    if name == "less-letter":
        found = bool((letter_numbers(questions, lettered=style.kind == "letters") >= 0).any())
    else:
        found = any(lists_options(question, style, model) for question in questions)
    if not found:
        raise CoralError(
            f"`--read {name}` is for prompts that list their options under letters, and none of these {len(questions)} "
            "does; list them with `--style letters`, or leave --read out."
        )
