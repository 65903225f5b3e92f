"""The options of questions, in every form in which a row may have them: a list, a cell of JSON, columns, texts with labels.

Options are texts, whatever they were; their labels and values are kept beside them, because answers may be given by those.
"""

from __future__ import annotations

import ast
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coral_lens.errors import CoralError
from coral_lens.storage.lines import parse_json

NO_YES = ("no", "yes")
"""The options of a yes-no question that brings none. The second is true, so that the answer 1 is right in every sense."""
TEXT_KEYS, LABEL_KEYS = ("text", "value", "name", "option", "content"), ("label", "key", "id")
"""What the text and the label of an option may be called in an object of its own."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of one question, as its answer may name them."""

    options: tuple[str, ...]
    labels: tuple[str, ...] = ()
    """What they are called where that is not their place, as in `choices: {text, label}`."""
    values: tuple[Any, ...] = ()
    """As they stand in the row, where they are not texts: numbers, true and false."""
    descriptions: tuple[str, ...] = ()
    kind: str = "choice"
    truth: bool = False
    """Whether they are no and yes because the row has none."""


@dataclass(frozen=True)
class OptionColumn:
    """The options of some questions."""

    texts: Sequence[tuple[str, ...]]
    others: Sequence[Asked] | None = None
    """All about them, where there is more than texts; None: they are plain texts of plain choices."""
    checked: bool = False
    """Whether it is known that none of them is blank."""

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing about them but their texts."""
        return self.others is None

    def asked(self, i: int) -> Asked:
        """Return all about the options of a question."""
        return Asked(self.texts[i]) if self.others is None else self.others[i]

    def take(self, rows: Sequence[int]) -> OptionColumn:
        """Return those of some questions, in the order asked for."""
        return OptionColumn(
            [self.texts[i] for i in rows], None if self.others is None else [self.others[i] for i in rows]
        )


def text_of(value: Any) -> str:
    """Return an option, a state or a description as text."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    raise CoralError(f"a text is expected. Got {shown(value)} instead.")


def shown(value: Any) -> str:
    """Return a value for a complaint, with its kind."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def options_in(cell: Any, *, kind: str = "choice", bars: bool = False) -> Asked:
    """Return the options that a single cell holds; with `bars`, a text may list them as `a | b`."""
    if isinstance(cell, str) and (bars or cell.lstrip().startswith(("[", "{"))):
        cell = listed(cell)
    if isinstance(cell, Mapping):
        return options_of_object(cell, kind)
    if not isinstance(cell, list | tuple):
        raise CoralError(f"a list of options is expected. Got {shown(cell)} instead.")
    if cell and all(isinstance(one, Mapping) for one in cell):
        return options_of_objects(cell, kind)
    texts = tuple(map(text_of, cell))
    are_texts = all(isinstance(one, str) for one in cell)
    return Asked(texts, values=() if are_texts else tuple(cell), kind=kind)


def listed(cell: str) -> Any:
    """Return what a cell of text lists: JSON, a list as Python writes it (data frames do), or texts between bars."""
    if cell.lstrip().startswith(("[", "{")):
        for read in (parse_json, ast.literal_eval):
            try:
                found = read(cell.strip())
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                continue
            if isinstance(found, list | dict):
                return found
    return [part.strip() for part in cell.split("|")] if cell.strip() else []


def options_of_object(cell: Mapping[str, Any], kind: str) -> Asked:
    """Return the options of one object: lists of texts and labels, texts by letter, or names with their descriptions."""
    texts = next((cell[key] for key in ("text", "texts", "value", "choices") if isinstance(cell.get(key), list)), None)
    if texts is not None:
        labels: list[Any] = next((cell[key] for key in ("label", "labels") if isinstance(cell.get(key), list)), [])
        if labels and len(labels) != len(texts):
            raise CoralError(f"there are {len(texts)} texts, but {len(labels)} labels of options.")
        return Asked(tuple(map(text_of, texts)), labels=tuple(text_of(label).strip() for label in labels), kind=kind)
    names = [str(name).strip() for name in cell]
    if are_places(names):
        return Asked(tuple(map(text_of, cell.values())), labels=tuple(names), kind=kind)
    return Asked(tuple(names), descriptions=tuple(map(description_of, cell.values())), kind=kind)


def are_places(names: Sequence[str]) -> bool:
    """Whether names are letters from A, or numbers from 0 or 1, in their order."""
    n = len(names)
    letters = list(string.ascii_uppercase[:n])
    return bool(names) and (
        [name.upper() for name in names] == letters
        or names in ([str(k) for k in range(n)], [str(k + 1) for k in range(n)])
    )


def options_of_objects(cell: Sequence[Mapping[str, Any]], kind: str) -> Asked:
    """Return options that are objects of their own, with a text and perhaps a label and a description."""
    values, labels, descriptions = [], [], []
    for one in cell:
        label = next((one[key] for key in LABEL_KEYS if one.get(key) is not None), None)
        value = next((one[key] for key in TEXT_KEYS if one.get(key) is not None), label)
        if value is None:
            raise CoralError(f"an option is expected to have a text. Got {shown(dict(one))} instead.")
        values.append(value)
        labels.append("" if label is None else text_of(label).strip())
        descriptions.append(description_of(one.get("description")))
    are_texts = all(isinstance(value, str) for value in values)
    return Asked(
        tuple(map(text_of, values)),
        labels=tuple(labels) if all(labels) and len(set(labels)) == len(labels) else (),
        values=() if are_texts else tuple(values),
        descriptions=tuple(descriptions) if any(descriptions) else (),
        kind=kind,
    )


def description_of(value: Any) -> str:
    """Return a description; none is an empty text."""
    return "" if value is None else text_of(value)
