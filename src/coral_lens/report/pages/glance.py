"""The one picture at the head of a report: what changed on each task, with intervals. Only places marks; HTML draws them.

It is no matplotlib figure, because it must fit a phone, a wide screen, paper and a dark page alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coral_lens.metrics.scores import METRICS
from coral_lens.report.headline import MEANINGS, Change, Glance
from coral_lens.report.tables.averages import HEADLINE
from coral_lens.report.tables.clear import RULE
from coral_lens.report.tables.formats import interval_text, percent


@dataclass(frozen=True, slots=True)
class Mark:
    """A change as it is drawn: places in percent of the width, where 50 is no change and more is better."""

    label: str
    before: str
    after: str
    change: str
    """The difference with its interval."""
    at: float
    low: float
    high: float
    look: str
    """`good`, `bad` or `even`."""
    clear: bool
    sign: str
    """The mark before the words, which says the same without colour."""
    words: str


def glance_parts(tasks: Sequence[Glance]) -> dict[str, Any]:
    """Return the heads of the columns, and for each task its marks; each metric has one scale."""
    widest = {m: max((span(c) for t in tasks for c in t.changes if c.metric == m), default=0.0) for m in HEADLINE}
    return {
        "heads": [(METRICS[m].label, MEANINGS[m]) for m in HEADLINE],
        "rows": [(t, [mark_of(c, widest[c.metric]) for c in t.changes]) for t in tasks],
        "rule": RULE,
    }


def span(change: Change) -> float:
    """Return how far from 0 a change and its interval reach."""
    d = change.difference
    return max(abs(x) for x in (d.value, d.low, d.high))


def mark_of(change: Change, widest: float) -> Mark:
    """Return where a change is drawn: gains to the right, whatever the metric."""
    d, verdict = change.difference, change.verdict
    towards = 1 if METRICS[change.metric].higher_is_better else -1
    at, *ends = (round(50 + 48 * towards * x / (widest or 1.0), 1) for x in (d.value, d.low, d.high))
    told = verdict.clear or verdict.leans
    return Mark(
        label=METRICS[change.metric].label,
        before=percent(change.before),
        after=percent(change.after),
        change=f"{percent(d.value, sign=True)} ({interval_text(d.low, d.high, sign=True)})",
        at=at,
        low=min(ends),
        high=max(ends),
        look="even" if not told else "good" if verdict.sign > 0 else "bad",
        clear=verdict.clear,
        sign=verdict.mark,
        words=verdict.words,
    )
