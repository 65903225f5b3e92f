"""The text of a question taken apart: what is asked, the options that it lists, and what a template puts around."""

from __future__ import annotations

import re
import string
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wording:
    """A question's text taken apart: what is asked, the options that it lists under letters, and what a template puts around."""

    label: str
    """What stands before the question, such as `Question: `; mostly nothing in a file."""
    stem: str
    """What is asked."""
    listed: tuple[str, ...]
    """The options as they are listed, without their letters; empty where the text lists none."""
    mark: str
    """What follows a letter of the list: `. ` or `) `."""
    ending: str
    """What comes last, from its line break on, such as that of `Answer:`."""

    @property
    def text(self) -> str:
        """The whole text, put together again."""
        return self.label + self.body + self.ending

    @property
    def body(self) -> str:
        """The stem and the list."""
        lines = [
            f"{letter}{self.mark}{text}" for letter, text in zip(string.ascii_uppercase, self.listed, strict=False)
        ]
        return "\n".join([self.stem, *lines])

    @property
    def bare(self) -> str:
        """The text without its label and without a cue for an answer."""
        return without_cue(self.body + self.ending)


LABEL = re.compile(r"(?:Question|Q):\s*")
CUES = ("Answer", "A")
"""What asks for an answer at the end of a text, on a line of its own and before a colon."""
LISTED = re.compile(r"\n(?=([A-Z])([.)]\s{1,32}))")
"""Where a line begins like one of a list under letters: its letter, and the mark after it."""


def take_apart(text: str, options: Sequence[str]) -> Wording:
    """Return the parts of a question's text; a list is looked for where the options are its letters."""
    cue = cue_of(text)
    body = text.removesuffix(cue)
    stem, mark, listed = listed_parts(body, options) or (body, "", ())
    label = match[0] if (match := LABEL.match(stem)) else ""
    if listed and not cue:  # the last line may ask for an answer in other words
        last, newline, line = listed[-1].rpartition("\n")
        listed, cue = (*listed[:-1], last if newline else line), newline and newline + line
    return Wording(label, stem.removeprefix(label), listed, mark, cue)


def cue_of(text: str) -> str:
    """Return what asks for an answer at the end of a text, from its line break on; empty where nothing does.

    Trap: strangers' texts come here. A pattern would look at a long run of line breaks once from each of them.
    """
    asked = text.rstrip()
    word = asked.removesuffix(":").rstrip() if asked.endswith(":") else ""
    for cue in CUES:
        before = word.removesuffix(cue)
        space = before[len(before.rstrip()) :]
        if before != word and "\n" in space:
            return text[len(before) - len(space) + space.index("\n") :]
    return ""


def without_cue(text: str) -> str:
    """Return a text without what asks for an answer at its end."""
    return text.removesuffix(cue_of(text))


def listed_parts(text: str, options: Sequence[str]) -> tuple[str, str, tuple[str, ...]] | None:
    """Return stem, mark and listed options of a text that ends in a list under the letters that are its options.

    Trap: strangers' texts come here. A pattern of the whole list would try every line under A with every line under B and so on.
    """
    letters = string.ascii_uppercase[: len(options)]
    if [option.strip() for option in options] != list(letters):
        return None
    # the stem is as long as possible, since a question may quote a list of its own; then the mark is
    found = max(
        ((starts[0], len(mark), starts) for mark, lines in lines_by_mark(text, letters).items()
         if (starts := last_list(lines, width=2 + len(mark)))), default=None,
    )  # fmt: skip
    if found is None:
        return None
    first, n_mark, starts = found
    width = 2 + n_mark
    ends = (*starts[1:], len(text))
    listed = tuple(text[start + width : end] for start, end in zip(starts, ends, strict=True))
    return text[:first], text[first + 2 : first + width], listed


def lines_by_mark(text: str, letters: str) -> dict[str, list[list[int]]]:
    """Return for every mark that may follow a letter, and then for each letter, where its lines begin."""
    found: dict[str, list[list[int]]] = {}
    for match in LISTED.finditer(text):
        letter, longest = match.groups()
        if letter not in letters:
            continue
        for n in range(2, len(longest) + 1):  # the text of an option may begin with space of its own
            lines = found.setdefault(longest[:n], [[] for _ in letters])
            lines[letters.index(letter)].append(match.start())
    return found


def last_list(lines: Sequence[Sequence[int]], *, width: int) -> tuple[int, ...]:
    """Return where the lines of the last list begin: it has all letters in their order, each as early as the first one allows.

    `width`: how long a line is up to the text of its option. Nothing is returned where there is no such list.
    """
    latest = lines[-1][-1] if lines[-1] else -1
    for earlier in reversed(lines[:-1]):
        n = bisect_right(earlier, latest - width)
        latest = earlier[n - 1] if n else -width
    starts = [latest]
    if latest < 0:
        return ()
    for later in lines[1:]:
        starts.append(later[bisect_left(later, starts[-1] + width)])
    return tuple(starts)
