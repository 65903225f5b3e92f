"""How a lens was chosen: validation scores by layer and by gamma, as curves and as figures. Never sees test scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from coral_lens.metrics.scores import METRICS
from coral_lens.report.figures.style import INK, KNOWN, Picture, panels
from coral_lens.report.tables.formats import percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure


NEAR = 0.01
"""A choice within this of the best (one point, as tables show it) counts as equally good: validation is noisy."""
OTHERS = ("accuracy", "ece", "brier")


@dataclass(frozen=True, slots=True)
class Curve:
    """Validation scores over the layers or the gammas that were tried."""

    axis: str
    """`layer` or `gamma`."""
    criterion: str
    """The metric that decided."""
    chosen: float
    x: tuple[float, ...]
    scores: dict[str, tuple[float, ...]]
    """By metric; the criterion comes first."""
    controls: dict[str, dict[str, float]]
    """By method, then by metric: what the model scores without the lens."""

    @property
    def near(self) -> tuple[float, ...]:
        """What would have done as well, within NEAR of the best."""
        values = self.scores[self.criterion]
        sign = -1.0 if METRICS[self.criterion].higher_is_better else 1.0
        best = min(sign * v for v in values)
        return tuple(x for x, v in zip(self.x, values, strict=True) if sign * v <= best + NEAR)

    @property
    def near_spans(self) -> list[str]:
        """The same in words, neighbours joined: `16 to 18`, `21`."""
        spans: list[list[float]] = []
        for x in self.near:
            before = self.x[max(self.x.index(x) - 1, 0)]
            if spans and spans[-1][-1] == before:
                spans[-1].append(x)
            else:
                spans.append([x])
        return [f"{s[0]:g} to {s[-1]:g}" if len(s) > 1 else f"{s[0]:g}" for s in spans]

    def at_edge(self) -> bool:
        """Whether the chosen one is the last that was tried; then the best may lie beyond."""
        return len(self.x) > 1 and self.chosen == max(self.x)


def layer_curve(lens: Mapping[str, Any]) -> Curve | None:
    """Return the scores of every layer at its own best gamma; None where the lens keeps none of its own probe."""
    trace = lens.get("trace", {})
    if lens.get("probe") == "mlp" and not trace.get("own_layers"):
        return None  # a network of an earlier version kept the layers of the lens that screened for it
    points = [{"layer": entry["layer"], **entry["best"]} for entry in trace.get("layers", [])]
    return curve_of("layer", points, trace, chosen=(lens.get("layers") or [None])[0])


def gamma_curve(lens: Mapping[str, Any]) -> Curve | None:
    """Return the scores of every gamma at the chosen layer; None where the lens keeps none."""
    trace = lens.get("trace", {})
    return curve_of("gamma", trace.get("gammas", []), trace, chosen=trace.get("chosen", {}).get("gamma"))


def curve_of(axis: str, points: Sequence[Mapping[str, Any]], trace: Mapping[str, Any], *, chosen: Any) -> Curve | None:
    """Put points in order and keep the three metrics that are drawn; numbers come from JSON, whole ones as int."""
    criterion = trace.get("criterion", "brier")
    if not points or chosen is None or criterion not in points[0]:
        return None
    ordered = sorted(points, key=lambda p: p[axis])
    names = [n for n in dict.fromkeys((criterion, *OTHERS)) if all(n in p for p in ordered)][:3]
    validation = trace.get("validation", {})
    controls = {
        m: {name: float(s["value"]) for name, s in validation[m].items()}
        for m in ("base", "temperature")
        if m in validation
    }
    unsteered = next((p for p in trace.get("gammas", []) if p["gamma"] == 0.0), None)
    if unsteered is not None and trace.get("rule") == "residual":
        # gamma 0 is then the base itself, and also knows a criterion that the table of controls leaves out
        controls["base"] = {**controls.get("base", {}), **unsteered}
    scores = {n: tuple(float(p[n]) for p in ordered) for n in names}
    return Curve(axis, criterion, float(chosen), tuple(float(p[axis]) for p in ordered), scores, controls)


def flatness(curve: Curve) -> str:
    """Say how much the choice matters."""
    axis, near = curve.axis, len(curve.near)
    sentence = f"{axis.capitalize()} {curve.chosen:g} was chosen among {len(curve.x)}; "
    if near > 1:
        sentence += (
            f"{near} come within {100 * NEAR:g} point of the best validation score ({', '.join(curve.near_spans)})."
        )
    else:
        sentence += f"no other comes within {100 * NEAR:g} point of its validation score."
    if axis == "gamma" and curve.at_edge():
        sentence += " It is the largest that was tried: the best may lie beyond."
    if axis == "gamma" and curve.chosen == 0.0:
        sentence += " Gamma 0 leaves the model as it is: nothing that was learned helped on the validation questions."
    return sentence


def curve_picture(curve: Curve, *, name: str) -> Picture:
    """Return a panel per metric with the chosen one marked, what would have done as well shaded, and the controls."""

    def paint(figure: Figure) -> None:
        rows = panels(figure, len(curve.scores))
        for axes, metric in zip(rows, curve.scores, strict=True):
            draw_scores(axes, curve, metric)
        rows[-1].set_xlabel("layer (0: embeddings)" if curve.axis == "layer" else "steering strength gamma")

    i = min(range(len(curve.x)), key=lambda k: abs(curve.x[k] - curve.chosen))
    scores = ", ".join(f"{METRICS[m].label} {percent(v[i])}" for m, v in curve.scores.items())
    alt = f"Validation scores by {curve.axis}; chosen: {curve.chosen:g}, with {scores}."
    return Picture(name, paint, 0.8 + 1.45 * len(curve.scores), alt, flatness(curve))


def draw_scores(axes: Any, curve: Curve, metric: str) -> None:
    """Draw one metric over the layers or gammas that were tried."""
    values, look = [100 * v for v in curve.scores[metric]], KNOWN["coral"]
    gap = min((b - a for a, b in pairwise(curve.x)), default=1.0)
    for x in curve.near:
        axes.axvspan(x - gap / 2, x + gap / 2, color=look.colour, alpha=0.11, linewidth=0)
    axes.plot(curve.x, values, color=look.colour, marker="o", markersize=3.2, linewidth=1.6)
    axes.axvline(curve.chosen, color=INK, linewidth=1.0, linestyle=(0, (1, 1.5)))
    arrow = "↑" if METRICS[metric].higher_is_better else "↓"
    title = f"{METRICS[metric].label} {arrow}"
    if curve.chosen in curve.x:
        value = values[curve.x.index(curve.chosen)]
        axes.plot(curve.chosen, value, look.marker, color=look.colour, markersize=8, markeredgecolor=INK)
        title += f"  chosen: {value:.1f}"
    axes.set_title(title, fontsize=10.5)
    draw_controls(axes, {m: 100 * s[metric] for m, s in curve.controls.items() if metric in s})
    axes.margins(y=0.16)


def draw_controls(axes: Any, values: Mapping[str, float]) -> None:
    """Draw the methods that need no lens as lines with their names at the right; equal values as one line."""
    methods = {value: method for method, value in reversed(list(values.items()))}
    for value, method in methods.items():
        axes.axhline(value, color=KNOWN[method].colour, linestyle=KNOWN[method].line, linewidth=1.5)
    low, high = axes.get_ylim()
    crowded = len(methods) > 1 and max(methods) - min(methods) < 0.2 * (high - low)
    for value, method in methods.items():
        axes.annotate(
            method,
            (1.0, value),
            xycoords=axes.get_yaxis_transform(),
            xytext=(4, 0),
            textcoords="offset points",
            va=("bottom" if value == max(methods) else "top") if crowded else "center",
            fontsize=9,
            color=KNOWN[method].colour,
            annotation_clip=False,
        )
