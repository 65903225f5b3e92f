"""The paper's figures in its own shape: two panels, left and right as its captions say. Drawn from the JSON of analyses.

What the paper does not show stands beside it where it can: thin lines are 95 % intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coral_lens.errors import CoralError
from coral_lens.report.figures.analysis import TITLES, caption_subject, column, with_looks
from coral_lens.report.figures.style import FAINT, INK, KNOWN, Picture
from coral_lens.storage.files import write_atomic, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Record = Mapping[str, Any]
WIDE = 6.4
"""Inches: two panels side by side that are still read on a phone."""
BARS = "#2e8b57"
"""The paper's bars are green, its baseline a dotted red line."""
BASELINE = "#c0392b"


def layer_figure(record: Record, *, name: str) -> Picture:
    """Left: accuracy across layers, steered (bars) and unsteered (dotted line). Right: the ECE."""
    rows, base = record["rows"], record["base"]
    x = column(rows, "layer")

    def paint(figure: Figure) -> None:
        axes = figure.subplots(1, 2)
        for ax, metric, title in zip(axes, ("accuracy", "ece"), ("Accuracy, %", "ECE, %"), strict=True):
            draw_bars(ax, x, column(rows, "chosen", metric))
            ax.axhline(100 * base[metric]["value"], color=BASELINE, linestyle=":", linewidth=1.8)
            ax.set(title=title, xlabel="layer")
            ax.margins(x=0.02)
        low = min(100 * r["chosen"]["accuracy"]["low"] for r in rows)
        axes[0].set_ylim(bottom=max(0.0, low - 3.0))

    best = max(rows, key=lambda row: row["chosen"]["accuracy"]["value"])
    least = min(rows, key=lambda row: row["chosen"]["ece"]["value"])
    caption = (
        f"{caption_subject(record)}, probe {record['lens']}. Left: accuracy by layer, steered (bars) and unsteered (dotted); "
        f"highest {100 * best['chosen']['accuracy']['value']:.1f} at layer {best['layer']}, unsteered "
        f"{100 * base['accuracy']['value']:.1f}. Right: ECE; lowest {100 * least['chosen']['ece']['value']:.1f} at layer "
        f"{least['layer']}, unsteered {100 * base['ece']['value']:.1f}. Thin lines: 95 %."
    )
    return Picture(name, paint, 2.7, caption, caption, WIDE)


def draw_bars(axes: Any, x: Sequence[int], scores: Sequence[Record]) -> None:
    """Draw a bar for each layer with its interval."""
    values, low, high = (np.array([100 * s[part] for s in scores]) for part in ("value", "low", "high"))
    axes.bar(x, values, width=0.8, color=BARS, alpha=0.8, linewidth=0)
    axes.vlines(x, low, high, color=INK, linewidth=0.8)


def ablation_figure(record: Record, *, name: str) -> Picture:
    """Left: changes of ECE by single ablations; right: of accuracy. Shaded boxes are quartiles, lines medians."""
    if not record["chosen"]:
        raise CoralError("no feature was selected, so there is none to draw.")
    values = {
        metric: np.array([100 * record["features"][str(j)][metric]["value"] for j in record["chosen"]])
        for metric in ("ece", "accuracy")
    }

    def paint(figure: Figure) -> None:
        for ax, (metric, changes) in zip(figure.subplots(1, 2), values.items(), strict=True):
            spread = np.random.default_rng(0).uniform(-0.3, 0.3, len(changes))
            ax.plot(spread, changes, ".", color=KNOWN["temperature"].colour, markersize=3, alpha=0.55)
            first, median, third = np.quantile(changes, [0.25, 0.5, 0.75])
            ax.bar(0, third - first, bottom=first, width=0.7, color=FAINT, alpha=0.35, linewidth=0)
            ax.hlines(median, -0.35, 0.35, color=INK, linewidth=2.0)
            ax.axhline(0, color=FAINT, linewidth=1.0, linestyle=":")
            ax.set(title=f"Δ {'ECE' if metric == 'ece' else 'accuracy'}, points", xlim=(-0.6, 0.6))
            ax.set_xticks([])

    mean = record["groups"][record["plan"]["by"]]["ece"]["mean"]
    caption = (
        f"{record['model']}: {len(record['chosen'])} features taken out one at a time, {record['n_questions']:,} questions. "
        f"Left: change of ECE, mean {mean['value']:+.2e} [{mean['low']:+.2e} to {mean['high']:+.2e}]; right: change of accuracy. "
        "Shaded: quartiles; lines: medians."
    )
    return Picture(name, paint, 2.7, caption, caption, WIDE)


