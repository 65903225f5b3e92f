"""Position bias: the same questions with their options in another order, and how often the answer flips. Needs no label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coral_lens.audit.systems import AuditedSet
from coral_lens.data.leaks import question_keys
from coral_lens.errors import CoralError
from coral_lens.metrics.scores import Score
from coral_lens.records import Question
from coral_lens.report.confidence import wilson_score

Places = tuple[int, int, tuple[int, ...]]
"""A question of one set, the same one of the other, and for each option of the first its place in the second."""


@dataclass(frozen=True)
class Flips:
    """What became of a system's answers when their options were put into another order."""

    system: str
    n_pairs: int
    """Questions that were asked in two orders."""
    flipped: Score
    """Share whose answer is another option than before."""
    moved: float
    """Mean change of an option's probability, in absolute value."""
    first: float
    """By how much more often the answer stands first than the same options do on average over both orders."""


def flips_between(one: AuditedSet, other: AuditedSet) -> list[Flips]:
    """Return how often each system's answer flips between two files of the same questions in other orders."""
    places = same_questions(one.questions, other.questions)
    moved = [pair for pair in places if pair[2] != tuple(range(len(pair[2])))]
    if not moved:
        raise CoralError(
            f"{one.name} and {other.name} have no question in common whose options stand in another order, by ids and texts of "
            "options; give the same questions with their options swapped."
        )
    pairs = [(name, name) for name in one.systems if name in other.systems]
    # a table without a column of systems is called after its file: then the first are meant, as many as there are
    pairs = pairs or list(zip(one.systems, other.systems, strict=False))
    return [flips_of(a, (one, a), (other, b), moved) for a, b in pairs]


def flips_within(audited: AuditedSet) -> list[Flips]:
    """Return the same of a file that asks its questions in several orders; nothing where it asks none twice."""
    keys = question_keys(audited.questions).tolist()
    first: dict[int, int] = {}
    pairs: list[Places] = []
    for i, (question, key) in enumerate(zip(audited.questions, keys, strict=True)):
        if key in first and has_texts(question):
            order = order_of(audited.questions[first[key]], question)
            if order and order != tuple(range(len(order))):
                pairs.append((first[key], i, order))
        first.setdefault(key, i)
    return [flips_of(name, (audited, name), (audited, name), pairs) for name in audited.systems] if pairs else []


def has_texts(question: Question) -> bool:
    """Whether a question says what it asks: without a text and options two of them look the same."""
    return question.text != question.id and not all(o.startswith(("option ", "another ")) for o in question.options)


def same_questions(ones: Sequence[Question], others: Sequence[Question]) -> list[Places]:
    """Return the questions that two files share by id, with where each option went."""
    place = {q.id: i for i, q in enumerate(others)}
    shared = [(i, place[q.id]) for i, q in enumerate(ones) if q.id in place]
    orders = [(i, j, order_of(ones[i], others[j])) for i, j in shared]
    return [(i, j, order) for i, j, order in orders if order]


def order_of(one: Question, other: Question) -> tuple[int, ...]:
    """Return where each option of a question stands in another; nothing where the options are not the same."""
    if sorted(one.options) != sorted(other.options) or len(set(one.options)) < len(one.options):
        return ()
    return tuple(other.options.index(option) for option in one.options)


def flips_of(name: str, one: tuple[AuditedSet, str], other: tuple[AuditedSet, str], pairs: Sequence[Places]) -> Flips:
    """Count the flips of one system."""
    (a, system_a), (b, system_b) = one, other
    p, q = a.systems[system_a], b.systems[system_b]
    flipped, moved, leading, fair = 0, 0.0, 0.0, 0.0
    for i, j, order in pairs:
        before, after = p.probs[p.options.of(i)], q.probs[q.options.of(j)]
        back = after[list(order)]
        flipped += int(before.argmax() != back.argmax())
        moved += float(np.abs(before - back).mean())
        leading += (int(before.argmax() == 0) + int(after.argmax() == 0)) / 2
        fair += 1.0 / len(order)
    n = len(pairs)
    return Flips(name, n, wilson_score(float(flipped), n), moved / n, (leading - fair) / n)
