"""Parts of stores for fitting and for testing, and a fitted candidate on questions it has not seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from coral_lens.choosing import Candidate, moved
from coral_lens.errors import CoralError
from coral_lens.inputs import build_inputs
from coral_lens.joined import JoinedStore, Part, Scored, predictions_of
from coral_lens.records import FAMILY, Predictions, Question, family_of
from coral_lens.scratch import side_by_side
from coral_lens.splits import split_mask
from coral_lens.steering import BaseRule, base_probs
from coral_lens.store import ActivationStore

HELD_OUT = 0.3
"""Share of each task, by whole groups, that is only ever tested."""


def tasks_of(stores: Sequence[ActivationStore]) -> list[str]:
    """Return what the tasks are called, in order."""
    return list(dict.fromkeys(name for names in task_names(stores) for name in names))


def task_names(stores: Sequence[ActivationStore]) -> list[list[str]]:
    """Return what the task of each question is called, store by store.

    A family such as MMLU's subjects is one task. Where stores share a name, as all of own files do, each is a task of its own,
    and its folder tells it from the others.
    """
    found = [family_names(store.questions) for store in stores]
    shared = Counter(name for names in found for name in set(names))
    folders = [store.folder.name for store in stores]
    for i, store in enumerate(stores):
        folder = folders[i] if folders.count(folders[i]) == 1 else str(store.folder)
        found[i] = [name if shared[name] == 1 else f"{name} ({folder})" for name in found[i]]
    twice = [name for name, n in Counter(name for names in found for name in set(names)).items() if n > 1]
    if twice:
        raise CoralError(f"Two stores are both {twice[0]}; give every --store once.")
    return found


def family_names(questions: Sequence[Question]) -> list[str]:
    """Return the task of each question, or its family where a store holds several of one."""
    families: dict[str, set[str]] = {}
    for q in questions:
        families.setdefault(family_of(q.task), set()).add(q.task)
    large = {name for name, members in families.items() if len(members) >= FAMILY}
    return [family if (family := family_of(q.task)) in large else q.task for q in questions]


def parts_of_task(
    stores: Sequence[ActivationStore], task: str | None, *, held_out: bool, limit: int | None = None, seed: int = 0
) -> JoinedStore:
    """Return the questions of a task, or of all, that are tested or that are not; of the latter at most `limit`, drawn."""
    masks = []
    for store, names in zip(stores, task_names(stores), strict=True):
        mine = np.array([task in (None, name) for name in names])
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
    states = side_by_side(store.layer, recipe.layers)
    inputs = build_inputs(states, p, store.table.offsets, recipe.inputs)
    return parts.scale * parts.probe.predict(parts.standardiser(inputs))
