"""Figures of the analyses, drawn from what NAME.json holds: the same file gives the same figure. Only draws.

Curves carry their 95 % interval as a band, and differ in line and marker as well as in colour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coral_lens.manifest import write_atomic, write_json
from coral_lens.metrics import METRICS
from coral_lens.report.style import FAINT, INK, KNOWN, Look, Picture, panels, spare_look

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = Mapping[str, Any]
LOOKS = (
    KNOWN["coral"],
    KNOWN["temperature"],
    KNOWN["listwise"],
    KNOWN["listwise tempered"],
    *map(spare_look, range(6)),
)


def write_pictures(record: Record, folder: Path) -> list[str]:
    """Draw an analysis into NAME.svg and NAME.png, and what needs a figure of its own into NAME-PART; return the names.

    Title and caption of each go into its JSON, where the page of a run looks for them.
    """
    found = PICTURES[record["analysis"]](record)
    for picture in found:
        words = {"title": TITLES[picture.name], "caption": picture.caption, "alt": picture.alt}
        write_json(folder / f"{picture.name}.json", {**words, **(record if picture.name == record["analysis"] else {})})
        write_atomic(folder / f"{picture.name}.svg", picture.svg().encode())
        write_atomic(folder / f"{picture.name}.png", picture.png())
    return [picture.name for picture in found]


def column(rows: Sequence[Record], *path: str) -> list[Any]:
    """Return one entry of every row."""
    found: list[Any] = list(rows)
    for name in path:
        found = [row[name] for row in found]
    return found


def draw_curve(
    axes: Any, x: Sequence[Any], scores: Sequence[Record], look: Look, *, label: str = "", unit: int = 100
) -> None:
    """Draw scores with their intervals as a band."""
    values, low, high = ([unit * s[part] for s in scores] for part in ("value", "low", "high"))
    few = len(x) <= 40
    axes.fill_between(x, low, high, color=look.colour, alpha=0.16, linewidth=0)
    look_of = look.dots if few else {"color": look.colour, "linestyle": look.line}
    axes.plot(x, values, **look_of, markersize=3.4, label=label or None)


def draw_level(axes: Any, score: Record, label: str, look: Look, *, unit: int = 100) -> None:
    """Draw a score that does not depend on the horizontal axis, with its interval and its name at the right."""
    axes.axhspan(unit * score["low"], unit * score["high"], color=look.colour, alpha=0.10, linewidth=0)
    axes.axhline(unit * score["value"], color=look.colour, linestyle=look.line, linewidth=1.5, label=label)


def title_of(metric: str) -> str:
    """Return a metric's name with the direction that is better."""
    return f"{METRICS[metric].label} × 100 {'↑' if METRICS[metric].higher_is_better else '↓'}"


