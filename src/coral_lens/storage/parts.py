"""One of several equal shares of some work, such as 3/16: which pieces it has. Knows nothing of the work."""

from __future__ import annotations

import re
from dataclasses import dataclass

from coral_lens.errors import CoralError

MOST_PARTS = 99_999
"""More processes than that work on nothing together."""


@dataclass(frozen=True)
class Part:
    """A share of the pieces of some work: every n-th of them, so that each share is as good a sample of them as any."""

    number: int
    """The first is 1."""
    of: int
    """How many shares there are."""
    shift: int = 0
    """So many pieces of other work were dealt out before: small ones then do not all fall to the first part."""

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of <= MOST_PARTS:
            raise CoralError(f"There is no part {self}: parts of {self.of} are 1/{self.of} to {self.of}/{self.of}.")

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def name(self) -> str:
        """What files call it."""
        return f"{self.number}-of-{self.of}"

    def share(self, n_pieces: int) -> range:
        """Return the numbers of its pieces."""
        return range((self.number - 1 - self.shift) % self.of, n_pieces, self.of)

    def refuse_empty(self, n_pieces: int, kind: str = "shards") -> None:
        """Refuse to divide work into more parts than it has pieces."""
        if self.of > n_pieces:
            raise CoralError(
                f"There are more parts than {kind}: --part {self} of {n_pieces} {kind}; use at most {n_pieces} parts."
            )


def parse_part(text: str, option: str = "--part") -> Part:
    """Return the part that `3/16` names."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text, re.ASCII)
    if match is None:
        raise CoralError(f"{option} must look like 3/16. Got {text!r} instead.")
    number, of = int(match[1]), int(match[2])
    if not 1 <= number <= of <= MOST_PARTS:
        raise CoralError(
            f"{option} must lie between 1/n and n/n, for at most {MOST_PARTS:,} parts. Got {text!r} instead."
        )
    return Part(number, of)
