"""How every figure looks, and how it becomes SVG or PNG. Never touches pyplot or its global state.

Figures are small with large letters: scaled to a phone's 360 pixels they are still read without zooming. Methods differ
in marker, line and colour (Okabe and Ito's palette), so that no figure needs colour to be understood.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 4.6
"""Of every figure, in inches."""
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
    "svg.fonttype": "path",
    "svg.hashsalt": "coral-lens",
    "text.color": INK,
    "xtick.color": FAINT,
    "xtick.labelsize": 10,
    "ytick.color": FAINT,
    "ytick.labelsize": 10,
}


@dataclass(frozen=True, slots=True)
class Look:
    """What tells a method from the others, in colour and without."""

    colour: str
    marker: str
    line: str


KNOWN = {
    "base": Look("#5d6b76", "o", "--"),
    "temperature": Look("#0072b2", "s", "-."),
    "coral": Look("#d5502b", "D", "-"),
    "listwise": Look("#009e73", "^", ":"),
    "listwise tempered": Look("#a3568c", "v", "-"),
}
COLOURS = ("#b8860b", "#7f5539", "#332288", "#6b8e23", "#008b8b", "#aa4466", "#3d5afe")
MARKERS = ("P", "X", "*", "<", ">", "p", "h", "d", "8", "H", "1")
LINES = (":", "--", "-.", "-")
"""Of methods without a look of their own. Their numbers share no divisor, so that 308 methods differ."""


def looks_of(methods: Sequence[str]) -> dict[str, Look]:
    """Return a look for each method: the same one in every figure of a report."""
    others = [m for m in methods if m not in KNOWN]
    spare = {
        m: Look(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], LINES[i % len(LINES)])
        for i, m in enumerate(others)
    }
    return {m: KNOWN[m] if m in KNOWN else spare[m] for m in methods}


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure that is drawn when asked for, with what it shows in words."""

    name: str
    """Unique in a page: prefix of the SVG's ids."""
    paint: Callable[[Figure], None]
    height: float
    """In inches; all are WIDTH wide."""
    alt: str
    """What a reader who cannot see it should know."""
    caption: str

    def svg(self) -> str:
        """Return an `<svg>` element to be put into a page; the same picture gives the same text."""
        with self._drawn() as figure:
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        return inline(out.getvalue(), name=self.name, alt=self.alt)

    def png(self, *, dpi: int = 200) -> bytes:
        """Return a PNG file."""
        with self._drawn() as figure:
            out = io.BytesIO()
            figure.savefig(out, format="png", dpi=dpi, metadata={"Software": None})
        return out.getvalue()

    @contextmanager
    def _drawn(self) -> Iterator[Figure]:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        with matplotlib.rc_context(RC):  # type: ignore[arg-type]
            figure = Figure(figsize=(WIDTH, self.height), layout="constrained")
            FigureCanvasAgg(figure)
            self.paint(figure)
            yield figure


def inline(svg: str, *, name: str, alt: str) -> str:
    """Return the bare `<svg>` element, with ids that do not clash with those of other figures in the same page."""
    from markupsafe import escape

    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"\s*\n\s*", " ", body)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    size = re.compile(r'\s(?:width|height)="[\d.]+pt"')
    head, rest = body.split(">", 1)
    return f'{size.sub("", head)} role="img" aria-label="{escape(alt)}">{rest}'.strip()


def panels(figure: Figure, n: int, *, ratios: Sequence[float] | None = None) -> list[Any]:
    """Return n axes on top of each other that share the horizontal axis."""
    axes = figure.subplots(n, 1, sharex=True, squeeze=False, height_ratios=ratios)
    return list(axes[:, 0])
