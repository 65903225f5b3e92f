"""Texts that recur from request to request, such as a document or long instructions, and how much of a new one is known.

A text that came once is remembered by its tokens alone; when it comes again, what both share is computed as a cache and kept
(`engine.scoring.PrefixTable`), and from the third time on it is known. Nothing is written to a disk.
"""

from __future__ import annotations

from collections.abc import Sequence

from coral_lens.engine.planned import KeptPrefixes
from coral_lens.engine.scoring import PrefixTable
from coral_lens.engine.trees import common_length, shareable_context
from coral_lens.records import Prompt

STEP = 64
"""A new prefix is a multiple of so many tokens, and that long at least: texts that differ in their last words then share it."""
RECENT = 64
"""Contexts that are remembered by their tokens."""


class RecurringPrefixes:
    """Says of prompts which of their first tokens are kept; used by the one thread that owns the model."""

    def __init__(self, most_bytes: int) -> None:
        self._table = PrefixTable(most_bytes)
        self._recent: dict[tuple[int, ...], None] = {}

    @property
    def n_bytes(self) -> int:
        """Size of all that is kept."""
        return self._table.n_bytes

    def kept(self, prompts: Sequence[Prompt]) -> tuple[KeptPrefixes, tuple[int, ...]]:
        """Return what is to be kept of prompts, and how many tokens of each are known already."""
        contexts = [shareable_context(prompt) or () for prompt in prompts]
        known = tuple(self._table.longest(context) for context in contexts)
        lengths = tuple(self._length(c, n) for c, n in zip(contexts, known, strict=True))
        for context in contexts:
            self._remember(context)
        # where more than what is known recurs, the longer prefix is computed as a whole
        return KeptPrefixes(self._table, lengths), tuple(
            n if n == length else 0 for n, length in zip(known, lengths, strict=True)
        )

    def _length(self, context: tuple[int, ...], known: int) -> int:
        """Return how many tokens of a context are to be kept: what is known, or clearly more if more of it has been seen."""
        if len(context) <= STEP:
            return 0
        seen = max((common_length(context, other) for other in self._recent), default=0)
        if context in self._recent:
            seen = len(context) - 1
        longer = seen // STEP * STEP
        return longer if longer >= known + STEP else known

    def _remember(self, context: tuple[int, ...]) -> None:
        if len(context) > STEP:
            self._recent.pop(context, None)
            self._recent[context] = None
            while len(self._recent) > RECENT:
                del self._recent[next(iter(self._recent))]
