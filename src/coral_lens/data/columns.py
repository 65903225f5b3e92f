"""Which column of a table is what: by the names that people give, by what the user says, and never by what stands in them.

A column that is none of a question's parts is carried along. Where two columns could be the same part, the user is asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache

from coral_lens.errors import CoralError, nearest

ALIASES: dict[str, tuple[str, ...]] = {
    "question": ("question", "query", "stem", "question_stem", "question_text", "statement"),
    "options": ("options", "choices", "levels", "endings", "candidates", "alternatives"),
    "answer": (
        "answer", "answer_key", "answerkey", "correct_answer", "correct_option", "correct", "gold", "label", "target", "cop",
    ),
    "answer_index": ("answer_index",),
    "answers": ("answers", "correct_answers"),
    "soft": ("soft", "soft_answer", "soft_label", "soft_labels", "distribution", "counts", "votes"),
    "id": ("id", "question_id", "qid"),
    "group": ("group",),
    "context": ("context", "passage", "article"),
    "state": ("state",),
    "instructions": ("instructions",),
    "descriptions": ("descriptions",),
    "kind": ("kind",),
    "prompt": ("prompt",),
    "continuations": ("continuations",),
}  # fmt: skip
"""The parts of a question, and the names that columns have for each: its own name first, which wins over the others."""
PARTS = tuple(ALIASES)
ANSWERS = ("answer", "answer_index", "answers", "soft")
"""The parts that say what is right; a row has one of them at most."""
OPTION_COLUMN = re.compile(
    r"(?:(?P<prefix>options?|choices?|answers?|endings?|levels?|candidates?|alternatives?|opt?|sol)_?)?"
    r"(?P<place>[a-z]|\d{1,2})"
)
"""The column of one option: `option_a`, `choice0`, `opa`, `A`; a number needs a word before it."""
MISSED = ("question", "options", "answer", "instructions", "descriptions")
"""Parts that are asked about where they are missing and another column is nearly called so."""
NEAR = 0.8
"""So alike is a misspelt name to the one that is meant; less alike are other words."""


@dataclass(frozen=True)
class Layout:
    """Which column is what."""

    parts: Mapping[str, str]
    """The column of each part that a column has."""
    option_columns: tuple[str, ...] = ()
    """The columns of the options, in the order of these, where each has its own."""
    extra: tuple[str, ...] = field(default=())
    """The columns that are carried along."""

    def __contains__(self, part: str) -> bool:
        return part in self.parts or (part == "options" and bool(self.option_columns))


def plain_name(name: str) -> str:
    """Return a name in lower case, with underscores between its words."""
    return re.sub(r"[\s_.-]+", "_", name.strip().lower())


@lru_cache(maxsize=4096)
def part_of(name: str) -> str | None:
    """Return the part that a column of this name has."""
    plain = plain_name(name)
    return next((part for part, aliases in ALIASES.items() if plain in aliases), None)


def is_known(name: str) -> bool:
    """Whether a column of this name would be read as a part of a question."""
    match = OPTION_COLUMN.fullmatch(plain_name(name))
    return part_of(name) is not None or bool(match and (match["prefix"] or match["place"].isalpha()))


def layout_of(names: Sequence[str], said: Mapping[str, str], where: str, *, noun: str = "column") -> Layout:
    """Return which of the columns is what; `said` has what the user says: a part and its column, or several joined by `+`."""
    check_said(said, names, where)
    parts = {part: column for part, column in said.items() if column and part != "options"}
    taken = {column for part, columns in said.items() for column in columns.split("+")}
    own_options = tuple(said.get("options", "").split("+")) if said.get("options") else ()
    free = [name for name in names if name not in taken]
    for part in (part for part in PARTS if part not in said):
        if column := column_of(part, free, where):
            parts[part] = column
    if "continuations" not in parts and "prompt" not in said:
        parts.pop("prompt", None)  # a prompt alone may be anything
    if len(own_options) == 1:
        parts["options"], own_options = own_options[0], ()
    rest = [name for name in free if name not in parts.values()]
    if "options" not in said:
        own_options = option_columns(rest, where)
        if own_options and "options" in parts:
            raise CoralError(
                f"{where}: options stand in {parts['options']!r} and in columns of their own ({', '.join(own_options)}); say "
                f"which are meant: --columns options={parts['options']} or options={'+'.join(own_options)}."
            )
    extra = tuple(name for name in names if name not in parts.values() and name not in own_options)
    layout = Layout(parts, own_options, extra)
    refuse_misspelt(layout, said, where, noun)
    return layout


def check_said(said: Mapping[str, str], names: Sequence[str], where: str) -> None:
    """Refuse what the user says of parts that there are not, and of columns that there are not."""
    for part, columns in said.items():
        if part not in ALIASES:
            raise CoralError(
                f"--columns has the unknown part {part!r}; it may be {', '.join(PARTS)}.{nearest(part, PARTS)}"
            )
        if missing := [column for column in columns.split("+") if column and column not in names]:
            shown = ", ".join(map(repr, names))
            raise CoralError(
                f"{where}: there is no {missing[0]!r}, which --columns takes for the {part}; found {shown}."
                f"{nearest(missing[0], names)}"
            )


def column_of(part: str, names: Sequence[str], where: str) -> str | None:
    """Return the column of a part: the one of its own name, or the only one of another name that it has."""
    of_part = [name for name in names if part_of(name) == part]
    own = [name for name in of_part if plain_name(name) == part]
    if len(own) == 1 or len(of_part) == 1:
        return (own or of_part)[0]
    if of_part:
        raise CoralError(
            f"{where}: both {of_part[0]!r} and {of_part[1]!r} may be the {part}; say which: --columns {part}={of_part[0]}."
        )
    return None


def option_columns(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the columns of single options in their order; a gap, or two kinds of them, is asked about."""
    kinds: dict[tuple[str, bool], dict[int, str]] = {}
    for name in names:
        match = OPTION_COLUMN.fullmatch(plain_name(name))
        if match is None or not (match["prefix"] or match["place"].isalpha()):
            continue
        is_letter = match["place"].isalpha()
        place = ord(match["place"]) - ord("a") if is_letter else int(match["place"])
        of_kind = kinds.setdefault(((match["prefix"] or "").rstrip("s"), is_letter), {})
        if place in of_kind:
            raise CoralError(f"{where}: {of_kind[place]!r} and {name!r} are the same option; rename one of them.")
        of_kind[place] = name
    # a single column, such as one called `n`, is no list of options; the first option is missing in no list
    kinds = {kind: places for kind, places in kinds.items() if 0 in places or (1 in places and not kind[1])}
    kinds = {kind: places for kind, places in kinds.items() if len(places) > 1} or kinds
    if len(kinds) > 1:
        one, other = ("+".join(places[k] for k in sorted(places)) for places in list(kinds.values())[:2])
        raise CoralError(f"{where}: the options may be {one} or {other}; say which are meant: --columns options={one}.")
    for places in kinds.values():
        order = sorted(places)
        if order != list(range(order[0], order[0] + len(order))):
            raise CoralError(
                f"{where}: the option columns must be a, b, c, ... without a gap. Got {', '.join(places[k] for k in order)} "
                "instead."
            )
        return tuple(places[k] for k in order)
    return ()


