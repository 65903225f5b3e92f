"""Numbers the figures and tables of a page and lists them: a reader finds each from the contents. Never draws."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from coral_lens.report.figures.style import DrawnPicture, Picture
from coral_lens.report.findings import Gathered


@dataclass(frozen=True, slots=True)
class Plate:
    """A figure as the page shows it, with its table where it has one."""

    anchor: str
    label: str
    """`Figure 3`, or `Table 2` for a finding without a figure."""
    title: str
    body: Any
    """Markup: an `<svg>` of ours, or an `<img>` of a gathered file, in which no script runs."""
    caption: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    n_rows: int = 0


@dataclass(frozen=True, slots=True)
class ContentsEntry:
    """A line of the contents."""

    anchor: str
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page, with what is in it."""

    anchor: str
    title: str
    entries: list[ContentsEntry] = field(default_factory=list)


@dataclass
class Contents:
    """The sections of a page in order. Whatever is numbered goes to the section that was begun last."""

    sections: list[Section] = field(default_factory=list)
    n_figures: int = 0
    n_tables: int = 0

    def begin(self, anchor: str, title: str) -> None:
        """Begin a section."""
        self.sections.append(Section(anchor, title))

    def figure(self, picture: Picture | DrawnPicture, title: str) -> Plate:
        """Number a picture of ours."""
        from markupsafe import Markup

        return Plate(*self._entry("Figure", title), title, Markup(picture.svg()), picture.caption)

    def table(self, title: str) -> ContentsEntry:
        """Number a table that the template lays out."""
        anchor, label = self._entry("Table", title)
        return ContentsEntry(anchor, label, title)

    def gathered(self, finding: Gathered) -> Plate:
        """Number a finding that was read from files."""
        from markupsafe import Markup, escape

        body = Markup("")
        if finding.svg:
            data = base64.b64encode(finding.svg).decode()
            body = Markup(f'<img alt="{escape(finding.alt)}" src="data:image/svg+xml;base64,{data}">')
        anchor, label = self._entry("Figure" if finding.svg else "Table", finding.title)
        rows = tuple(tuple(rounded_cell(cell) for cell in row) for row in finding.rows)
        return Plate(anchor, label, finding.title, body, finding.caption, finding.columns, rows, finding.n_rows)

    def _entry(self, kind: str, title: str) -> tuple[str, str]:
        """Count one more figure or table, and put it on the list."""
        if kind == "Figure":
            self.n_figures += 1
        else:
            self.n_tables += 1
        number = self.n_figures if kind == "Figure" else self.n_tables
        anchor, label = f"{kind.lower()}-{number}", f"{kind} {number}"
        self.sections[-1].entries.append(ContentsEntry(anchor, label, title))
        return anchor, label


def rounded_cell(cell: str) -> str:
    """Return a number with four significant digits and anything else as it is; the file has all digits."""
    try:
        value = float(cell)
    except ValueError:
        return cell
    return cell if value.is_integer() else f"{value:.4g}"


def by_section(findings: Sequence[Gathered]) -> dict[str, list[Gathered]]:
    """Return findings by the folder that they lie in, those of `analysis/` itself first."""
    names = sorted({f.section for f in findings})
    return {name: [f for f in findings if f.section == name] for name in names}
