"""How every figure looks, and how it becomes SVG or PNG. Never touches pyplot or its global state.

Figures are small with large letters: scaled to a phone's 360 pixels they are still read without zooming. Methods differ
in marker, dash, hatch and colour: no figure needs colour to be understood, with eighteen methods and more.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coral_lens.errors import need
from coral_lens.report.figures.compact import compacted
from coral_lens.report.names import method_name
from coral_lens.storage.escape import in_one_line
from coral_lens.storage.files import digest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


WIDTH = 4.6
"""The width of every figure, in inches."""
INK, FAINT, GRID = "#23303a", "#5d6b76", "#dfe4e8"
RC = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#9aa5ae",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 10.5,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "hatch.linewidth": 0.7,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "coral-lens",
    "text.color": INK,
    "text.parse_math": False,  # a name with a dollar sign is a name
    "xtick.color": FAINT,
    "xtick.labelsize": 10,
    "ytick.color": FAINT,
    "ytick.labelsize": 10,
}


Line = str | tuple[int, tuple[float | int, ...]]
"""A dash pattern as matplotlib takes it."""


@dataclass(frozen=True, slots=True)
class Look:
    """What tells a method from the others, in colour and without."""

    colour: str
    marker: str
    line: Line
    hatch: str = ""
    """The hatching of bars."""
    hollow: bool = False
    """Whether markers are drawn as outlines."""

    @property
    def dots(self) -> dict[str, Any]:
        """How a line with markers is drawn in this look."""
        face = "white" if self.hollow else self.colour
        return {"color": self.colour, "marker": self.marker, "markerfacecolor": face, "linestyle": self.line}

    @property
    def bars(self) -> dict[str, Any]:
        """How a bar is drawn in this look: pale and hatched, with an edge."""
        return {"facecolor": f"{self.colour}38", "edgecolor": self.colour, "hatch": self.hatch, "linewidth": 1.0}


KNOWN = {
    "base": Look("#5d6b76", "o", "--"),
    "temperature": Look("#0072b2", "s", "-.", "\\\\\\"),
    "coral": Look("#d5502b", "D", "-", "///"),
    "coral ridge": Look("#d5502b", "D", (0, (3, 1)), "//", hollow=True),
    "listwise": Look("#00805e", "^", ":", "..."),
    "listwise tempered": Look("#a3568c", "v", (0, (7, 2)), "xxx"),
}
"""The same look in every report."""
COLOURS = ("#8a6a00", "#7f5539", "#332288", "#5f7d1f", "#007a7a", "#aa4466", "#1d2830", "#c2185b", "#1565c0")
MARKERS = ("P", "X", "*", "<", ">", "p", "h", "d", "8")
LINES: tuple[Line, ...] = ((0, (1, 1)), (0, (5, 1.5)), (0, (3, 1, 1, 1)), (0, (8, 2, 2, 2)), (0, (3, 1, 1, 1, 1, 1)),
                           (0, (2, 2)), "-")  # fmt: skip
HATCHES = ("---", "|||", "+++", "ooo", "\\\\", "//", "..", "**", "OO", "xx")


def spare_look(i: int) -> Look:
    """Return the look of the i-th method that has none of its own: markers recur after nine, then as outlines."""
    n = len(MARKERS)
    return Look(COLOURS[i % n], MARKERS[i % n], LINES[i % len(LINES)], HATCHES[i % len(HATCHES)], i // n % 2 == 1)


def looks_of(methods: Sequence[str]) -> dict[str, Look]:
    """Return a look for each method: the same one in every figure of a report."""
    others = [m for m in methods if m not in KNOWN]
    return {m: KNOWN[m] if m in KNOWN else spare_look(others.index(m)) for m in methods}


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure that is drawn when asked for, with what it shows in words."""

    name: str
    """Unique in a page: the SVG's ids are made of it."""
    paint: Callable[[Figure], None]
    height: float
    """In inches."""
    alt: str
    """What a reader who cannot see it should know."""
    caption: str
    width: float = WIDTH
    """In inches."""

    def svg(self) -> str:
        """Return an `<svg>` element to be put into a page; the same picture gives the same text."""
        with self._drawn() as figure:
            return self._svg(figure)

    def png(self, *, dpi: int = 200) -> bytes:
        """Return a PNG file."""
        with self._drawn() as figure:
            return png_of(figure, dpi=dpi)

    def files(self) -> dict[str, bytes]:
        """Return the picture as files, by their endings; it is painted and laid out once for both."""
        with self._drawn() as figure:
            svg = self._svg(figure)
            figure.set_layout_engine(
                None
            )  # everything has its place; with a layout engine, all would be drawn twice more
            return {".svg": svg.encode(), ".png": png_of(figure, dpi=200)}

    def _svg(self, figure: Figure) -> str:
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        return inline(out.getvalue(), name=self.name, alt=self.alt)

    @contextmanager
    def _drawn(self) -> Iterator[Figure]:
        need("report", by="A figure")
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        with matplotlib.rc_context(RC), warnings.catch_warnings():  # type: ignore[arg-type]
            # of SVG the reader's own fonts show such a name, and of PNG a box says that there is a letter
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            figure = Figure(figsize=(self.width, self.height), layout="constrained")
            FigureCanvasAgg(figure)
            self.paint(figure)
            yield figure


