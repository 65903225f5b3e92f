"""The report of a run: one self-contained HTML page, and the tables as files. Loads nothing from outside when opened."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coral_lens.metrics.scores import METRICS
from coral_lens.report.confidence import methods_drawn, pooled
from coral_lens.report.figures.choice import curve_picture, gamma_curve, layer_curve
from coral_lens.report.figures.confidence import about, before_after_picture
from coral_lens.report.figures.run import metric_picture
from coral_lens.report.figures.style import looks_of
from coral_lens.report.findings import Gathered, gather_findings
from coral_lens.report.headline import details, glances, headline
from coral_lens.report.names import method_name
from coral_lens.report.pages.contents import Contents, ContentsEntry, Plate, by_section
from coral_lens.report.pages.examples import answer_changes, choose_examples
from coral_lens.report.pages.explorer import questions_data, script_text
from coral_lens.report.pages.glance import glance_parts
from coral_lens.report.pages.templates import fill_template, leaves_of, text_of
from coral_lens.report.reach import reach_notes
from coral_lens.report.runs import Evaluation, Run
from coral_lens.report.tables import exports, formats
from coral_lens.report.tables.run import ResultsTable, TaskTable, in_order, results_table
from coral_lens.storage.escape import for_markdown
from coral_lens.storage.files import write_atomic

SUMMARY = ("accuracy", "ece", "brier")
SHOWN_BEFORE = "confidence-reliability-"
"""Findings that begin so are not gathered: the page has its own diagrams of the same numbers."""
ANALYSES = {
    "": ("Where correctness lives", "What else was found out about this model and these questions."),
    "confidence": (
        "What confidence is worth",
        "Before and after steering: how often the surest answers are wrong, how sure answers are, and where options are "
        "letters, whether some positions are preferred. The files beside them also have reliability in bins of both kinds.",
    ),
}
"""Heading and introduction of the sections whose folders are known."""
BASE_RULES = {
    "sum": "the summed log-probability of its tokens",
    "token": "the mean log-probability of its tokens",
    "char": "the log-probability per character of its text",
    "pmi": "how much likelier the question makes it than a neutral context does",
}


def write_report(run: Run, folder: Path, *, table: ResultsTable | None = None) -> Path:
    """Write report.html and the results as Markdown, CSV and JSON; return the page. A table made before is reused.

    Findings under the folder's `analysis/` are gathered in the page.
    """
    table = table or results_table(run)
    write_results(table, run.title, folder)
    page = folder / "report.html"
    write_atomic(page, render_report(run, table=table, findings=gather_findings(folder)).encode())
    return page


def write_results(table: ResultsTable, title: str, folder: Path) -> None:
    """Write the results as Markdown, CSV and JSON."""
    write_atomic(folder / "results.md", f"# {for_markdown(title)}\n\n{formats.results_markdown(table)}".encode())
    write_atomic(folder / "results.csv", exports.results_csv(table).encode())
    write_atomic(folder / "results.json", (json.dumps(exports.results_record(table), indent=1) + "\n").encode())


def render_report(run: Run, *, table: ResultsTable | None = None, findings: Sequence[Gathered] = ()) -> str:
    """Return the page."""
    table, contents = table or results_table(run), Contents()
    parts = results_of(run, table, contents) | calibration_of(run, table, contents) | analyses_of(findings, contents)
    parts |= changes_of(run, table, contents) | browser_of(run, table) | lens_of(run, contents)
    contents.begin("terms", "What the words mean")
    contents.begin("provenance", "Provenance")
    return fill_template(
        "run.html", parts, title=run.title, provenance=provenance_of(run, table), sections=contents.sections
    )


def results_of(run: Run, table: ResultsTable, contents: Contents) -> dict[str, Any]:
    """Return the head of the page, and every number below it."""
    contents.begin("results", "All numbers")
    summary = [
        contents.figure(metric_picture(table, m, name=f"summary-{m}"), f"{METRICS[m].label} by task") for m in SUMMARY
    ]
    tasks = [task_of(task, contents) for task in table.tasks]
    return {
        "headline": headline(table),
        "details": details(table),
        "glance": glance_parts(glances(table)),
        "tasks": tasks,
        "notes": [*reach_notes(run), *formats.notes_of(table)],
        "summary": summary,
        "subject": method_name(table.subject),
    }


def task_of(task: TaskTable, contents: Contents) -> tuple[ContentsEntry, TaskTable, str, list[str], list[formats.Row]]:
    """Return a task's table as the template wants it."""
    heads = [formats.column_label(task, m) for m in task.columns]
    return contents.table(f"Results on {task.title}"), task, formats.kind_of(task), heads, formats.table_rows(task)


