"""The parts of a training mixture that are left out in turn, to see what a lens is worth on what it was not fitted on.

A part is a task, or a cluster of questions where there is one task only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import compress

import numpy as np
from jaxtyping import Bool, Float

from coral_lens.data.own_files import is_file_task
from coral_lens.records import Question
from coral_lens.storage.arrays import row_chunks

FEWEST_IN_PART = 30
"""Questions that a part of the mixture must have to be left out as a whole."""
MOST_DOMAINS = 6
"""Parts of the mixture that are left out in turn; with more tasks, several are left out together."""
N_CLUSTERS = 4
"""Parts that a mixture of one task is divided into, by the places of its questions."""
CLUSTER = "cluster "
"""With this begins the name of a part that is no task."""
MOST_CLUSTERED = 10_000
"""Questions at most that find these parts; the others are then put to the nearest."""


def domains_of(questions: Sequence[Question], places: Float[np.ndarray, "question width"], *, seed: int) -> list[str]:
    """Return the part of the mixture that each question belongs to: its task, or a cluster if there is one task only.

    Small tasks are put together, and so are tasks beyond the most that are left out in turn.
    """
    tasks = [q.task for q in questions]
    counts = {task: tasks.count(task) for task in sorted(set(tasks))}
    large = [task for task, n in counts.items() if n >= FEWEST_IN_PART]
    if len(large) >= 2:
        order = {task: i for i, task in enumerate(large)}
        return [
            f"part {order.get(task, 0) % MOST_DOMAINS}"
            if len(large) > MOST_DOMAINS
            else task
            if task in order
            else large[0]
            for task in tasks
        ]
    return clusters_of(places, seed=seed)


def file_places(questions: Sequence[Question], train: Bool[np.ndarray, " question"]) -> tuple[str, ...]:
    """Return the training task at each place of the shift model; empty unless two of them are files, which nothing else is named.

    Empty also where a place is not of one task: small tasks, and many, were put together.
    """
    tasks = [q.task for q in questions]
    counts = Counter(tasks)
    if min(counts.values()) < FEWEST_IN_PART or len(counts) > MOST_DOMAINS or sum(map(is_file_task, counts)) < 2:
        return ()
    return tuple(sorted(set(compress(tasks, train))))


def clusters_of(places: Float[np.ndarray, "question width"], *, seed: int) -> list[str]:
    """Return a cluster for each question, by its place; where questions are many, a part of them finds the clusters."""
    from sklearn.cluster import KMeans

    n = max(2, min(N_CLUSTERS, len(places) // FEWEST_IN_PART))
    every = -(-len(places) // MOST_CLUSTERED)
    drawn = places[::every]
    mean, scale = drawn.mean(axis=0), np.maximum(drawn.std(axis=0), 1e-6)
    clusters = KMeans(n, n_init=4, random_state=seed).fit((drawn - mean) / scale)
    if every == 1:
        return [f"{CLUSTER}{c}" for c in clusters.labels_]
    return [
        f"{CLUSTER}{c}" for rows in row_chunks(*places.shape) for c in clusters.predict((places[rows] - mean) / scale)
    ]
