"""What a probe sees of an option: its pooled state, and by name what the authors' published code adds to it. Only arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from coral_lens.ragged import Options
from coral_lens.storage.arrays import allocate, question_chunks, release

INPUTS = ("centred", "rank")
"""`centred`: states minus their mean over the question's options. `rank`: the option's rank by base probability, as one
number and as a one-hot. Both are in the authors' code and not in the paper, so both are off unless asked for; the listwise
lens is always centred, because what all options share cannot tell them apart."""
N_RANKS = 5
"""One-hots of ranks: first to fourth, and one for every later place."""


def build_inputs(
    states: Float[np.ndarray, "row width"],
    p: Float[np.ndarray, " row"],
    options: Options,
    names: Sequence[str],
) -> Float[np.ndarray, "row feature"]:
    """Return what the probe standardises and sees; without names, the states themselves."""
    if not names:
        return states
    width = states.shape[1]
    inputs = allocate(len(states), width + (1 + N_RANKS if "rank" in names else 0))
    for questions, rows in question_chunks(options, inputs.shape[1]):
        chunk = options.take(questions)
        inputs[rows, :width] = chunk.centre(states[rows]) if "centred" in names else states[rows]
        if "rank" in names:
            inputs[rows, width:] = rank_features(p[rows], chunk)
        release(states, inputs)
    return inputs


def rank_features(p: Float[np.ndarray, " row"], options: Options) -> Float[np.ndarray, "row rank"]:
    """Return each option's rank by probability: scaled from 0 (first) to 1 (last), then as a one-hot."""
    ranks = ranks_of(p, options)
    sizes = options.spread(options.sizes)
    return np.column_stack([ranks / (sizes - 1), np.eye(N_RANKS)[np.minimum(ranks, N_RANKS - 1)]])


def ranks_of(p: Float[np.ndarray, " row"], options: Options) -> Int[np.ndarray, " row"]:
    """Return 0 for the most probable option of each question, 1 for the next; equal ones keep their order."""
    order = np.lexsort((np.arange(len(p)), -p, options.question))
    ranks = np.empty(len(p), dtype=np.int64)
    ranks[order] = options.option
    return ranks