def refuse_misspelt(layout: Layout, said: Mapping[str, str], where: str, noun: str) -> None:
    """Refuse a column that is nearly called as a part that is missing: carried along in silence, it would be missed late."""
    missing = [part for part in MISSED if part not in layout and part not in said]
    if any(part in layout for part in ANSWERS) and "answer" in missing:
        missing.remove("answer")
    for name in layout.extra:
        if close := get_close_matches(plain_name(name), missing, n=1, cutoff=NEAR):
            raise CoralError(
                f"{where}: unknown {noun} {name!r}, and none is called {close[0]!r}. Did you mean {close[0]!r}? Rename it, or "
                f"say --columns {close[0]}={name}, or --columns {close[0]}= if there is none; other {noun}s are carried along."
            )


def parse_columns(text: str, option: str = "--columns") -> dict[str, str]:
    """Return what `question=prompt,answer=label` says."""
    said: dict[str, str] = {}
    for pair in text.split(","):
        part, equals, column = pair.partition("=")
        if not equals or not part.strip() or part.strip() in said:
            raise CoralError(f"{option} must look like question=prompt,answer=label. Got {text!r} instead.")
        said[part.strip()] = column.strip()
    return said


def named_columns(names: Iterable[str]) -> str:
    """Return the names of columns for a complaint."""
    return ", ".join(map(repr, names)) or "nothing"
