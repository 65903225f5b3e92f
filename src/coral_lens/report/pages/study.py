"""The report of a study: one page over all its runs, with the tables as files. Loads nothing from outside when opened."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coral_lens.report.figures.style import INK, Picture, looks_of, panels
from coral_lens.report.names import task_names
from coral_lens.report.pages.contents import Contents
from coral_lens.report.pages.templates import fill_template, leaves_of
from coral_lens.report.tables import study_formats
from coral_lens.report.tables.formats import interval_text, percent
from coral_lens.report.tables.paper import PAPER_NOTES, PaperTable, paper_tables
from coral_lens.report.tables.run import UNSTEERED
from coral_lens.report.tables.study import (
    RELATIVE,
    Improvement,
    StudyTable,
    improvements,
    read_tables,
    relative,
    row_label,
)
from coral_lens.storage.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """Where the report of one model and mixture is."""

    model: str
    mixture: str
    folder: Path


def write_study(record: Mapping[str, Any], runs: Sequence[ReportedRun], out: Path) -> Path:
    """Write tables, figures and report.html of a study; return the page."""
    tables = [
        t for run in runs for t in read_tables(run.folder, model=run.model, mixture=run.mixture, tests=record["tests"])
    ]
    paper = paper_tables(
        [run.model for run in runs], {name: about["source"] for name, about in record["tests"].items()}
    )
    write_atomic(out / "tables.md", study_formats.study_markdown(record["name"], tables, paper).encode())
    write_atomic(out / "tables.tex", study_formats.study_latex(tables).encode())
    write_atomic(out / "tables.csv", study_formats.study_csv(tables).encode())
    write_atomic(out / "tables.json", (json.dumps(study_formats.study_record(tables), indent=1) + "\n").encode())
    pictures = study_pictures(tables)
    for picture in pictures:
        write_atomic(out / "figures" / f"{picture.name}.png", picture.png())
    links = [
        (f"{run.model}, trained on {run.mixture}", f"{run.folder.relative_to(out).as_posix()}/report.html")
        for run in runs
    ]
    page = out / "report.html"
    write_atomic(page, render_study(record, tables, pictures, links).encode())
    return page


def render_study(
    record: Mapping[str, Any],
    tables: Sequence[StudyTable],
    pictures: Sequence[Picture],
    links: Sequence[tuple[str, str]],
) -> str:
    """Return the page."""
    contents = Contents()
    parts = summary_of(tables, pictures, contents) | numbers_of(record, tables, contents)
    for anchor, title in OTHERS.items():
        contents.begin(anchor, title)
    questions = {
        **{f"Training: {name}": list(leaves_of(about)) for name, about in record["mixtures"].items()},
        **{f"Test: {name}": list(leaves_of(about)) for name, about in record["tests"].items()},
    }
    provenance = list(leaves_of({"study": record["study"], "versions": record["versions"]}))
    about = {"questions": questions, "runs": links, "provenance": provenance, "sections": contents.sections}
    return fill_template("study.html", parts, about, title=record["name"], headline=study_headline(tables))


OTHERS = {"questions": "Questions", "runs": "Reports of each model", "provenance": "Provenance"}


def summary_of(tables: Sequence[StudyTable], pictures: Sequence[Picture], contents: Contents) -> dict[str, Any]:
    """Return what the page says on average."""
    contents.begin("summary", "Summary")
    return {
        "figures": [contents.figure(p, "Relative improvement on the unsteered model") for p in pictures],
        "summary": contents.table("Relative improvement on the unsteered model"),
        "heads": study_formats.IMPROVEMENT_HEADS,
        "improvements": study_formats.improvement_rows(tables),
        "summary_notes": study_formats.SUMMARY_NOTES,
    }


def numbers_of(record: Mapping[str, Any], tables: Sequence[StudyTable], contents: Contents) -> dict[str, Any]:
    """Return the tables of the study, and those of the paper that they can stand beside."""
    contents.begin("tables", "Tables")
    ours = [
        (
            contents.table(study_formats.short_heading(t)),
            t,
            list(study_formats.column_labels(t).values()),
            study_formats.table_lines(t),
        )
        for t in tables
    ]
    paper = paper_of(record, [t.model for t in tables])
    if paper:
        contents.begin("paper", "The paper's numbers")
    theirs = [(contents.table(p.heading), list(p.heads.values()), p.rows) for p in paper]
    names = task_names(dict.fromkeys(t.test for t in tables))
    return {"names": names, "tables": ours, "notes": study_formats.NOTES, "paper": theirs, "paper_notes": PAPER_NOTES}


def paper_of(record: Mapping[str, Any], models: Sequence[str]) -> list[PaperTable]:
    """Return the paper's tables of the tests of a study."""
    return paper_tables(dict.fromkeys(models), {name: about["source"] for name, about in record["tests"].items()})


