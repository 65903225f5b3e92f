"""A statement of the paper, and what an interval of ours says about it. Only arithmetic.

A claimed gain agrees or does not where an interval says so, and cannot be told where it holds both. A claim of no gain agrees
where the interval leaves no room for one that matters. Nothing here is about size: 3 points and 30 are both a gain. What is
counted, and has no interval, says that it is a count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from coral_lens.metrics.comparisons import Difference
from coral_lens.report.tables.paper import load_stated_numbers

Said = Literal["agrees", "does not agree", "cannot be told"]
Record = Mapping[str, Any]
NEGLIGIBLE = 0.01
"""Gains below a point are what the paper calls no meaningful improvement."""


@dataclass(frozen=True)
class Claim:
    """One statement of the paper, and what we found."""

    section: str
    """The section of the page that it stands in."""
    statement: str
    paper: str
    """Its number."""
    ours: str
    """Ours, with its interval."""
    said: Said
    sentence: str
    model: str | None = None
    """The model that it was looked at on; None where all models were, together."""


def interval_says(value: Difference | Mapping[str, float], *, better: Literal["up", "down"]) -> Said:
    """Return what an interval of a change says about a claimed gain."""
    low, high = gain_interval(value, better)
    return "agrees" if low > 0 else "does not agree" if high < 0 else "cannot be told"


def no_gain_says(value: Difference | Mapping[str, float], *, better: Literal["up", "down"]) -> Said:
    """Return what an interval of a change says about a claim that there is no gain that matters."""
    low, high = gain_interval(value, better)
    return "agrees" if high < NEGLIGIBLE else "does not agree" if low > 0 else "cannot be told"


def is_nothing(change: Difference) -> bool:
    """Whether nothing was changed at all, on no resample: there is no effect whose size could agree with anything."""
    return change.value == change.low == change.high == 0.0


def gain_interval(value: Difference | Mapping[str, float], better: Literal["up", "down"]) -> tuple[float, float]:
    """Return the interval of a change, turned so that up is better."""
    low, high = (value[end] if isinstance(value, Mapping) else getattr(value, end) for end in ("low", "high"))
    return (low, high) if better == "up" else (-high, -low)


def together(said: Sequence[Said]) -> Said:
    """Return what several intervals say about one claim that none of them has a gain."""
    return next((one for one in ("does not agree", "cannot be told") if one in said), "agrees")


def most_chosen(layers: Sequence[int]) -> int:
    """Return the layer that most folds have chosen, the lowest of several."""
    return max(sorted(set(layers)), key=list(layers).count)


def stated(key: str) -> str:
    """Return a number that the paper states, with its unit."""
    unit = load_stated_numbers()[key].unit
    return f"{number_of(key)} {unit}" if unit in ("%", "points", "heads") else number_of(key)


def number_of(key: str) -> str:
    """Return a number that the paper states."""
    return f"{load_stated_numbers()[key].value:g}"


def between(value: Record | Difference, *, unit: float = 100.0, digits: int = 1) -> str:
    """Return a value with its interval: `+3.2 [+1.0 to +5.1]`."""
    parts = [value[p] if isinstance(value, Mapping) else getattr(value, p) for p in ("value", "low", "high")]
    text = [f"{unit * p:+.{digits}f}".replace("-", "−") for p in parts]
    return f"{text[0]} [{text[1]} to {text[2]}]"
