"""What is audited: the answers of one or several systems to the same questions, wherever they were read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import numpy as np
from jaxtyping import Bool

from coral_lens.errors import CoralError
from coral_lens.ragged import Options
from coral_lens.records import Predictions, Question, groups_of, ordered_of, targets_of

CONFIDENCE_ONLY = ("the answer", "another")
"""The options of a question of which only a confidence is known."""
MOST_OFF = 0.01
"""By so much probabilities may miss a sum of 1, as rounded ones do; they are then divided by their sum."""


@dataclass(frozen=True)
class AuditedSet:
    """Questions with their labels, and what each system says of them."""

    name: str
    questions: tuple[Question, ...]
    systems: dict[str, Predictions]
    """By name; the same questions in the same order."""
    top_only: bool = False
    """Whether only the confidence in the answer is known: scores of whole distributions then mean nothing."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The digest of each file that it was read from."""
    tests: tuple[str, ...] = ()
    """The test set of each question, where there are several; empty where there is one."""

    def take(self, mask: Bool[np.ndarray, " question"]) -> AuditedSet:
        """Return some of the questions alone."""
        kept = tuple(q for q, there in zip(self.questions, mask, strict=True) if there)
        tests = tuple(compress(self.tests, mask)) if self.tests else ()
        return replace(self, questions=kept, systems={n: p.take(mask) for n, p in self.systems.items()}, tests=tests)

    def column(self, name: str) -> list[str]:
        """Return the value of a column for each question, as text; a question that has none is `(none)`."""
        rows = [q.columns for q in self.questions]
        if not any(name in row for row in rows):
            known = sorted({column for row in rows for column in row})
            raise CoralError(f"There is no column {name!r} in {self.name}; it has {', '.join(known) or 'none'}.")
        return ["(none)" if row.get(name) in (None, "") else str(row[name]) for row in rows]


def predictions_of_rows(
    system: str, task: str, questions: Sequence[Question], probs: Sequence[Sequence[float]]
) -> Predictions:
    """Return the probabilities of a system for questions, which are made to sum to 1 exactly."""
    options = Options.of_sizes([len(p) for p in probs])
    flat = np.array([x for p in probs for x in p], dtype=np.float64)
    return Predictions(
        method=system,
        model=system,
        task=task,
        split="",
        ids=tuple(q.id for q in questions),
        answers=np.array([q.answer for q in questions], dtype=np.int64),
        offsets=options.edges,
        probs=options.normalise(flat),
        groups=groups_of(questions),
        targets=targets_of(questions),
        ordered=ordered_of(questions),
    )


def refuse_no_distribution(probs: Any, where: str) -> list[float]:
    """Return the probabilities of a row as numbers, or refuse what is no distribution."""
    try:
        values = [float(x) for x in probs]
    except (TypeError, ValueError):
        raise CoralError(f"{where}: a list of probabilities is expected. Got {str(probs)[:80]!r} instead.") from None
    total = sum(values)
    if len(values) < 2 or not all(0.0 <= x <= 1.0 + MOST_OFF for x in values) or not abs(total - 1.0) <= MOST_OFF:
        raise CoralError(
            f"{where}: two or more probabilities from 0 to 1 that sum to 1 are expected. Got "
            f"{[round(x, 4) for x in values][:8]}, which sum to {total:.4g}."
        )
    return values


def joined(sets: Sequence[AuditedSet]) -> AuditedSet:
    """Return several systems on the questions that all of them answered, in the order of the first."""
    first, *others = sets
    if not others:
        return first
    shared = set.intersection(*({q.id for q in one.questions} for one in sets))
    if not shared:
        raise CoralError(
            f"{first.name} and {others[0].name} have no question in common, by their ids; give them the same ids to compare them."
        )
    order = [q.id for q in first.questions if q.id in shared]
    systems: dict[str, Predictions] = {}
    for one in sets:
        place = {q.id: i for i, q in enumerate(one.questions)}
        for name, predictions in one.systems.items():
            names = (name, *(f"{name} ({k})" for k in range(2, len(sets) + 1)))
            label = next(free for free in names if free not in systems)
            systems[label] = predictions.take(np.array([place[i] for i in order])).renamed(label)
    by_id = {q.id: q for q in first.questions}
    refuse_other_labels(systems)
    sources = {path: digest for one in sets for path, digest in one.sources.items()}
    name = " and ".join(dict.fromkeys(one.name for one in sets))
    return AuditedSet(name, tuple(by_id[i] for i in order), systems, any(one.top_only for one in sets), sources)


def refuse_other_labels(systems: Mapping[str, Predictions]) -> None:
    """Refuse systems whose labels differ: they were not asked the same questions, or their options have another order."""
    (name, first), *others = systems.items()
    for other, predictions in others:
        different = np.flatnonzero(predictions.answers != first.answers)
        if len(different):
            raise CoralError(
                f"{name!r} and {other!r} cannot be compared: {len(different)} questions have other labels in one than in the "
                f"other, first {first.ids[different[0]]!r}; if the options were only put into another order, give that file as "
                "--swap."
            )