@dataclass(frozen=True, slots=True)
class DrawnPicture:
    """What was drawn of a picture: pages show it as often as they like, and it is not painted again."""

    name: str
    caption: str
    markup: str

    def svg(self) -> str:
        """Return the `<svg>` element, as the picture itself gives it."""
        return self.markup


def png_of(figure: Figure, *, dpi: int) -> bytes:
    """Return a painted figure as a PNG file."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=dpi, metadata={"Software": None})
    return out.getvalue()


def inline(svg: str, *, name: str, alt: str) -> str:
    """Return the bare `<svg>` element, with ids that do not clash with those of other figures in the same page."""
    from markupsafe import escape

    said = escape(in_one_line(alt))
    head, rest = compacted(svg, prefix=prefix_of(name)).split(">", 1)
    size = re.compile(r'\s(?:width|height)="[\d.]+pt"')
    return f'{size.sub("", head)} role="img" aria-label="{said}">{rest}'.strip()


def prefix_of(name: str) -> str:
    """Return a short name for the ids of a figure: they are written hundreds of times."""
    return f"f{digest(name)[:6]}-"


def panels(figure: Figure, n: int, *, ratios: Sequence[float] | None = None) -> list[Any]:
    """Return n axes on top of each other that share the horizontal axis."""
    axes = figure.subplots(n, 1, sharex=True, squeeze=False, height_ratios=ratios)
    return list(axes[:, 0])


def method_key(figure: Figure, looks: Mapping[str, Look], *, more: Sequence[Any] = ()) -> None:
    """Put the key of methods below the axes: in one line where the names are short."""
    from matplotlib.lines import Line2D

    labels = {m: clipped(method_name(m), 22) for m in looks}
    keys = [Line2D([], [], **look.dots, label=labels[m], linewidth=1.6) for m, look in looks.items()]
    n_keys, longest = len(keys) + len(more), max(map(len, labels.values()))
    in_one_line = sum(map(len, labels.values())) + 6 * n_keys <= 54
    n_columns = n_keys if in_one_line else 3 if longest <= 11 else 2
    spacing = {"handlelength": 2.4, "handletextpad": 0.4, "columnspacing": 1.0, "borderpad": 0.1}
    figure.legend(handles=[*keys, *more], loc="outside lower left", ncols=n_columns, **spacing)


def clipped(text: str, limit: int) -> str:
    """Return a name of a user's as a figure shows it: in one line, short, and without what SVG may not hold."""
    line = in_one_line(text)
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
