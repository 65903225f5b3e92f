"""The page of two runs side by side, and its numbers as files. Loads nothing from outside when opened."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from coral_lens.metrics.scores import METRICS
from coral_lens.report.figures.confidence import reliability_finding, risk_finding
from coral_lens.report.figures.run import metric_picture
from coral_lens.report.figures.style import Look, looks_of
from coral_lens.report.findings import loose_record
from coral_lens.report.headline import Change, Glance
from coral_lens.report.names import method_name
from coral_lens.report.pages.contents import Contents
from coral_lens.report.pages.glance import glance_parts
from coral_lens.report.pages.run import SUMMARY, provenance_of
from coral_lens.report.pages.templates import fill_template
from coral_lens.report.runs import Run, is_page
from coral_lens.report.tables import formats
from coral_lens.report.tables.averages import HEADLINE
from coral_lens.report.tables.exports import clean, csv_text, difference_numbers
from coral_lens.report.tables.pairing import B_MINUS_A, Matched, joint_run, match_runs
from coral_lens.report.tables.run import Comparison, ResultsTable, TaskTable, results_table, subject_of
from coral_lens.storage.files import write_atomic
from coral_lens.storage.outputs import refuse_replacing

COMPARISON_HEAD = ("task", "n_questions", "method", "against", "metric", "value", "low", "high", "p_holm")
"""The columns of comparison.csv."""


def write_comparison(a: Run, b: Run, folder: Path, *, n_boot: int = 1000) -> Path:
    """Write report.html, comparison.csv and comparison.json of two runs; return the page."""
    refuse_replacing(folder, ("report.html",), is_ours=is_page)
    refuse_replacing(folder, ("comparison.csv", "comparison.json"), is_ours=lambda _: is_comparison(folder))
    matched = match_runs(a, b)
    joint = results_table(joint_run(a, b, matched), scope=B_MINUS_A, n_boot=n_boot)
    by_name = {task.name: task for task in joint.tasks}
    tasks = tuple(by_name[m.both.name] for m in matched)
    table = replace(joint, tasks=tasks)
    record = {
        "a": a.title,
        "b": b.title,
        "tests": [comparison_record(t, m) for t, m in zip(tasks, matched, strict=True)],
    }
    write_atomic(folder / "comparison.json", (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    write_atomic(folder / "comparison.csv", comparison_csv(table).encode())
    page = folder / "report.html"
    write_atomic(page, render_comparison(a, b, matched, table).encode())
    return page


def is_comparison(folder: Path) -> bool:
    """Return whether a folder holds a comparison of ours; its JSON, which is written first, tells."""
    return {"a", "b", "tests"} <= loose_record(folder / "comparison.json").keys()


# --- the page ---------------------------------------------------------------------------------------------------------


def render_comparison(a: Run, b: Run, matched: Sequence[Matched], table: ResultsTable) -> str:
    """Return the page."""
    contents = Contents()
    contents.begin("differences", "Differences")
    looks = looks_of_both(table.methods)
    summary = [
        contents.figure(metric_picture(table, m, name=f"summary-{m}", looks=looks), f"{METRICS[m].label} by task")
        for m in SUMMARY
    ]
    tests = []
    for m, task in zip(matched, table.tasks, strict=True):
        heads = [formats.column_label(task, name) for name in task.columns]
        tests.append((contents.table(f"Both runs on {task.title}"), task, note_of(m), heads, rows_side_by_side(task)))
    contents.begin("confidence", "Confidence")
    plates = []
    for m in matched:
        shown = overlaid(m)
        few = replace(m.both, predictions={k: m.both.predictions[k] for k in shown})
        for finding in (
            reliability_finding(few, {k: looks[k] for k in shown}, n_bins=10),
            risk_finding(few, looks, bands=shown[:2], n_boot=400),
        ):
            plates.append(contents.figure(finding.picture, finding.title))
    contents.begin("provenance", "What differs in their making")
    differing, n_same = provenance_difference(a, b, table)
    return fill_template(
        "compare.html",
        title=f"{a.title} · {b.title}",
        runs=(("A", a.title), ("B", b.title)),
        headline=[s for t in table.tasks for s in sentences(t)],
        glance=glance_parts([glance_from_a_to_b(t) for t in table.tasks if t.comparisons]),
        summary=summary,
        tests=tests,
        plates=plates,
        notes=formats.notes_of(table),
        differing=differing,
        n_same=n_same,
        sections=contents.sections,
    )


def looks_of_both(methods: Sequence[str]) -> dict[str, Look]:
    """Return the same look for a method in both runs, filled in A and hollow with another dash in B."""
    plain = looks_of(list(dict.fromkeys(m.split(": ", 1)[1] for m in methods)))
    looks = {m: plain[m.split(": ", 1)[1]] for m in methods}
    return {
        m: replace(look, hollow=True, line=(0, (1, 1.2))) if m.startswith("B: ") else look for m, look in looks.items()
    }


def rows_side_by_side(task: TaskTable) -> list[formats.Row]:
    """Return the lines of a table: a method in A, in B, and their difference, one method after the other."""
    rows: list[formats.Row] = []
    for method in task.metrics:
        rows.append(formats.method_row(task, method))
        rows += [formats.comparison_row(task, c) for c in task.comparisons if c.method == method]
    return rows


def overlaid(matched: Matched) -> list[str]:
    """Return the rows that are drawn over each other: what each run is about, then the unsteered model of each."""
    methods = list(matched.both.predictions)
    rows = []
    for name in ("A", "B"):
        own = [m.split(": ", 1)[1] for m in methods if m.startswith(f"{name}: ")]
        rows.append(f"{name}: {subject_of(own) or own[0]}")
    return [*rows, *(m for m in methods if m in ("A: base", "B: base") and m not in rows)]


def note_of(matched: Matched) -> str:
    """Say which questions are compared and which are not."""
    n, (only_a, only_b) = len(matched.both.questions), matched.n_alone
    parts = [f"{n:,} questions in both"]
    if only_a or only_b:
        parts.append(f"left out: {only_a:,} that only A has and {only_b:,} that only B has")
    if matched.n_changed:
        parts.append(f"{matched.n_changed:,} of the same id whose options or answer differ are left out too")
    if matched.names[0] != matched.names[1]:
        parts.append(f"B calls them {matched.names[1]}")
    return "; ".join(parts) + "."


def main_comparison(task: TaskTable) -> Comparison:
    """Return the last comparison, which is that of the lenses."""
    lenses = [c for c in task.comparisons if c.method.removeprefix("B: ") not in ("base", "temperature")]
    return (lenses or list(task.comparisons))[-1]


def glance_from_a_to_b(task: TaskTable) -> Glance:
    """Return what changed from A to B on one test set."""
    comparison = main_comparison(task)
    pair = (comparison.against, comparison.method)
    changes = []
    for metric in HEADLINE:
        before, after = (task.metrics[m].scores[metric].value for m in pair)
        changes.append(Change(metric, before, after, comparison.differences[metric], task.judged(comparison, metric)))
    return Glance(task.name, task.title, formats.kind_of(task), task.n_questions, tuple(changes))


def sentences(task: TaskTable) -> list[str]:
    """Say what changed from A to B."""
    if not task.comparisons:
        return [f"On {task.title}, no method is in both runs, and not both have a lens."]
    comparison = main_comparison(task)
    parts = []
    for metric in ("accuracy", "brier"):
        d = comparison.differences[metric]
        value, low, high = (formats.percent(x, sign=True) for x in (d.value, d.low, d.high))
        parts.append(f"{METRICS[metric].label} {value} ({low} to {high}), {task.judged(comparison, metric).words}")
    names = f"{method_name(comparison.method)} minus {method_name(comparison.against)}"
    return [f"On {task.n_questions:,} shared questions of {task.title}, {names}: {'; '.join(parts)}."]


def provenance_difference(a: Run, b: Run, table: ResultsTable) -> tuple[list[tuple[str, str, str]], int]:
    """Return what differs between the runs' provenance, name and both values, and how many entries are the same."""
    mine, theirs = (
        {
            f"{heading} · {name}": value
            for heading, record in provenance_of(run, table).items()
            for name, value in record
        }
        for run in (a, b)
    )
    keys = dict.fromkeys((*mine, *theirs))
    differing = [(k, mine.get(k, "—"), theirs.get(k, "—")) for k in keys if mine.get(k) != theirs.get(k)]
    return differing, len(keys) - len(differing)


# --- files ------------------------------------------------------------------------------------------------------------


def comparison_csv(table: ResultsTable) -> str:
    """Return one line per test set, difference and metric, as fractions."""
    lines: list[Sequence[Any]] = [COMPARISON_HEAD]
    for task in table.tasks:
        for c in task.comparisons:
            at = (task.name, task.n_questions, c.method, c.against)
            lines += [(*at, name, *difference_numbers(c, name)) for name in c.differences]
    return csv_text(lines)


def comparison_record(task: TaskTable, matched: Matched) -> dict[str, Any]:
    """Return a matched test set as plain JSON values."""
    return {
        "task": task.name,
        "n_shared": task.n_questions,
        "n_only_a": matched.n_alone[0],
        "n_only_b": matched.n_alone[1],
        "n_changed": matched.n_changed,
        "methods": {method: m.to_dict() for method, m in task.metrics.items()},
        "comparisons": [clean(asdict(c)) for c in task.comparisons],
    }
