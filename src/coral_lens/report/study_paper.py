"""Which of the paper's published numbers a study stands beside. Never mixed with ours: they have a section of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coral_lens.report.formats import Cell, Row
from coral_lens.report.paper import COLUMNS, METHODS, PaperNumber, load_paper_numbers, load_stated_numbers

MODELS = {
    "mistralai/Mistral-7B-Instruct-v0.3": "Mistral-7B-Instruct-v0.3",
    "Qwen/Qwen2.5-7B-Instruct": "Qwen2.5-7B-Instruct",
    "deepseek-ai/deepseek-llm-7b-chat": "Deepseek-7B-Chat",
}
"""Hub ids of the paper's models, and what its tables call them."""
TASKS = {
    "mmlu": "MMLU",
    "mmlu_continuation": "MMLU",
    "race": "RACE",
    "race_question": "RACE",
    "commonsense_qa": "CommonsenseQA",
    "commonsense_qa_cloze": "CommonsenseQA",
    "arc_challenge": "ARC-Challenge",
    "hellaswag": "HellaSwag",
    "openbookqa": "OpenBookQA",
    "math_mc": "Math-MC",
}
"""Tasks of the paper's data, and what its tables call them."""
HEADS = {"Acc": "Accuracy ↑", "ECE": "ECE ↓", "cwECE": "cwECE ↓", "NLL": "NLL ↓", "Brier": "Brier ↓"}
PAPER_NOTES = (
    "As printed in the paper, × 100; bold and underlined as there. It gives no intervals, and its Brier and NLL cannot be those "
    "of its own formulas: compare them with the top-1 columns, if with any; docs/paper-audit.md has the arithmetic.",
    "Where the study's model is not one of the paper's, the few-shot and CORAL rows of its three models stand here for scale.",
)


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
    rows = tuple(Row(label, {m: cell_of(found[m]) for m in COLUMNS}) for label, found in by_row.items() if found)
    return PaperTable(task, bool(models), rows)


def cell_of(number: PaperNumber) -> Cell:
    """Return a number as the paper prints it."""
    return Cell(f"{number.value:.2f}", best=number.mark == "best", second=number.mark == "second")
