"""The tables of an audit, as rows of cells that a page, Markdown and the terminal lay out. Computes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from coral_lens.audit.measure import TOP_METRICS, Audit
from coral_lens.metrics.display import Table, as_text
from coral_lens.metrics.scores import Metrics, Score, metric_named
from coral_lens.report.names import method_name
from coral_lens.report.tables.formats import Cell, Row, interval_text, percent

SHOWN = ("accuracy", "smooth_ece", "ece", "brier", "nll", "auroc", "aurc")
"""The metrics of the first table."""


def cell_of(score: Score, note: str = "", *, sign: bool = False) -> Cell:
    """Return a value times 100 with its interval."""
    return Cell(percent(score.value, sign=sign), interval_text(score.low, score.high, sign=sign), note)


def label_of(metric: str) -> str:
    """Return a metric's name with its better direction."""
    about = metric_named(metric)
    return f"{about.label} {'↑' if about.higher_is_better else '↓'}"


def metrics_shown(found: Audit) -> tuple[str, ...]:
    """Return the metrics that mean something for what was audited."""
    if found.audited.top_only:
        return TOP_METRICS
    first = next(iter(found.metrics.values()))
    return (*SHOWN, *(m for m in ("kl", "rps", "mae") if m in first.scores))


def system_rows(found: Audit) -> tuple[list[str], list[Row]]:
    """Return the systems as they are, on all questions; beside an ECE stands its floor."""
    shown = metrics_shown(found)
    rows = []
    for name, metrics in found.metrics.items():
        cells = {m: cell_of(metrics.scores[m], floor_note(found, name, m, metrics)) for m in shown}
        rows.append(Row(method_name(name), cells))
    return [label_of(m) for m in shown], rows


def floor_note(found: Audit, name: str, metric: str, metrics: Metrics) -> str:
    """Return the noise floor of an ECE."""
    floor = {"ece": metrics.ece_floor, "smooth_ece": found.floors[name]["smooth_ece"]}.get(metric)
    return "" if floor is None else f"floor {percent(floor)}"


def map_rows(found: Audit) -> tuple[list[str], list[Row]]:
    """Return what was fitted for each system, and what it is worth on other questions."""
    heads = [
        "Temperature",
        "Isotonic",
        "Stands on",
        "Sets: coverage",
        "Sets: options",
        "Threshold",
        "Answered",
        "Right",
    ]
    sets, thresholds = {s.system: s for s in found.sets}, {t.system: t for t in found.thresholds}
    rows = []
    for name, maps in found.maps.items():
        promise, limit = sets.get(name), thresholds.get(name)
        cells = {
            "temperature": Cell(f"{maps.temperature:.3g}", "", f"{maps.n_fitted:,} questions"),
            "isotonic": Cell(f"{len(maps.curve.x)} points"),
            "used": Cell(maps.used),
            "coverage": cell_of(promise.covered, f"asked for {percent(found.settings.coverage)}")
            if promise
            else Cell("–"),
            "size": Cell(f"{promise.size:.2f}", "", f"of {promise.n_options:.2f}") if promise else Cell("–"),
            "threshold": Cell(threshold_text(maps.abstention.threshold)) if maps.abstention else Cell("–"),
            "answered": cell_of(limit.answered) if limit else Cell("–"),
            "right": cell_of(limit.right) if limit and limit.right else Cell("–"),
        }
        rows.append(Row(method_name(name), cells))
    return heads, rows


def threshold_text(threshold: float | None) -> str:
    """Return a threshold; the one below every confidence lets all answers pass."""
    return "none is safe" if threshold is None else "every answer" if threshold < 0 else f"{threshold:.4g}"


def group_rows(found: Audit) -> tuple[list[str], list[Row]]:
    """Return every system on every subgroup: how right, how sure, and by how much too sure."""
    rows = []
    for s in found.groups:
        mark = "▼" if s.overconfidence.low > 0 or s.overconfidence.high < 0 else ""
        over = cell_of(s.overconfidence, sign=True)
        cells = {
            "questions": Cell(f"{s.n_questions:,}"),
            "accuracy": cell_of(s.accuracy),
            "confidence": cell_of(s.confidence),
            "over": Cell(over.value, over.interval, over.note, mark=mark),
        }
        label = (
            f"{s.test}: {s.task}" if len(found.audited.systems) == 1 else f"{s.test}: {s.task}, {method_name(s.method)}"
        )
        rows.append(Row(label, cells))
    return ["Questions", "Accuracy ↑", "Confidence", "Confidence − accuracy"], rows


def flip_rows(found: Audit) -> tuple[list[str], list[Row]]:
    """Return what became of answers when options were put into another order."""
    rows = [
        Row(
            method_name(f.system),
            {
                "pairs": Cell(f"{f.n_pairs:,}"),
                "flipped": cell_of(f.flipped),
                "moved": Cell(percent(f.moved)),
                "first": Cell(percent(f.first, sign=True)),
            },
        )
        for f in found.flips
    ]
    return ["Questions", "Answers that flip ↓", "Mean change of a probability ↓", "First place, beyond its share"], rows


# ------------------------------------------------------------------------------------------------------- in the terminal


def in_lines(title: str, heads: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Return values without their intervals as aligned lines, for 80 columns and for logs."""
    cells = [
        (row.label, *(cell.value + (f" {cell.mark}" if cell.mark else "") for cell in row.cells.values()))
        for row in rows
    ]
    return as_text(Table(title, ("", *heads), tuple(cells))).splitlines()


def system_lines(found: Audit) -> list[str]:
    """Return the main scores of each system as it is."""
    shown = ("accuracy", "smooth_ece", "brier_top1" if found.audited.top_only else "brier", "auroc")
    rows = [
        Row(method_name(name), {m: Cell(percent(metrics.scores[m].value)) for m in shown})
        for name, metrics in found.metrics.items()
    ]
    return in_lines("As they are, times 100 (intervals are on the page):", [label_of(m) for m in shown], rows)


def calibrated_lines(found: Audit) -> list[str]:
    """Return what each map makes of each system on questions that it was not fitted on."""
    if found.calibrated is None or found.audited.top_only:
        return []
    (task,) = found.calibrated.tasks
    shown = ("ece", "brier", "nll")
    rows = [
        Row(method_name(name), {m: Cell(percent(metrics.scores[m].value)) for m in shown})
        for name, metrics in task.metrics.items()
    ]
    return in_lines(
        f"On {found.n_measured:,} questions that nothing was fitted on:", [label_of(m) for m in shown], rows
    )


def group_lines(found: Audit) -> list[str]:
    """Return the subgroups."""
    return in_lines("Subgroups:", *group_rows(found)) if found.groups else []
