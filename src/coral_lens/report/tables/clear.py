"""The one rule by which a difference is called clear, and the words for it. Every table, sentence and figure asks here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coral_lens.metrics.comparisons import Difference
from coral_lens.metrics.scores import metric_named

LEVEL = 0.05
RULE = (
    "Clear means that the paired test of a difference gives p < 0.05 after Holm's correction for all tests of its table. "
    "Intervals are of 95 % and not corrected: a difference whose interval leaves out 0 may still be called not clear."
)
"""The rule as readers are told it."""
MARKS = {1: ("▲", "△"), -1: ("▼", "▽"), 0: ("", "")}
"""Of a gain, a loss and neither: the mark where it is clear, and where only its interval leaves out 0."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What may be said of one difference."""

    sign: int
    """1 where the value got better, -1 where it got worse, 0 where it is the same or unknown."""
    clear: bool
    leans: bool
    """Whether it is not clear although its interval leaves out 0."""
    words: str

    @property
    def said(self) -> int:
        """The sign where it is clear, else 0."""
        return self.sign if self.clear else 0

    @property
    def mark(self) -> str:
        """One character; nothing where neither test nor interval tells the difference from 0."""
        clear, leaning = MARKS[self.sign]
        return clear if self.clear else leaning if self.leans else ""


def verdict_of(difference: Difference, p_holm: float | None, *, metric: str, n_tests: int) -> Verdict:
    """Judge a difference in a metric by its corrected p-value; None where the metric must not be tested."""
    up = (difference.value > 0) - (difference.value < 0)
    sign = up if metric_named(metric).higher_is_better else -up
    word = "better" if sign > 0 else "worse"
    if sign and p_holm is not None and p_holm < LEVEL:
        return Verdict(sign, True, False, f"clearly {word}")
    leans = bool(sign) and (difference.low > 0 or difference.high < 0)
    if p_holm is None:
        few = f"seems {word}, but there are too few questions to test it"
        return Verdict(sign, False, leans, few if leans else "not clear: too few questions")
    return Verdict(sign, False, leans, f"not clear after correcting for {n_tests} tests" if leans else "not clear")


def overall(verdicts: Iterable[Verdict]) -> str:
    """Return one word for several metrics: gains count where they are clear, losses also where they only seem so."""
    known = list(verdicts)
    better = any(v.clear and v.sign > 0 for v in known)
    worse = any(v.clear and v.sign < 0 for v in known)
    seems_worse = any(v.leans and v.sign < 0 for v in known)
    if better:
        return "mixed" if worse or seems_worse else "better"
    return "worse" if worse else "seems worse" if seems_worse else "not clear"
