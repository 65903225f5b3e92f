"""Bars that a measurement is held against: each is a line that says what was found, what was wanted, and whether it was met."""

from __future__ import annotations

from typing import NamedTuple


class Bar(NamedTuple):
    """A number that must not be passed, x 100 where it is of a score."""

    what: str
    limit: float
    at_least: bool = False
    """Whether what is found must be at least the limit; else at most."""

    def line(self, found: float, *, of: str = "") -> str:
        """Return the line of what was found, which counts as it is shown; what is missing (nan) was not met."""
        met = round(found, 1) >= self.limit if self.at_least else round(found, 1) <= self.limit
        wanted = f"at {'least' if self.at_least else 'most'} {self.limit:+.1f}"
        return f"{'met   ' if met else 'missed'}  {self.what}{of and f', {of}'}: {found:+.1f} (wanted: {wanted})"
