"""Figures of autoencoder features: what single ablations do, and steering by more and more of them. Only draws records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from coral_lens.report.figures.style import FAINT, INK, Picture, looks_of, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


LABELS = {"ece": "ECE", "accuracy": "accuracy"}


NARROW = 0.1
"""Where the quartiles lie closer together than this part of the range, the axis is drawn out around 0."""


def ablation_picture(record: Mapping[str, Any], metric: str, *, name: str) -> Picture:
    """Return box and points of the changes of one metric by single ablations, chosen features beside random ones."""
    by = record["plan"]["by"]
    effects = record["features"]
    groups = {by: record["chosen"], "random": record["random"]}
    values = {
        g: np.array([effects[str(j)][metric]["value"] for j in members]) for g, members in groups.items() if members
    }

    def paint(figure: Figure) -> None:
        (axes,) = panels(figure, 1)
        for i, (group, changes) in enumerate(values.items()):
            draw_changes(axes, 100 * changes, at=i, colour=looks_of(list(values))[group].colour)
        axes.axvline(0, color=INK, linewidth=1.0)
        axes.set_yticks(range(len(values)), [f"{g} ({len(v)})" for g, v in values.items()])
        axes.set(ylim=(len(values) - 0.4, -0.6), xlabel="percentage points")
        around_zero(axes, 100 * values[by])
        axes.set_title(f"Change of {LABELS[metric]} by one ablation")

    said = []
    for group in values:
        summary = record["groups"][group][metric]
        first, median, third = summary["quartiles"]
        said.append(
            f"{group}: mean {summary['mean']['value']:+.2e} (95 % interval {summary['mean']['low']:+.2e} to "
            f"{summary['mean']['high']:+.2e}), quartiles {first:+.2e}, {median:+.2e}, {third:+.2e}"
        )
    caption = f"As fractions: {'; '.join(said)}. {record['n_questions']} questions."
    return Picture(name, paint, 2.6, f"Changes of {LABELS[metric]} by ablating single features. {caption}", caption)


def around_zero(axes: Any, values: Float[np.ndarray, " feature"]) -> None:
    """Let the axis be linear near 0 and logarithmic beyond where most changes are tiny beside the largest."""
    first, third = np.quantile(values, [0.25, 0.75])
    largest = float(np.abs(values).max(initial=0.0))
    if not 0 < third - first < NARROW * 2 * largest:
        axes.locator_params(axis="x", nbins=5)
        return
    low, high = int(np.floor(np.log10(third - first))), int(np.ceil(np.log10(largest)))
    axes.set_xscale("symlog", linthresh=10.0**low)
    ticks = [10.0**high, 10.0 ** ((low + high) // 2)]
    axes.set_xticks([*(-t for t in ticks), 0.0, *ticks[::-1]])
    axes.set_xticklabels([f"{t:g}" for t in axes.get_xticks()])
    axes.minorticks_off()
    axes.set(xlim=(-ticks[0], ticks[0]), xlabel=f"percentage points, logarithmic beyond {10.0**low:g}")


def draw_changes(axes: Any, values: Float[np.ndarray, " feature"], *, at: int, colour: str) -> None:
    """Draw each change as a point, spread over a band, and a box of the quartiles over them."""
    spread = np.random.default_rng(0).uniform(-0.28, 0.28, len(values))
    axes.plot(values, at + spread, ".", color=colour, markersize=3, alpha=0.5)
    first, median, third = np.quantile(values, [0.25, 0.5, 0.75])
    axes.barh(at, third - first, left=first, height=0.5, facecolor="none", edgecolor=INK, linewidth=1.2)
    axes.vlines(median, at - 0.25, at + 0.25, color=INK, linewidth=2.2)


def steering_picture(record: Mapping[str, Any], *, name: str) -> Picture:
    """Return the change of accuracy and ECE on test questions by number of features, each at its best gamma."""
    rows = sorted((r for r in record["rows"] if r["gamma"]), key=lambda r: r["features"])
    sizes = [r["features"] for r in rows]

    def paint(figure: Figure) -> None:
        for axes, metric in zip(panels(figure, 2), LABELS, strict=True):
            draw_change_curve(axes, sizes, [r["less base"][metric] for r in rows])
            axes.set(ylabel=f"Δ {LABELS[metric]} (points)")
        axes.set(xlabel="features, heaviest first")

    said = "; ".join(
        f"top {r['features']} at gamma {r['gamma']:g}: accuracy {100 * r['less base']['accuracy']['value']:+.2f}, ECE "
        f"{100 * r['less base']['ece']['value']:+.2f} points"
        for r in rows
    )
    caption = f"Against the unsteered model on {record['n_test']} test questions, with 95 % intervals: {said}."
    return Picture(name, paint, 3.8, f"Steering by features. {caption}", caption)


def draw_change_curve(axes: Any, sizes: Sequence[int], differences: Sequence[Mapping[str, float]]) -> None:
    """Draw values with their intervals over the number of features."""
    value, low, high = (100 * np.array([d[part] for d in differences]) for part in ("value", "low", "high"))
    axes.axhline(0, color=FAINT, linewidth=1.0)
    colour = looks_of(["coral"])["coral"].colour
    axes.vlines(sizes, low, high, color=colour, linewidth=1.6)
    axes.plot(sizes, value, "D-", color=colour, markersize=6)
