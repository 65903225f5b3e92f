"""The figures of a run: metrics by task, how its lens was chosen, and reliability diagrams before and after. Only draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coral_lens.metrics.curves import Reliability, reliability
from coral_lens.metrics.scores import METRICS, Metrics
from coral_lens.records import Predictions
from coral_lens.report.confidence import N_BINS, wilson
from coral_lens.report.figures.choice import curve_picture, gamma_curve, layer_curve
from coral_lens.report.figures.style import FAINT, INK, Look, Picture, clipped, looks_of, method_key, panels
from coral_lens.report.names import method_name
from coral_lens.report.runs import Run
from coral_lens.report.tables.formats import kind_of, percent
from coral_lens.report.tables.run import COLUMNS, ResultsTable, in_order, subject_of
from coral_lens.storage.files import file_name, write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FEW = 10
"""A bin with fewer questions is drawn hollow."""


def write_run_pictures(run: Run, table: ResultsTable, folder: Path) -> None:
    """Write each figure under its name."""
    for picture in run_pictures(run, table):
        write_atomic(folder / f"{picture.name}.png", picture.png())


def run_pictures(run: Run, table: ResultsTable) -> Iterator[Picture]:
    """Yield the figures of a run; of the reliability diagrams, those of the base and of the method it is about."""
    for metric in COLUMNS:
        yield metric_picture(table, metric, name=f"summary-{metric}")
    for curve in (layer_curve(run.lens), gamma_curve(run.lens)):
        if curve:
            yield curve_picture(curve, name=f"chosen-{curve.axis}")
    looks = looks_of(table.methods)
    for evaluation, task in zip(in_order(run), table.tasks, strict=True):
        for method in dict.fromkeys(("base", subject_of(evaluation.predictions))):
            if method in evaluation.predictions:
                name = f"reliability-{file_name(evaluation.name)}-{file_name(method)}"
                predictions, metrics = evaluation.predictions[method], task.metrics[method]
                yield reliability_picture(predictions, metrics, name=name, look=looks[method])


# --- metrics by task --------------------------------------------------------------------------------------------------


def metric_picture(table: ResultsTable, metric: str, *, name: str, looks: Mapping[str, Look] | None = None) -> Picture:
    """Return a dot with its interval for each method on each task."""
    methods, looks = table.methods, looks or looks_of(table.methods)
    title = f"{METRICS[metric].label} ({'higher' if METRICS[metric].higher_is_better else 'lower'} is better)"
    step = len(methods) + 1.4

    def paint(figure: Figure) -> None:
        (axes,) = panels(figure, 1)
        for i, task in enumerate(table.tasks):
            label = f"{clipped(task.title, 28)} ({kind_of(task)})"
            head = axes.annotate(label, (0.0, i * step - 0.95), xycoords=axes.get_yaxis_transform(), **HEAD)
            head.set_in_layout(False)
            for j, method in enumerate(methods):
                if method in task.metrics:
                    draw_dot(axes, task.metrics[method], metric, at=i * step + j, look=looks[method])
        axes.set(ylim=(len(table.tasks) * step - 1.6, -1.6), xlabel="percent" if metric in SHARES else "× 100")
        axes.set_yticks([])
        axes.grid(False, axis="y")
        axes.locator_params(axis="x", nbins=7, steps=[1, 2, 5, 10])
        axes.spines["left"].set_visible(False)
        axes.set_title(title)
        method_key(figure, looks, more=[floor_key()] if metric == "ece" else [])

    alt = f"{METRICS[metric].label} by task and method. " + "; ".join(
        f"{task.title}: "
        + ", ".join(f"{method_name(m)} {percent(s.scores[metric].value)}" for m, s in task.metrics.items())
        for task in table.tasks
    )
    rows = len(table.tasks) * step + 0.8 * (len(methods) > 3) * len(methods) / 2
    return Picture(name, paint, 1.4 + 0.27 * rows, alt, CAPTIONS.get(metric, ""))


CAPTIONS = {
    "accuracy": "How often the preferred option is the correct one.",
    "ece": "How far confidence is from the share of right answers. The upright tick is what chance alone would show.",
    "brier": "How far all probabilities are from the truth.",
}
HEAD = {"fontweight": "bold", "va": "center", "bbox": {"facecolor": "white", "linewidth": 0, "pad": 1.5}}
SHARES = ("accuracy", "ece", "cwece")
"""Metrics that are a percentage of something; the others are only scaled by 100."""


def draw_dot(axes: Any, metrics: Metrics, metric: str, *, at: float, look: Look) -> None:
    """Draw a value and its interval; beside an ECE, its noise floor."""
    score = metrics.scores[metric]
    axes.hlines(at, 100 * score.low, 100 * score.high, color=look.colour, linewidth=2)
    axes.plot(100 * score.value, at, **{**look.dots, "linestyle": ""}, markersize=7)
    if metric == "ece":
        axes.plot(100 * metrics.ece_floor, at, "|", color=INK, markersize=9, markeredgewidth=1.6)


def floor_key() -> Any:
    """Return the mark of an ECE's noise floor."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=INK, marker="|", linestyle="", markeredgewidth=1.6, label="floor")


