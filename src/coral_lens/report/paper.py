"""The paper's own published numbers, as they are printed there. Never mixed with ours: `docs/paper-audit.md` says why."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from coral_lens.errors import CoralError, nearest

COLUMNS = ("Acc", "ECE", "cwECE", "NLL", "Brier")
"""The columns of every results table, under the paper's names: its NLL and Brier are not `metrics`' `nll` and `brier`."""
METHODS = ("SteerConf", "Fewshot", "ITI", "CCPS", "CORAL")
"""The rows of every results table."""

Mark = Literal["", "best", "second"]


@dataclass(frozen=True, slots=True)
class PaperNumber:
    """One cell of a results table."""

    table: str
    """The LaTeX label of the table."""
    task: str
    model: str
    method: str
    metric: str
    """One of COLUMNS."""
    value: float
    """As printed: times 100."""
    mark: Mark
    """`best` where the paper sets it in bold, `second` where it underlines it."""


@dataclass(frozen=True, slots=True)
class StatedNumber:
    """A number that the text or a caption states."""

    key: str
    value: float
    unit: str
    """Empty for what has none."""
    place: str
    """Section or figure."""
    about: str


def load_paper_numbers(
    *, model: str | None = None, task: str | None = None, method: str | None = None
) -> tuple[PaperNumber, ...]:
    """Return the cells of the results tables in the paper's order: all of them, or those of a model, task or method."""
    cells = tuple(cell for block in _document()["tables"] for row in block["rows"] for cell in _cells(block, row))
    for field, wanted in (("model", model), ("task", task), ("method", method)):
        if wanted is not None:
            _check(field, wanted, {getattr(cell, field) for cell in cells})
    return tuple(
        cell
        for cell in cells
        if model in (None, cell.model) and task in (None, cell.task) and method in (None, cell.method)
    )


def load_stated_numbers() -> dict[str, StatedNumber]:
    """Return the numbers of the text and the captions by their key, in the paper's order."""
    return {record["key"]: StatedNumber(**record) for record in _document()["stated"]}


@cache
def _document() -> dict[str, Any]:
    text = (files("coral_lens.report") / "paper_numbers.json").read_text("utf-8")
    document: dict[str, Any] = json.loads(text, parse_int=float)
    return document


def _cells(block: dict[str, Any], row: dict[str, Any]) -> list[PaperNumber]:
    marks: dict[str, Mark] = {**dict.fromkeys(row["second"], "second"), **dict.fromkeys(row["best"], "best")}
    return [
        PaperNumber(
            table=block["table"],
            task=block["task"],
            model=block["model"],
            method=row["method"],
            metric=metric,
            value=row[metric],
            mark=marks.get(metric, ""),
        )
        for metric in COLUMNS
    ]


def _check(field: str, wanted: str, known: Iterable[str]) -> None:
    names = sorted(known)
    if wanted not in names:
        raise CoralError(
            f"The paper has no {field} called {wanted!r}; it has {', '.join(names)}.{nearest(wanted, names)}"
        )