TESTS = {"held-out": "other questions of the same tasks", "transfer": "tasks that it never saw"}


def study_headline(tables: Sequence[StudyTable]) -> list[str]:
    """Say for each mixture and kind of test what the methods did on average, gains and losses alike."""
    averages = [i for i in improvements(tables) if i.method not in UNSTEERED and set(i.means) >= set(RELATIVE)]
    sentences = []
    for mixture, kind in dict.fromkeys((i.mixture, i.kind) for i in averages):
        methods = [i for i in averages if (i.mixture, i.kind) == (mixture, kind)]
        ece = (
            f"ECE: {mean_changes(methods, 'ece', -1)}."
            if methods[0].ranks
            else "There are too few questions to rank methods by ECE."
        )
        sentences.append(
            f"Trained on {mixture} and asked {TESTS[kind]}, accuracy changed relative to the unsteered model (mean of "
            f"{methods[0].n_cells}): {mean_changes(methods, 'accuracy', 1)}. {ece}"
        )
    return sentences


def mean_changes(methods: Sequence[Improvement], metric: str, sign: int) -> str:
    """Return each method with its mean relative change of a metric; with the sign -1, a gain is a fall."""
    return ", ".join(
        f"{row_label(i.method)} {percent(sign * i.means[metric], sign=True)} %{interval_of(i, metric, sign)}"
        for i in methods
    )


def interval_of(improvement: Improvement, metric: str, sign: int) -> str:
    """Return ` (+8.1 to +12.0)`, or nothing where the interval of a mean is not known."""
    if metric not in improvement.intervals:
        return ""
    low, high = sorted(sign * x for x in improvement.intervals[metric])
    return f" ({interval_text(low, high, sign=True)})"


def study_pictures(tables: Sequence[StudyTable]) -> list[Picture]:
    """Return a figure of the relative improvements for each kind of test."""
    kinds = dict.fromkeys((t.mixture, t.kind) for t in tables)
    return [improvement_picture([t for t in tables if (t.mixture, t.kind) == k], n) for n, k in enumerate(kinds)]


def improvement_picture(tables: Sequence[StudyTable], number: int) -> Picture:
    """Draw each value's relative improvement as a faint dot, and the mean of each method as its mark."""
    averages = improvements(tables)
    methods = [i.method for i in averages]
    looks, head = looks_of(methods), f"{tables[0].kind}, trained on {tables[0].mixture}"

    def paint(figure: Figure) -> None:
        for axes, metric in zip(panels(figure, len(RELATIVE)), RELATIVE, strict=True):
            for x, average in enumerate(averages):
                look = looks[average.method]
                dots = [100 * v for t in tables if (v := relative(t, average.method, metric)) is not None]
                axes.plot([x] * len(dots), dots, ".", color=look.colour, alpha=0.35)
                if metric in average.means:
                    axes.plot(x, 100 * average.means[metric], look.marker, color=look.colour, markersize=8)
            axes.axhline(0, color=INK, linewidth=1)
            axes.set_title(f"{'accuracy' if metric == 'accuracy' else 'ECE'}: relative improvement (%)")
            axes.set_xticks(range(len(methods)), [row_label(m) for m in methods], rotation=35, ha="right")
            axes.margins(x=0.1)

    alt = f"Relative improvements, {head}. " + "; ".join(
        f"{row_label(i.method)}: " + ", ".join(f"{m} {percent(v, sign=True)} %" for m, v in i.means.items())
        for i in averages
    )
    caption = f"{head.capitalize()}: one dot for each model and test, the mark is their mean. Above 0 is better than unsteered."
    return Picture(f"improvement-{number}", paint, 5.2, alt, caption)
