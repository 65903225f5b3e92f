"""The page of an audit and the files beside it: one self-contained HTML page, all numbers as JSON, and the maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coral_lens.audit.maps import MAPS_FILE, save_maps
from coral_lens.audit.measure import Audit, after_maps, divide, run_of
from coral_lens.audit.rows import flip_rows, group_rows, map_rows, system_rows
from coral_lens.audit.sentences import sentences
from coral_lens.metrics.scores import Score
from coral_lens.report.figures.confidence import before_after_picture, risk_finding
from coral_lens.report.figures.style import looks_of
from coral_lens.report.pages.contents import Contents, ContentsEntry, Plate
from coral_lens.report.pages.run import write_results
from coral_lens.report.pages.templates import fill_template, leaves_of
from coral_lens.report.runs import Evaluation, refuse_other_run, save_run
from coral_lens.report.tables.exports import clean
from coral_lens.report.tables.formats import Row, column_label, notes_of, table_rows
from coral_lens.report.tables.run import ResultsTable, results_table
from coral_lens.storage.files import versions, write_atomic, write_record
from coral_lens.storage.outputs import has_word, refuse_replacing

PAGE, RECORD, MAPS = "report.html", "audit.json", MAPS_FILE
MOST_DRAWN = 3
"""Systems of a figure; more lie on each other."""


@dataclass(frozen=True)
class ShownTable:
    """A table as the template lays it out."""

    entry: ContentsEntry
    heads: list[str]
    rows: list[Row]
    notes: Sequence[str] = ()


def refuse_other_audit(folder: Path) -> None:
    """Refuse a folder in which an audit would replace what it has not written."""
    refuse_other_run(folder)
    refuse_replacing(folder, (RECORD, MAPS), is_ours=lambda path: has_word(path, '"systems"'))


def write_audit(found: Audit, folder: str | Path) -> Path:
    """Write the page, the numbers, the maps and the predictions of an audit; return the path of the page."""
    folder = Path(folder)
    refuse_other_audit(folder)
    run = run_of(found.audited, provenance_of(found))
    save_run(run, folder)
    write_results(results_table(run), run.title, folder)
    write_record(folder / RECORD, record_of(found))
    if found.maps:
        save_maps(folder / MAPS, found.maps)
    page = folder / PAGE
    write_atomic(page, render_audit(found).encode())
    return page


def render_audit(found: Audit) -> str:
    """Return the page."""
    contents = Contents()
    contents.begin("confidence", "Is it right as often as it says?")
    evaluation = Evaluation(found.audited.name, found.audited.questions, found.audited.systems)
    plates = figures(evaluation, contents, "as they are")
    contents.begin("systems", "As they are")
    systems = ShownTable(contents.table(f"{found.audited.name}, all questions"), *system_rows(found))
    parts: dict[str, Any] = {
        "systems": systems,
        "plates": plates,
        "notes": notes(found),
        "n_measured": found.n_measured,
    }
    parts |= compared_of(found, contents) | calibrated_of(found, contents) | others_of(found, contents)
    contents.begin("provenance", "Provenance")
    title = f"Audit of {found.audited.name}"
    record = provenance_of(found)
    shown = {heading: list(leaves_of(of)) for heading, of in record.items()}
    return fill_template(
        "audit.html", parts, title=title, headline=sentences(found), provenance=shown, sections=contents.sections
    )


def figures(evaluation: Evaluation, contents: Contents, what: str) -> list[Plate]:
    """Return reliability, and risk by coverage."""
    drawn = list(evaluation.predictions)[:MOST_DRAWN]
    looks = looks_of(list(evaluation.predictions))
    few = {m: looks[m] for m in drawn}
    reliable = before_after_picture(evaluation, few, name=f"reliability-{what.replace(' ', '-')}")
    shown = Evaluation(evaluation.name, evaluation.questions, {m: evaluation.predictions[m] for m in drawn})
    risk = risk_finding(shown, few, bands=(drawn[0], drawn[-1]), n_boot=500).picture
    return [contents.figure(reliable, f"Reliability {what}"), contents.figure(risk, f"Risk and coverage {what}")]


def notes(found: Audit) -> list[str]:
    """Say what a reader must know to read the first table."""
    said = [
        "All values × 100, with 95 % bootstrap intervals over questions; ↑ higher and ↓ lower is better.",
        "Smooth ECE: how far confidence is from the share of right answers, smoothed over like confidences instead of binned. "
        "ECE has 25 bins. Floor: what a perfectly calibrated system with these confidences would still show here.",
        "AUROC: how often a right answer is surer than a wrong one. AURC: the error rate among the surest answers, averaged over "
        "all shares of them.",
    ]
    if found.audited.top_only:
        said.append(
            "Only the confidence in each answer is known: scores of whole distributions are left out, and nothing moves it."
        )
    return said


def compared_of(found: Audit, contents: Contents) -> dict[str, Any]:
    """Return the comparison of systems."""
    if found.compared is None:
        return {"compared": None}
    contents.begin("compared", "Against each other")
    return {"compared": results_shown(found.compared, contents.table("Systems, and their differences to the first"))}


def results_shown(table: ResultsTable, entry: ContentsEntry) -> ShownTable:
    """Return a table of results as the template lays it out."""
    (task,) = table.tasks
    return ShownTable(entry, [column_label(task, m) for m in task.columns], table_rows(task), notes_of(table))


def calibrated_of(found: Audit, contents: Contents) -> dict[str, Any]:
    """Return what maps are worth."""
    if found.calibrated is None:
        return {"calibrated": None}
    contents.begin("calibrated", "What calibration is worth")
    calibrated = results_shown(found.calibrated, contents.table("Before and after each map, on questions kept apart"))
    maps = ShownTable(contents.table("What was fitted, and what it is worth on questions kept apart"), *map_rows(found))
    measured = found.audited.take(~divide(found.audited, found.settings.fit_share, seed=found.settings.seed))
    after: list[Plate] = []
    if not found.audited.top_only and len(measured.questions) == found.n_measured:
        mapped = after_maps(measured, found.maps)
        after = figures(Evaluation(mapped.name, mapped.questions, mapped.systems), contents, "before and after")[:1]
    promises = [f"{name}: {one}." for name, m in found.maps.items() for one in (m.sets, m.abstention) if one]
    same = any(m.used == "none" for m in found.maps.values())
    return {"calibrated": calibrated, "maps": maps, "promises": promises, "after": after, "same_part": same}


def others_of(found: Audit, contents: Contents) -> dict[str, Any]:
    """Return subgroups and position bias."""
    parts: dict[str, Any] = {"groups": None, "flips": None}
    if found.groups:
        contents.begin("groups", "Subgroups")
        parts["groups"] = ShownTable(contents.table("Subgroups"), *group_rows(found))
    if found.flips:
        contents.begin("positions", "Position bias")
        parts["flips"] = ShownTable(contents.table("Options in another order"), *flip_rows(found))
    return parts


# ---------------------------------------------------------------------------------------------------------- as JSON


def provenance_of(found: Audit) -> dict[str, Any]:
    """Return what every number depends on."""
    settings = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(found.settings).items()}
    return {"files": dict(found.audited.sources), "settings": settings, "versions": versions()}


def record_of(found: Audit) -> dict[str, Any]:
    """Return all numbers of an audit as JSON values."""
    return {
        "name": found.audited.name,
        "n_questions": len(found.audited.questions),
        "n_measured": found.n_measured,
        "sentences": sentences(found),
        "systems": {
            name: clean(m.to_dict()) | {"floors": found.floors[name] | {"ece": m.ece_floor}}
            for name, m in found.metrics.items()
        },
        "compared": table_record(found.compared),
        "calibrated": table_record(found.calibrated),
        "maps": {name: maps.to_json() for name, maps in found.maps.items()},
        "sets": [score_record(s, "covered") | {"size": s.size, "n_options": s.n_options} for s in found.sets],
        "thresholds": [score_record(t, "answered", "right") for t in found.thresholds],
        "groups": [clean(asdict(s)) for s in found.groups],
        "flips": [clean(asdict(f)) for f in found.flips],
        "provenance": provenance_of(found),
    }


def score_record(found: Any, *names: str) -> dict[str, Any]:
    """Return the system and the scores of a measured promise."""
    scores: Mapping[str, Score | None] = {name: getattr(found, name) for name in names}
    return {"system": found.system} | {name: clean(asdict(s)) if s else None for name, s in scores.items()}


def table_record(table: ResultsTable | None) -> dict[str, Any] | None:
    """Return values and differences of a table."""
    if table is None:
        return None
    (task,) = table.tasks
    return {
        "metrics": {name: clean(m.to_dict()) for name, m in task.metrics.items()},
        "comparisons": [clean(asdict(c)) for c in task.comparisons],
    }