def head_figure(record: Record, *, name: str) -> Picture:
    """Left: histogram of R2 over heads with their mean; right: how the positive signal adds up."""
    values = column(record["rows"], "r2", "value")
    mean, needed = record["mean"]["value"], record["needed"]["value"]

    def paint(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        left.hist(values, bins=30, color=BARS, alpha=0.8, edgecolor="white", linewidth=0.5)
        left.axvline(mean, color=BASELINE, linestyle="--", linewidth=1.6)
        left.set(title=f"R² of heads, mean {mean:.3f}", xlabel="R²", ylabel="heads")
        right.plot(range(1, len(values) + 1), [100 * c for c in record["cumulative"]], color=BARS)
        right.axhline(80, color=FAINT, linewidth=1.0, linestyle=":")
        if needed:
            right.axvline(needed, color=BASELINE, linestyle="--", linewidth=1.6)
        right.set(title=f"{needed:.0f} heads hold 80 %", xlabel="heads, best first", ylabel="signal, %")

    above = ", ".join(f"{n} above {value}" for value, n in record.get("above", {}).items())
    caption = (
        f"{caption_subject(record)}. Left: R² of a network on each of {len(values)} heads, mean {mean:.3f}, highest "
        f"{record['highest']:.3f}{', ' + above if above else ''}. Right: {needed:.0f} heads "
        f"({100 * record['needed_share']['value']:.0f} %) hold 80 % of the positive signal; the best 48 hold "
        f"{100 * record['top_share']['value']:.1f} %."
    )
    return Picture(name, paint, 2.7, caption, caption, WIDE)


def dimension_figure(record: Record, *, name: str) -> Picture:
    """Left: R2 against the number of components, by groups of layers; right: explained variance."""
    groups = [group["layers"] for group in record["groups"]]

    def paint(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for group, look in with_looks(groups).items():
            rows = [row for row in record["rows"] if row["layers"] == group]
            x = column(rows, "components")
            left.plot(x, column(rows, "r2", "value"), color=look.colour, linestyle=look.line, label=f"L{group}")
            right.plot(x, [100 * v for v in column(rows, "explained")], color=look.colour, linestyle=look.line)
        left.axhline(0.0, color=FAINT, linewidth=1.0)
        left.set(title="R², cross-validated", xlabel="components")
        right.set(title="Explained variance, %", xlabel="components", ylim=(0, 102))
        figure.legend(loc="outside lower center", ncols=4, fontsize=8.5)

    first = record["groups"][0]
    held = components_text(first["for_90"], max(row["components"] for row in record["rows"]))
    caption = (
        f"{caption_subject(record)}. Left: R² of ridge on the first k principal components, by groups of layers. Right: "
        f"their variance; in layers {first['layers']}, {held} components hold 90 % of it."
    )
    return Picture(name, paint, 3.1, caption, caption, WIDE)


def components_text(n: int, most: int) -> str:
    """Return a number of components; one above the most that were tried stands for more than these."""
    return f"{n}" if n <= most else f"more than {most}"


FIGURES = {"layers": layer_figure, "heads": head_figure, "dimensions": dimension_figure}
"""The figure of each analysis that the paper has."""


def write_paper_figure(record: Record, folder: Path) -> str:
    """Draw an analysis in the paper's shape into NAME-paper.svg and .png, and return the name; empty where it has none."""
    draw = FIGURES.get(record["analysis"])
    if draw is None:
        return ""
    picture = draw(record, name=f"{record['analysis']}-paper")
    words = {
        "title": f"{TITLES[record['analysis']]}, as the paper draws it",
        "caption": picture.caption,
        "alt": picture.alt,
    }
    write_json(folder / f"{picture.name}.json", words)
    for ending, data in picture.files().items():
        write_atomic(folder / f"{picture.name}{ending}", data)
    return picture.name
