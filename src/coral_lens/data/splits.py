"""Divide questions: by whole groups, never by row, and by seeds alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from coral_lens.errors import CoralError
from coral_lens.records import Question


def split_mask(
    questions: Sequence[Question], *, fraction: float, seed: int, stratified: bool = True
) -> Bool[np.ndarray, " question"]:
    """Return a mask of about `fraction` of the questions, whole groups only; if `stratified`, the same share of every task."""
    mask = np.zeros(len(questions), dtype=bool)
    rng = np.random.default_rng(seed)
    for task in sorted({q.task if stratified else "" for q in questions}):
        members: dict[str, list[int]] = {}
        for i, question in enumerate(questions):
            if question.task == task or not stratified:
                members.setdefault(question.group, []).append(i)
        groups = [members[g] for g in sorted(members)]
        wanted = fraction * sum(map(len, groups))
        taken = 0
        for g in rng.permutation(len(groups)):
            if taken >= wanted:
                break
            mask[groups[g]] = True
            taken += len(groups[g])
    if mask.all() or not mask.any():
        raise CoralError(
            f"{len(questions)} questions in {len({q.group for q in questions})} group(s) cannot be divided into training "
            "and validation; give more questions or more groups."
        )
    return mask


def sample(questions: Sequence[Question], n: int, *, seed: int) -> list[Question]:
    """Return n questions drawn at random in their old order, or all of them if there are no more than n."""
    if n >= len(questions):
        return list(questions)
    chosen = np.sort(np.random.default_rng(seed).choice(len(questions), size=n, replace=False))
    return [questions[i] for i in chosen]
