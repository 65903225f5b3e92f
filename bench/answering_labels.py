"""The rows of `answering.py` with labels: lenses that some questions of the test's own task have adapted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pooled import together

from coral_lens.engine.activations import JoinedStore
from coral_lens.lens.adapt import adapt_on
from coral_lens.lens.artefact import Lens
from coral_lens.lens.folder import load_lens
from coral_lens.methods.interface import QuestionSet
from coral_lens.records import Predictions, predictions_of

DRAWS = 5


def adapted(test: QuestionSet, lenses: Mapping[str, Path], n_labels: int) -> dict[str, Predictions]:
    """Return the answers of adapted lenses, with those of base and temperature to the same questions beside them.

    Each is the mean over some draws of the labels, on the questions that are left; those of one question are a group.
    """
    rows: dict[str, Predictions] = {}
    store = test.states
    assert isinstance(store, JoinedStore)
    if len(store.questions) <= 2 * n_labels:
        return rows
    for name, folder in lenses.items():
        row = f"{name}, {n_labels} labels"
        draws = [one_draw(load_lens(folder), store, n_labels, seed) for seed in range(DRAWS)]
        rows[row] = together([draw.found for draw in draws])
        rows[f"base of {row}"] = together([draw.base for draw in draws])
        rows[f"temperature of {row}"] = together([draw.temperature for draw in draws])
    return rows


class Draw(NamedTuple):
    """Answers to the questions that some labels left: of the adapted lens, the model, temperature, and the lens before that."""

    found: Predictions
    base: Predictions
    temperature: Predictions
    before: Predictions


def one_draw(lens: Lens, store: JoinedStore, n_labels: int, seed: int) -> Draw:
    """Adapt a lens by labels that are drawn under a seed, in whole groups, and answer the other questions."""
    labelled = whole_groups([q.group for q in store.questions], n_labels, seed)
    few, rest = store.take(labelled), store.take(~labelled)
    there = adapt_on(lens, few)
    probs, before = there.apply(rest), lens.apply(rest)[lens.method]
    found, base, cooled = (predictions_of(m, rest, probs[m]) for m in (there.method, "base", "temperature"))
    return Draw(found, base, cooled, predictions_of("before", rest, before))


def whole_groups(groups: Sequence[str], n: int, seed: int) -> np.ndarray:
    """Return which questions are drawn: group by group until there are n, so that none is answered by labels of its article."""
    names, member = np.unique(np.asarray(groups), return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(names))
    before = np.cumsum(np.bincount(member)[order]) - np.bincount(member)[order]
    return np.isin(member, order[before < n])
