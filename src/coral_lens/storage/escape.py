"""A text of a user's, written where some characters mean something: one function for each such place.

Names of methods, tests, tasks, models and files may hold anything. HTML is not here: its templates escape by themselves.
Mathematics in figures is switched off as a whole (`report.figures.style`), file names are made by `storage.files.file_name`.
"""

from __future__ import annotations

import re
from typing import Any

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters, other line ends, and what turns the direction of writing."""
_MARKDOWN = re.compile(r"[\\`*\[\]|~]|<(?=\S)|&(?=[#\w]+;)|(?<!\w)_|_(?!\w)|(?<=:)//|(?<=www)\.")
"""What Markdown takes for its own. An underscore inside a word is only itself; an address would become a link."""
_FORMULA = re.compile(r"\s*[=+\-@]|[\t\r\n]")
"""How a cell begins that a spreadsheet would compute."""
_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    # after the end of a line of a table, both would be taken for its argument
    "[": "{[}",
    "*": "{*}",
    "−": "$-$",
    "×": r"$\times$",
    "±": r"$\pm$",
    "†": r"$^\dagger$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
}


def in_one_line(text: str) -> str:
    """Return a text in one line without control characters: white space is a space, every other one is seen as `\\x1b`."""
    spaced = re.sub(r"[\t\n\r\v\f\x85\u2028\u2029]+", " ", text)
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), spaced)


def for_terminal(text: str) -> str:
    """Return a text for the terminal, lines and all: what would move its cursor or change its colours is seen instead."""
    return "\n".join(map(in_one_line, text.split("\n")))


def for_markdown(text: str) -> str:
    """Return a text for a line or a cell of a table of Markdown."""
    return _MARKDOWN.sub(lambda found: f"\\{found[0]}", in_one_line(text))


def for_latex(text: str) -> str:
    """Return a text for a line of LaTeX."""
    return "".join(_LATEX.get(character, character) for character in in_one_line(text))


def for_csv(value: Any) -> Any:
    """Return a value for a cell of CSV: a text that a spreadsheet would compute gets an apostrophe, a number stays one."""
    if not isinstance(value, str):
        return value
    # a lone carriage return is not quoted by the csv module, and would end the row
    text = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{text}" if _FORMULA.match(value) and not _is_number(value) else text


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text, re.ASCII) is not None