def legend(axes: Any, *, columns: int = 2) -> None:
    """Put the legend above the axes, where it hides nothing."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.12),
        ncols=columns,
        borderaxespad=0.0,
        handlelength=2.2,
        columnspacing=1.0,
        fontsize=9,
    )


def of_what(record: Record) -> str:
    """Return what an analysis is of, for a caption."""
    return f"{Path(record['model']).name}, {record['task']}, {record['n_questions']:,} questions"


# -------------------------------------------------------------------------------------------------------------- layers


def layer_pictures(record: Record) -> list[Picture]:
    """Accuracy, ECE and R2 by layer; and what is left when the forward pass stops early."""
    rows, base = record["rows"], record["base"]
    x = column(rows, "layer")

    def paint(figure: Figure) -> None:
        axes = panels(figure, 3)
        for ax, metric in zip(axes, ("accuracy", "ece"), strict=False):
            draw_level(ax, base[metric], "base", KNOWN["base"])
            draw_curve(ax, x, column(rows, "at_one", metric), LOOKS[1], label="steered, γ = 1")
            draw_curve(ax, x, column(rows, "chosen", metric), LOOKS[0], label="steered, chosen γ")
            ax.set_title(title_of(metric), fontsize=10.5)
        axes[2].axhline(0.0, color=FAINT, linewidth=1.0)
        draw_curve(axes[2], x, column(rows, "r2"), KNOWN["listwise"], unit=1)
        axes[2].set_title("R² of predicted residuals ↑", fontsize=10.5)
        axes[2].set_xlabel("layer (0: embeddings)")
        legend(axes[0], columns=3)

    best = max(rows, key=lambda row: row["r2"]["value"])
    caption = (
        f"{of_what(record)}: a ridge probe at every layer, scored out of fold. R² is highest at layer {best['layer']} "
        f"({best['r2']['value']:.3f}); bands are 95 % intervals."
    )
    return [Picture("layers", paint, 5.6, caption, caption), exit_picture(record)]


def exit_picture(record: Record) -> Picture:
    """Accuracy and Brier score of a lens without any base, against the share of the forward pass that it needs."""
    rows = record["rows"]
    x = [100 * row["share"] for row in rows]

    def paint(figure: Figure) -> None:
        axes = panels(figure, 2)
        for ax, metric in zip(axes, ("accuracy", "brier"), strict=True):
            draw_level(ax, record["base"][metric], "base, full pass", KNOWN["base"])
            draw_level(ax, record["single"][metric], "steered, full pass", KNOWN["coral"])
            draw_curve(ax, x, column(rows, "exit_best", metric), LOOKS[1], label="no base, states up to here")
            ax.set_title(title_of(metric), fontsize=10.5)
        axes[1].set_xlabel("share of the forward pass, %")
        legend(axes[0])

    caption = (
        f"{of_what(record)}: a lens that needs no base probability and stops at the best layer up to here, against base "
        "probabilities of the full pass and the best single lens on them."
    )
    return Picture("layers-exit", paint, 4.4, caption, caption)


# ---------------------------------------------------------------------------------------------------------- dimensions


def dimension_pictures(record: Record) -> list[Picture]:
    """R2 and explained variance against the number of components, a curve per group of layers."""
    groups = [group["layers"] for group in record["groups"]]
    by_group = {name: [row for row in record["rows"] if row["layers"] == name] for name in groups}

    def paint(figure: Figure) -> None:
        axes = panels(figure, 2)
        for look, (name, rows) in zip(LOOKS, by_group.items(), strict=False):
            x = column(rows, "components")
            draw_curve(axes[0], x, column(rows, "r2"), look, unit=1, label=name)
            axes[1].plot(x, [100 * v for v in column(rows, "explained")], linestyle=look.line, color=look.colour)
        axes[0].axhline(0.0, color=FAINT, linewidth=1.0)
        axes[0].set_title("R² of predicted residuals ↑", fontsize=10.5)
        axes[1].set_title("explained variance of the states, %", fontsize=10.5)
        axes[1].set_xlabel("principal components kept")
        axes[1].set_ylim(0, 102)
        legend(axes[0], columns=4)

    rising = [g["layers"] for g in record["groups"] if g["last_half"]["low"] > 0]
    said = (
        f"still rising in the second half at layers {', '.join(rising)}" if rising else "none clearly rising at its end"
    )
    caption = f"{of_what(record)}: ridge on the first k principal components, averaged over five layers; {said}."
    return [Picture("dimensions", paint, 5.2, caption, caption)]


# --------------------------------------------------------------------------------------------------------------- heads


def head_pictures(record: Record) -> list[Picture]:
    """How R2 is spread over heads, how fast it adds up, and where in the model the heads are."""
    values = column(record["rows"], "r2", "value")
    n, needed = len(values), record["needed"]

    def paint(figure: Figure) -> None:
        top, bottom = figure.subplots(2, 1)
        top.hist(values, bins=30, color=LOOKS[1].colour, alpha=0.75, edgecolor="white", linewidth=0.6)
        top.axvline(record["mean"], color=INK, linestyle="--", linewidth=1.4, label=f"mean {record['mean']:.3f}")
        top.set_xlabel("R² of one head, out of fold")
        top.set_ylabel("heads")
        top.legend(loc="upper right")
        bottom.plot(range(1, n + 1), [100 * c for c in record["cumulative"]], color=LOOKS[0].colour)
        bottom.axhline(80, color=FAINT, linewidth=1.0, linestyle=":")
        if needed:
            bottom.plot(needed, 80, LOOKS[0].marker, color=LOOKS[0].colour, markeredgecolor=INK, markersize=8)
            share = f"{needed} heads ({100 * record['needed_share']:.0f} %)"
            bottom.annotate(share, (needed, 80), xytext=(10, -14), textcoords="offset points", fontsize=10)
        bottom.set_xlabel("best heads")
        bottom.set_ylabel("positive signal, %")
        bottom.set_ylim(0, 103)

    caption = (
        f"{of_what(record)}: a small network on each of {n} heads. Mean R² {record['mean']:.3f}, highest "
        f"{record['highest']:.3f}; {needed} heads hold 80 % of the positive signal, the best 48 hold "
        f"{100 * record['top_share']:.0f} %; {record['clear']} have an interval above 0."
    )
    return [Picture("heads", paint, 4.9, caption, caption), head_map(record)]


def head_map(record: Record) -> Picture:
    """Return a map of R2, a column per block and a row per head; heads whose interval lies above 0 are dotted."""
    rows = record["rows"]
    blocks, heads = (sorted({row[name] for row in rows}) for name in ("layer", "head"))
    at = {(row["layer"], row["head"]): row["r2"] for row in rows}
    most = max(abs(record["highest"]), 1e-6)

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        grid = [[at[b, h]["value"] for b in blocks] for h in heads]
        image = axes.imshow(grid, cmap="PuOr_r", vmin=-most, vmax=most, aspect="auto", origin="lower")
        dots = [(i, j) for i, b in enumerate(blocks) for j, h in enumerate(heads) if at[b, h]["low"] > 0]
        if dots:
            axes.plot([i for i, _ in dots], [j for _, j in dots], "o", markersize=2.4, color=INK)
        axes.set_xticks([i for i, b in enumerate(blocks) if b % 5 == 0], [b for b in blocks if b % 5 == 0])
        axes.set_yticks([j for j in range(len(heads)) if len(heads) <= 16 or j % 4 == 0])
        axes.grid(False)
        axes.set_xlabel("block")
        axes.set_ylabel("head")
        figure.colorbar(image, ax=axes, label="R², out of fold", fraction=0.05)

    caption = f"{of_what(record)}: R² of every head; a dot marks heads whose 95 % interval lies above 0."
    return Picture("heads-map", paint, min(6.0, 1.4 + 0.2 * len(heads)), caption, caption)


TITLES = {
    "layers": "Which layers know",
    "layers-exit": "Leaving the forward pass early",
    "dimensions": "How many directions the signal needs",
    "heads": "How the signal is spread over heads",
    "heads-map": "Where the heads are",
}
PICTURES: dict[str, Callable[[Record], list[Picture]]] = {
    "layers": layer_pictures,
    "dimensions": dimension_pictures,
    "heads": head_pictures,
}
"""How each analysis is drawn."""