def calibration_of(run: Run, table: ResultsTable, contents: Contents) -> dict[str, Any]:
    """Return a diagram of reliability for each test set, before and after in one."""
    contents.begin("calibration", "Calibration")
    looks, plates = looks_of(table.methods), []
    for i, evaluation in enumerate(pooled(run)):
        shown = methods_drawn(list(evaluation.predictions))
        picture = before_after_picture(evaluation, {m: looks[m] for m in shown}, name=f"reliability-{i}")
        plates.append(contents.figure(picture, f"Reliability: {about(evaluation)}"))
    return {"reliability": plates}


def analyses_of(findings: Sequence[Gathered], contents: Contents) -> dict[str, Any]:
    """Return a section for each folder of findings."""
    sections: list[tuple[str, str, str, list[Plate]]] = []
    kept = [finding for finding in findings if not finding.name.startswith(SHOWN_BEFORE)]
    for name, members in by_section(kept).items():
        heading, about = ANALYSES.get(name, (f"Analyses: {name}", ""))
        anchor = f"analyses-{len(sections)}"
        contents.begin(anchor, heading)
        sections.append((anchor, heading, about, [contents.gathered(finding) for finding in members]))
    return {"analyses": sections}


def browser_of(run: Run, table: ResultsTable) -> dict[str, Any]:
    """Return what the browser of questions needs; its script is named by its digest, and no other runs in the page."""
    from markupsafe import Markup

    data = questions_data(run, before="base", after=table.subject)
    if data is None:
        return {"browser": None}
    script = text_of("page.js")
    total, shown_here = sum(t["n"] for t in data["tasks"]), len(data["questions"])
    about = f"All {total:,} questions that were answered both before and after steering."
    if shown_here < total:
        about = (
            f"{shown_here:,} of {total:,} questions, in proportion to the tasks: first those whose answer changed, then a "
            "random sample of the others. Do not count rates here; the tables above have all."
        )
    views = [e.view for e in run.evaluations if e.view]
    listwise = run.lens.get("rule") == "listwise"
    browser = {
        "data": Markup(script_text(data)),
        "script": Markup(script),
        "about": about,
        "change": "changes of probability at full strength"
        if listwise
        else "predicted residuals before strength and clipping",
        "tasks": [t["name"] for t in data["tasks"]],
        "lens_view": bool(data["layers"]),
        "shift": bool(views),
    }
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {"browser": browser, "script_digests": Markup(f"'sha256-{digest}'")}


def changes_of(run: Run, table: ResultsTable, contents: Contents) -> dict[str, Any]:
    """Return how many answers changed, and one that became right and one that became wrong."""
    methods, evaluations = {"before": "base", "after": table.subject}, in_order(run)
    counted = [(run.titles[e.name], changes) for e in evaluations if (changes := answer_changes(e, **methods))]
    if counted:
        contents.begin("questions", "Answers that changed")
    better, worse = choose_examples(evaluations, **methods)
    return {"changes": counted, "better": better, "worse": worse, "titles": run.titles}


# --- how the lens was chosen, and where everything came from ----------------------------------------------------------


def lens_of(run: Run, contents: Contents) -> dict[str, Any]:
    """Return what the page says of the lens and of its choice on validation questions."""
    lens = run.lens
    curves = [c for c in (layer_curve(lens), gamma_curve(lens)) if c]
    if lens.get("gamma") is not None:
        contents.begin("choice", "How the lens was chosen")
    return {
        "lens": lens,
        "training": lens.get("training", {}),
        "criterion": METRICS[curves[0].criterion].label if curves else "",
        "base_rule": BASE_RULES.get(lens.get("base", ""), ""),
        "curves": [
            contents.figure(curve_picture(c, name=f"curve-{c.axis}"), f"Validation scores by {c.axis}") for c in curves
        ],
    }


def provenance_of(run: Run, table: ResultsTable) -> dict[str, list[tuple[str, str]]]:
    """Return everything that a result depends on, name and value under headings; nothing of the lens is left out."""
    lens = {k: v for k, v in run.lens.items() if k not in ("trace", "format", "model", "training")}
    training = {k: v for k, v in run.lens.get("training", {}).items() if k not in ("settings", "versions")}
    tests = {
        "questions": {e.name: f"{len(e.questions):,} ({first_split(e)})" for e in in_order(run)},
        "resamples": f"{table.n_boot:,} (intervals), {table.n_paired:,} (differences)",
        "seed": table.seed,
    }
    groups = {
        "This run": run.provenance,
        "Test": tests,
        "Model": run.lens.get("model", {}),
        "Lens": lens,
        "Training": training,
        "Training settings": run.lens.get("training", {}).get("settings", {}),
        "Versions at training": run.lens.get("training", {}).get("versions", {}),
    }
    return {heading: list(leaves_of(record)) for heading, record in groups.items() if record}


def first_split(evaluation: Evaluation) -> str:
    """Return the split that an evaluation's questions come from."""
    return next((q.split for q in evaluation.questions if q.split), "no split named")
