"""What a run found, in sentences: gains, losses and what cannot be told, with their numbers. Never leaves out a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coral_lens.metrics.scores import METRICS
from coral_lens.report.tables.formats import kind_of, label_of, percent
from coral_lens.report.tables.run import ResultsTable, TaskTable, subject_of

WORDS = {
    "accuracy": ("accuracy", {1: "rose", -1: "fell"}),
    "brier": ("the error of the probabilities (Brier)", {1: "fell", -1: "rose"}),
    "ece": ("miscalibration (ECE)", {1: "fell", -1: "rose"}),
}
"""How a metric is called, and what it did where it became clearly better (1) or worse (-1)."""
VERDICTS = {1: "clearly better", -1: "clearly worse", 0: "no clear change"}
MOST_NAMED = 4
"""More tasks than this are counted instead of named."""


@dataclass(frozen=True, slots=True)
class Change:
    """A metric before and after steering, for the cards at the head of a report."""

    label: str
    before: str
    after: str
    verdict: str
    direction: int


@dataclass(frozen=True, slots=True)
class Card:
    """A task at a glance."""

    name: str
    kind: str
    n_questions: int
    changes: tuple[Change, ...]


def headline(table: ResultsTable) -> list[str]:
    """Return the findings of a run, the most important first."""
    compared = [task for task in table.tasks if task.comparison("base")]
    if not compared:
        return [plain_sentence(task) for task in table.tasks[:MOST_NAMED]]
    sentences = [opening(tasks) + findings(tasks) for trained in (True, False) if (tasks := of_kind(compared, trained))]
    return sentences + control_sentences(compared) + zero_sentences(table)


def of_kind(tasks: Sequence[TaskTable], trained_on: bool) -> list[TaskTable]:
    """Return the held-out or the transfer tasks."""
    return [task for task in tasks if task.trained_on == trained_on]


def opening(tasks: Sequence[TaskTable]) -> str:
    """Return the beginning of a sentence about tasks of one kind."""
    n, name = len(tasks), tasks[0].name
    if tasks[0].trained_on:
        subject = (
            f"{name}, a task that the lens was trained on, "
            if n == 1
            else f"the {n} tasks that the lens was trained on, "
        )
        return f"On new questions of {subject}"
    return f"On {name}, a task that the lens never saw, " if n == 1 else f"On the {n} tasks that the lens never saw, "


def plain_sentence(task: TaskTable) -> str:
    """Describe a task on which nothing is compared."""
    parts = [
        f"{label_of(method)} has {percent(m.scores['accuracy'].value)} % accuracy and a Brier score of "
        f"{percent(m.scores['brier'].value)}"
        for method, m in task.metrics.items()
    ]
    return f"On {task.n_questions:,} questions of {task.name}, {'; '.join(parts)}."


def findings(tasks: Sequence[TaskTable]) -> str:
    """Say what steering did to each metric that may rank on these tasks."""
    metrics = [m for m in WORDS if all(task.ranks(m) for task in tasks)]
    return "; ".join(finding(tasks, m) for m in metrics) + "."


def finding(tasks: Sequence[TaskTable], metric: str) -> str:
    """Say of one metric on which tasks it rose, fell, or showed no clear change."""
    name, verbs = WORDS[metric]
    parts = []
    for verdict, verb in ((1, verbs[1]), (-1, verbs[-1]), (0, "showed no clear change")):
        alike = [t for t in tasks if (c := t.comparison("base")) and c.verdict(metric) == verdict]
        if alike:
            parts.append(f"{verb} {where(alike, metric, alone=len(tasks) == 1)}")
    return f"{name} {', '.join(parts[:-1])}{' and ' if parts[:-1] else ''}{parts[-1]}"


def where(tasks: Sequence[TaskTable], metric: str, *, alone: bool) -> str:
    """Return the numbers, with the names of the tasks where there is more than one to tell apart."""
    if len(tasks) > MOST_NAMED:
        return f"on {len(tasks)} tasks"
    numbers = [before_after(task, metric) for task in tasks]
    if alone:
        return f"({numbers[0]})"
    return "on " + enumerated([f"{t.name} ({n})" for t, n in zip(tasks, numbers, strict=True)])


def before_after(task: TaskTable, metric: str) -> str:
    """Return `28.7 → 35.3 %`, in one piece."""
    subject = subject_of(task.metrics) or "base"
    before, after = (percent(task.metrics[method].scores[metric].value) for method in ("base", subject))
    return f"{before} → {after}{' %' if metric == 'accuracy' else ''}".replace(" ", "\N{NO-BREAK SPACE}")


def enumerated(names: Sequence[str]) -> str:
    """Return `a`, `a and b`, or `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def control_sentences(tasks: Sequence[TaskTable]) -> list[str]:
    """Compare with temperature scaling: what a gain is worth that needs no hidden state."""
    by_verdict = {
        v: [t.name for t in tasks if (c := t.comparison("temperature")) and c.verdict("brier") == v] for v in VERDICTS
    }
    if not any(by_verdict.values()):
        return []
    parts = []
    for verdict, word in ((1, "clearly smaller"), (-1, "clearly larger"), (0, "not clearly different")):
        if names := by_verdict[verdict]:
            parts.append(f"{word} on {enumerated(names) if len(names) <= MOST_NAMED else f'{len(names)} tasks'}")
    return [f"Against plain temperature scaling, which changes no answer, that error is {enumerated(parts)}."]


def zero_sentences(table: ResultsTable) -> list[str]:
    """Say how often the lens ruled out the truth."""
    sentences = []
    for method in table.methods:
        n = sum(t.metrics[method].n_zero_answer for t in table.tasks if method in t.metrics)
        total = sum(t.n_questions for t in table.tasks if method in t.metrics)
        if n:
            sentences.append(
                f"On {n:,} of {total:,} questions {label_of(method)} gave the correct option probability 0, for which its "
                "NLL pays dearly."
            )
    return sentences


def cards(table: ResultsTable) -> list[Card]:
    """Return each compared task at a glance."""
    return [card_of(task) for task in table.tasks if task.comparison("base")]


def card_of(task: TaskTable) -> Card:
    """Return accuracy, Brier and ECE before and after, with a verdict that the tests support."""
    comparison = task.comparison("base")
    assert comparison is not None, "only compared tasks have a card"
    changes = []
    for metric in ("accuracy", "brier", "ece"):
        verdict = comparison.verdict(metric)
        changes.append(
            Change(
                label=METRICS[metric].label,
                before=percent(task.metrics[comparison.against].scores[metric].value),
                after=percent(task.metrics[comparison.method].scores[metric].value),
                verdict=VERDICTS[verdict] if task.ranks(metric) else "too few to rank",
                direction=verdict,
            )
        )
    return Card(task.name, kind_of(task), task.n_questions, tuple(changes))
