"""The paper's own published numbers, as they are printed there, and those that a study stands beside.

Never mixed with ours: they have tables of their own, and `docs/paper-audit.md` says why.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from coral_lens.errors import CoralError, nearest
from coral_lens.report import names
from coral_lens.report.tables.formats import Cell, Row

COLUMNS = ("Acc", "ECE", "cwECE", "NLL", "Brier")
"""The columns of every results table, under the paper's names: its NLL and Brier are not `metrics`' `nll` and `brier`."""
METHODS = ("SteerConf", "Fewshot", "ITI", "CCPS", "CORAL")
"""The rows of every results table."""

MODELS = {
    "mistralai/Mistral-7B-Instruct-v0.3": "Mistral-7B-Instruct-v0.3",
    "Qwen/Qwen2.5-7B-Instruct": "Qwen2.5-7B-Instruct",
    "deepseek-ai/deepseek-llm-7b-chat": "Deepseek-7B-Chat",
}
"""Hub ids of the paper's models, and what its tables call them."""
TASKS = {
    task: names.TASKS[task]
    for task in ("mmlu", "mmlu_continuation", "race", "race_question", "commonsense_qa", "commonsense_qa_cloze",
                 "arc_challenge", "hellaswag", "openbookqa", "math_mc")
}  # fmt: skip
"""Tasks of the paper's data, and what its tables call them."""
HEADS = {"Acc": "Accuracy ↑", "ECE": "ECE ↓", "cwECE": "cwECE ↓", "NLL": "NLL ↓", "Brier": "Brier ↓"}
PAPER_NOTES = (
    "As printed in the paper, × 100; bold and underlined as there. It gives no intervals, and its Brier and NLL cannot be those "
    "of its own formulas: compare them with the top-1 columns, if with any; docs/paper-audit.md has the arithmetic.",
    "Where the study's model is not one of the paper's, the few-shot and CORAL rows of its three models stand here for scale.",
)

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
            _refuse_unknown(field, wanted, {getattr(cell, field) for cell in cells})
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
    text = (files("coral_lens.report.tables") / "paper_numbers.json").read_text("utf-8")
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


def _refuse_unknown(field: str, wanted: str, known: Iterable[str]) -> None:
    names = sorted(known)
    if wanted not in names:
        raise CoralError(
            f"The paper has no {field} called {wanted!r}; it has {', '.join(names)}.{nearest(wanted, names)}"
        )


# --- beside a study ----------------------------------------------------------------------------------------------------


def abstract_line(kind: str) -> list[str]:
    """Return a line of the summary with the averages that the paper's abstract states for a kind of test."""
    said = {key: f"+{number.value:g} %" for key, number in load_stated_numbers().items()}
    n, key = {"held-out": ("3 × 3", "abstract."), "transfer": ("3 × 4", "abstract.transfer_")}[kind]
    gains = [said[f"{key}{metric}_gain"] for metric in ("accuracy", "ece")]
    return ["the paper", kind, "CORAL, as its abstract says", n, *gains]


@dataclass(frozen=True, slots=True)
class PaperTable:
    """What the paper prints of one task."""

    task: str
    same_model: bool
    """Whether it is of models of the study; else of the paper's own, for scale."""
    rows: tuple[Row, ...]

    @property
    def heading(self) -> str:
        return f"The paper on {self.task}" + ("" if self.same_model else ", other models")

    @property
    def heads(self) -> dict[str, str]:
        return HEADS


def paper_tables(models: Iterable[str], sources: Mapping[str, str]) -> list[PaperTable]:
    """Return a table for each task of the paper among a study's tests, whose sources are given by their names."""
    known = [MODELS[m] for m in models if m in MODELS]
    tasks = dict.fromkeys(TASKS[t] for s in sources.values() if (t := s.partition(":")[0]) in TASKS)
    return [paper_table(task, known) for task in tasks]


def paper_table(task: str, models: list[str]) -> PaperTable:
    """Return all that the paper prints of these models, or its few-shot and CORAL rows of all its models."""
    cells = load_paper_numbers(task=task)
    methods = METHODS if models else ("Fewshot", "CORAL")
    wanted = models or list(dict.fromkeys(c.model for c in cells))
    by_row: dict[str, dict[str, PaperNumber]] = {
        f"{method}, {model}": {c.metric: c for c in cells if (c.model, c.method) == (model, method)}
        for model in wanted
        for method in methods
    }
    rows = tuple(
        Row(label, {m: printed_cell(numbers[m]) for m in COLUMNS}) for label, numbers in by_row.items() if numbers
    )
    return PaperTable(task, bool(models), rows)


def printed_cell(number: PaperNumber) -> Cell:
    """Return a number as the paper prints it."""
    return Cell(f"{number.value:.2f}", best=number.mark == "best", second=number.mark == "second")
