"""The report of a run: one self-contained HTML page, and the tables as files. Loads nothing from outside when opened."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from coral_lens.manifest import write_atomic
from coral_lens.metrics import METRICS
from coral_lens.report import exports, formats
from coral_lens.report.curves import curve_picture, gamma_curve, layer_curve
from coral_lens.report.examples import changes_of
from coral_lens.report.figures import metric_picture, reliability_picture
from coral_lens.report.headline import cards, headline
from coral_lens.report.style import Picture, looks_of
from coral_lens.report.tables import COLUMNS, ResultsTable, TaskTable, in_order, results_table
from coral_lens.runs import Evaluation, Run

SUMMARY = ("accuracy", "ece", "brier")
BASE_RULES = {
    "sum": "the summed log-probability of its tokens",
    "token": "the mean log-probability of its tokens",
    "char": "the log-probability per character of its text",
}


def write_report(run: Run, folder: Path, *, table: ResultsTable | None = None) -> Path:
    """Write report.html and the results as Markdown, CSV and JSON; return the page. A table made before is reused."""
    table = table or results_table(run)
    write_atomic(folder / "results.md", f"# {run.title}\n\n{formats.markdown(table)}".encode())
    write_atomic(folder / "results.csv", exports.csv_text(table).encode())
    write_atomic(folder / "results.json", (json.dumps(exports.json_ready(table), indent=1) + "\n").encode())
    page = folder / "report.html"
    write_atomic(page, render_report(run, table=table).encode())
    return page


def render_report(run: Run, *, table: ResultsTable | None = None) -> str:
    """Return the page."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["percent"] = formats.percent
    environment.globals["column_label"] = formats.column_label
    template = environment.from_string(text_of("page.html"))
    table = table or results_table(run)
    parts = results_of(run, table) | lens_of(run)
    return template.render(
        parts, title=run.title, provenance=provenance_of(run, table), css=Markup(text_of("page.css"))
    )


def text_of(name: str) -> str:
    """Return a template or a style sheet of ours."""
    return (files("coral_lens.report") / name).read_text(encoding="utf-8")


def results_of(run: Run, table: ResultsTable) -> dict[str, Any]:
    """Return what the page says of the test questions."""
    changes = [changes_of(evaluation, before="base", after=table.subject) for evaluation in in_order(run)]
    return {
        "headline": headline(table),
        "cards": cards(table),
        "tasks": [(task, formats.kind_of(task), formats.rows_of(task)) for task in table.tasks],
        "columns": COLUMNS,
        "notes": formats.notes_of(table),
        "summary": [shown(metric_picture(table, m, name=f"summary-{m}")) for m in SUMMARY],
        "reliability": list(reliability_figures(run, table)),
        "changes": [c for c in changes if c],
        "subject": formats.label_of(table.subject),
    }


def reliability_figures(run: Run, table: ResultsTable) -> Iterator[tuple[TaskTable, str, list[dict[str, Any]]]]:
    """Yield each task with its diagrams, one per method."""
    looks = looks_of(table.methods)
    for i, (evaluation, task) in enumerate(zip(in_order(run), table.tasks, strict=True)):
        pictures = [
            reliability_picture(p, task.metrics[method], name=f"reliability-{i}-{j}", look=looks[method])
            for j, (method, p) in enumerate(evaluation.predictions.items())
        ]
        yield task, formats.kind_of(task), [shown(picture) for picture in pictures]


def shown(picture: Picture) -> dict[str, Any]:
    """Return a picture for the template; our own SVG is the only text that is not escaped."""
    from markupsafe import Markup

    return {"svg": Markup(picture.svg()), "caption": picture.caption}


# --- how the lens was chosen, and where everything came from ----------------------------------------------------------


def lens_of(run: Run) -> dict[str, Any]:
    """Return what the page says of the lens and of its choice on validation questions."""
    lens = run.lens
    curves = [c for c in (layer_curve(lens), gamma_curve(lens)) if c]
    return {
        "lens": lens,
        "training": lens.get("training", {}),
        "criterion": METRICS[curves[0].criterion].label if curves else "",
        "base_rule": BASE_RULES.get(lens.get("base", ""), ""),
        "curves": [shown(curve_picture(c, name=f"curve-{c.what}")) for c in curves],
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
    return {heading: list(flat("", record)) for heading, record in groups.items() if record}


def first_split(evaluation: Evaluation) -> str:
    """Return the split that an evaluation's questions come from."""
    return next((q.split for q in evaluation.questions if q.split), "no split named")


def flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the leaves of a nested record, named by their path; a list is one leaf."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat(f"{name} · {key}" if name else str(key), inner)
    elif isinstance(value, list | tuple):
        yield name, ", ".join(map(str, value)) or "none"
    else:
        yield name, "none" if value is None else str(value)
