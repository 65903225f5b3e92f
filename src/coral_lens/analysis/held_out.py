"""Parts of stores for fitting and for testing, and a fitted candidate on questions it has not seen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from coral_lens.choosing import Candidate, moved
from coral_lens.errors import CoralError
from coral_lens.inputs import build_inputs
from coral_lens.joined import JoinedStore, Part, Scored, predictions_of
from coral_lens.lens import Lens
from coral_lens.records import Predictions
from coral_lens.splits import split_mask
from coral_lens.steering import BaseRule, base_probs
from coral_lens.store import ActivationStore

HELD_OUT = 0.3
"""Share of each task, by whole groups, that is only ever tested."""


def tasks_of(stores: Sequence[ActivationStore]) -> list[str]:
    """Return the tasks that the questions are of, in order."""
    return list(dict.fromkeys(q.task for store in stores for q in store.questions))


def parts_of_task(
    stores: Sequence[ActivationStore], task: str | None, *, held_out: bool, limit: int | None = None, seed: int = 0
) -> JoinedStore:
    """Return the questions of a task, or of all, that are tested or that are not; of the latter at most `limit`, drawn."""
    masks = []
    for store in stores:
        names = np.array([q.task for q in store.questions])
        mine = np.ones(len(names), dtype=bool) if task is None else names == task
        masks.append(mine & (split_mask(store.questions, fraction=HELD_OUT, seed=0) == held_out))
    if limit is not None:
        flat = np.concatenate(masks)
        at = np.flatnonzero(flat)
        flat[np.random.default_rng(seed).permutation(at)[limit:]] = False
        masks = np.split(flat, np.cumsum([len(m) for m in masks])[:-1])
    parts = [Part(store, mask) for store, mask in zip(stores, masks, strict=True) if mask.any()]
    if not parts:
        raise CoralError(f"No question of {task} is left to {'test' if held_out else 'fit'} on; give more questions.")
    return JoinedStore(parts)


def kept(store: JoinedStore, mask: Bool[np.ndarray, " question"]) -> JoinedStore:
    """Return the marked questions of joined parts."""
    parts, start = [], 0
    for part in store.parts:
        keep, at = part.keep.copy(), np.flatnonzero(part.keep)
        keep[at[~mask[start : start + len(at)]]] = False
        start += len(at)
        parts.append(Part(part.store, keep))
    return JoinedStore([part for part in parts if part.keep.any()])


def unseen(lens: Lens, store: JoinedStore) -> JoinedStore:
    """Return the questions that a lens was not fitted on under another id: tasks share some."""
    seen = lens.is_seen(store.questions)
    return kept(store, ~seen) if seen.any() else store


def applied(
    candidate: Candidate, store: Scored, gamma: float, base: BaseRule, method: str = "candidate"
) -> Predictions:
    """Return what a fitted candidate makes of other questions at some strength."""
    parts, recipe = candidate.parts, candidate.recipe
    assert parts is not None, "a candidate of one round keeps its fit"
    p = base_probs(store.table, base)
    scores = scores_on(candidate, store, p)
    logs = parts.base_weight * np.log(np.maximum(p, 1e-300))
    return predictions_of(method, store, moved(recipe.rule, p, logs, scores, store.table.offsets, gamma))


def scores_on(candidate: Candidate, store: Scored, p: Float[np.ndarray, " row"]) -> Float[np.ndarray, " row"]:
    """Return what a candidate's probe says of every option."""
    parts, recipe = candidate.parts, candidate.recipe
    assert parts is not None, "a candidate of one round keeps its fit"
    states = np.concatenate([store.layer(layer) for layer in recipe.layers], axis=1)
    inputs = build_inputs(states, p, store.table.offsets, recipe.inputs)
    return parts.scale * parts.probe.predict(parts.standardiser(inputs))