# --- reliability ------------------------------------------------------------------------------------------------------


def reliability_picture(predictions: Predictions, metrics: Metrics, *, name: str, look: Look | None = None) -> Picture:
    """Return the diagram of one method on one task: is the model right as often as it says?"""
    bins = reliability(predictions, n_bins=N_BINS)
    look = look or looks_of([metrics.method])[metrics.method]
    ece, floor, accuracy = metrics.scores["ece"].value, metrics.ece_floor, metrics.scores["accuracy"].value
    mean = float((bins.confidence * bins.count).sum() / bins.count.sum())
    title = f"{clipped(method_name(metrics.method), 28)}: ECE {percent(ece)} (floor {percent(floor)})"

    def paint(figure: Figure) -> None:
        top, strip = panels(figure, 2, ratios=(3.2, 1.0))
        draw_gaps(top, bins, look)
        top.set_title(title)
        draw_histogram(strip, bins, look)

    alt = (
        f"Reliability diagram of {method_name(metrics.method)}: mean confidence {percent(mean)} %, accuracy "
        f"{percent(accuracy)} %, ECE {percent(ece)}, noise floor {percent(floor)}, {metrics.n_questions} questions. "
        + "; ".join(
            f"confidence {percent(c)} %: right {percent(a)} % of {n}"
            for c, a, n in zip(bins.confidence, bins.accuracy, bins.count, strict=True)
        )
    )
    caption = f"On average {percent(mean)} % sure, {percent(accuracy)} % right."
    return Picture(name, paint, 4.3, alt, caption)


def draw_gaps(axes: Any, bins: Reliability, look: Look) -> None:
    """Draw accuracy over confidence with intervals, and the gap to the diagonal as a bar."""
    x, y = 100 * bins.confidence, 100 * bins.accuracy
    low, high = wilson(bins.accuracy * bins.count, bins.count)
    axes.plot([0, 100], [0, 100], color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
    axes.bar(x, y - x, bottom=x, width=3.2, color=look.colour, alpha=0.22, linewidth=0)
    axes.vlines(x, 100 * low, 100 * high, color=look.colour, linewidth=1.4)
    many = bins.count >= FEW
    for part, face in ((many, look.colour), (~many, "white")):
        if not part.any():
            continue  # the layout engine gives an empty line that is not clipped no finite size
        dots = {**look.dots, "linestyle": "", "markerfacecolor": face, "markersize": 6.5, "clip_on": False, "zorder": 3}
        axes.plot(x[part], y[part], **dots)
    aside = {"transform": axes.transAxes, "color": FAINT, "style": "italic"}
    axes.text(0.04, 0.96, "not sure enough", ha="left", va="top", **aside)
    axes.text(1.02, 0.0, "too sure", ha="left", va="bottom", rotation=90, **aside)
    axes.set(xlim=(0, 100), ylim=(0, 100), ylabel="right answers (%)")
    axes.set_xticks(range(0, 101, 20))
    axes.set_yticks(range(0, 101, 20))


def draw_histogram(axes: Any, bins: Reliability, look: Look) -> None:
    """Draw the confidence histogram: how many questions each bin holds, and how many of them are right."""
    middle, width = 50 * (bins.low + bins.high), 92 * (bins.high - bins.low)
    right = bins.count * bins.accuracy
    axes.bar(middle, right, width, color=look.colour, linewidth=0, label="right")
    wrong = {"color": "white", "edgecolor": look.colour, "hatch": "////", "linewidth": 0.8}
    axes.bar(middle, bins.count - right, width, bottom=right, label="wrong", **wrong)
    top = bins.count.max() * 1.25
    for x, n in zip(middle, bins.count, strict=True):
        axes.text(x, n + top * 0.03, f"{n}", ha="center", va="bottom", fontsize=8.5, color=FAINT)
    axes.set(ylim=(0, top), xlabel="confidence (%)", ylabel="questions")
    axes.grid(False)
    axes.set_yticks([])
    where = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": 2, "borderaxespad": 0.1, "borderpad": 0.1}
    axes.legend(**where, handlelength=1.2, columnspacing=1)
