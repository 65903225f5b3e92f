"""A question's text taken apart: what is asked, and the options that it lists under letters. Never scores, never asks."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass

LABEL = re.compile(r"(?:Question|Q):\s*")
"""What may stand before a question's own text."""
ENDING = re.compile(r"\n\s*(?:Answer|A)\s*:\s*\Z")
"""What may stand below it."""


@dataclass(frozen=True)
class Listed:
    """A question's text, taken apart."""

    stem: str
    """What comes before the list."""
    texts: tuple[str, ...]
    """The options as they are listed, without their letters."""
    mark: str
    """What follows a letter: `. ` or `) `."""
    tail: str
    """What comes after the list, such as `Answer:`."""

    def text(self) -> str:
        """Put it together again."""
        letters = string.ascii_uppercase
        lines = [f"{letter}{self.mark}{text}" for letter, text in zip(letters, self.texts, strict=False)]
        return "\n".join([self.stem, *lines, self.tail])


def take_apart(text: str, n_options: int) -> Listed | None:
    """Return the parts of a text that lists so many options under letters and ends in one more line; None if it does not."""
    letters = string.ascii_uppercase[:n_options]
    lines = [rf"\n{letter}(?P=mark)(.*?)" for letter in letters[1:]]
    # the stem is as long as possible: a question may quote a list of its own
    pattern = rf"(.*)\n{letters[0]}(?P<mark>[.)]\s+)(.*?){''.join(lines)}\n([^\n]*)"
    found = re.fullmatch(pattern, text, re.DOTALL)
    if found is None:
        return None
    stem, mark, *texts, tail = found.groups()
    return Listed(stem, tuple(texts), mark, tail)


def asked_of(text: str, options: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return what is asked and what can be answered, without the words that a template puts around them.

    Options that are letters stand for what the text lists under them.
    """
    bare = ENDING.sub("", text)
    letters = tuple(string.ascii_uppercase[: len(options)])
    parts = take_apart(f"{bare}\n", len(options)) if options == letters else None
    stem, shown = (parts.stem, parts.texts) if parts else (bare, options)
    return stem[found.end() :] if (found := LABEL.match(stem)) else stem, shown
