"""What a run's confidence is worth, as findings: a table and a figure each. Numbers come from `report.confidence`.

Every test set has its reliability, its risk by coverage, its histogram and, where options are letters, its position bias;
a run of several subjects has one finding over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from coral_lens.errors import CoralError, nearest
from coral_lens.metrics.scores import Score
from coral_lens.records import TASKS_OF_FAMILY, task_family
from coral_lens.report import confidence as numbers
from coral_lens.report.confidence import ConfidenceSummary, PositionBias
from coral_lens.report.figures.style import FAINT, INK, Look, Picture, clipped, looks_of, method_key, panels
from coral_lens.report.findings import Finding, Value
from coral_lens.report.names import method_name, task_name, task_names
from coral_lens.report.runs import Evaluation, Run
from coral_lens.report.tables.formats import percent
from coral_lens.storage.files import file_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def confidence_findings(
    run: Run, *, methods: Sequence[str] = (), n_bins: int = numbers.N_BINS, n_boot: int = numbers.N_BOOT
) -> Iterator[Finding]:
    """Yield the findings of every test set, then those of its subjects. `methods` names those that are drawn."""
    every = list(dict.fromkeys(m for e in run.evaluations for m in e.predictions))
    for name in methods:
        if name not in every:
            raise CoralError(f"The run has no method {name!r}.{nearest(name, every)} It has {', '.join(every)}.")
    looks = looks_of(every)
    style = run.lens.get("style")
    for evaluation in numbers.pooled(run):
        known = list(evaluation.predictions)
        shown = [m for m in methods if m in known] or numbers.methods_drawn(known)
        few = {m: looks[m] for m in shown}
        yield reliability_finding(evaluation, few, n_bins=n_bins)
        yield risk_finding(evaluation, looks, bands=(shown[0], shown[-1]), n_boot=n_boot)
        yield histogram_finding(evaluation, few)
        if numbers.is_lettered(evaluation, style):
            yield position_finding(evaluation, few, n_boot=n_boot)
    summaries = numbers.subject_summaries(run, n_boot=n_boot)
    if len({(s.test, s.task) for s in summaries}) > 1:
        yield subject_finding(summaries, looks, methods)


# --- reliability ------------------------------------------------------------------------------------------------------


def reliability_rows(evaluation: Evaluation, *, n_bins: int) -> list[tuple[Value, ...]]:
    """Return method, kind of bin, edges, number of questions, confidence, and the share of right answers with its interval."""
    rows: list[tuple[Value, ...]] = []
    for method, predictions in evaluation.predictions.items():
        for name, bins in numbers.both_bins(predictions, n_bins=n_bins).items():
            low, high = numbers.wilson(bins.accuracy * bins.count, bins.count)
            cells = (bins.low, bins.high, bins.count, bins.confidence, bins.accuracy, low, high)
            rows += [(method, name, *(x.item() for x in line)) for line in zip(*cells, strict=True)]
    return rows


def before_after_picture(evaluation: Evaluation, looks: dict[str, Look], *, name: str) -> Picture:
    """Return the share of right answers over confidence, before and after steering."""
    rows = [
        r
        for r in reliability_rows(evaluation, n_bins=numbers.N_BINS)
        if r[0] in looks and r[1] == "equal width"
    ]  # fmt: skip
    means = {m: numbers.confidence_summary(evaluation.predictions[m], base=None) for m in looks}

    def paint(figure: Figure) -> None:
        top, strip = panels(figure, 2, ratios=(3.2, 0.9))
        draw_reliability(top, rows, looks)
        draw_bin_counts(strip, rows, looks)
        aside = {"transform": top.transAxes, "color": FAINT, "style": "italic"}
        top.text(0.04, 0.96, "not sure enough", ha="left", va="top", **aside)
        top.text(0.98, 0.04, "too sure", ha="right", va="bottom", **aside)
        strip.set_xlabel("confidence (%)")
        method_key(figure, looks)

    alt = f"Share of right answers over confidence, {about(evaluation)}. " + "; ".join(
        f"{method_name(str(r[0]))}, confidence {percent(float(r[5] or 0))} %: right {percent(float(r[6] or 0))} % of {r[4]}"
        for r in rows
    )
    caption = "; ".join(
        f"{method_name(m)} is {percent(s.confidence.value)} % sure on average and {percent(s.accuracy.value)} % right"
        for m, s in means.items()
    )
    return Picture(name, paint, 4.3, alt, f"{caption[:1].upper()}{caption[1:]}.")


def reliability_finding(evaluation: Evaluation, looks: dict[str, Look], *, n_bins: int) -> Finding:
    """Return the share of right answers over confidence, in bins of equal width and of equally many questions."""
    columns = (
        "method",
        "bins",
        "low",
        "high",
        "n_questions",
        "confidence",
        "accuracy",
        "accuracy_low",
        "accuracy_high",
    )
    rows = reliability_rows(evaluation, n_bins=n_bins)
    drawn = [r for r in rows if r[0] in looks]

    def paint(figure: Figure) -> None:
        top, strip, bottom = panels(figure, 3, ratios=(3.0, 0.9, 3.0))
        draw_reliability(top, [r for r in drawn if r[1] == "equal width"], looks)
        draw_reliability(bottom, [r for r in drawn if r[1] == "adaptive"], looks)
        draw_bin_counts(strip, [r for r in drawn if r[1] == "equal width"], looks)
        top.set_title("bins of equal width")
        bottom.set_title(f"bins of equally many questions ({len(evaluation.questions) // n_bins})")
        bottom.set_xlabel("confidence (%)")
        method_key(figure, looks)

    alt = f"Share of right answers over confidence, {about(evaluation)}. " + "; ".join(
        f"{method_name(str(r[0]))}, {r[1]}, confidence {percent(float(r[5] or 0))} %: right {percent(float(r[6] or 0))} % "
        f"of {r[4]}"
        for r in drawn
    )
    caption = (
        "On the dashed diagonal, confidence can be taken at its word; below it, answers are too sure. Lines are 95 % (Wilson) "
        "intervals; the strip counts the questions of each bin of equal width."
    )
    name = f"reliability-{file_name(evaluation.name)}"
    picture = Picture(name, paint, 6.6, alt, caption)
    return Finding(name, f"Reliability: {about(evaluation)}", columns, tuple(rows), picture)


def draw_reliability(axes: Any, rows: Sequence[tuple[Any, ...]], looks: dict[str, Look]) -> None:
    """Draw a line of dots with intervals for each method."""
    axes.plot([0, 100], [0, 100], color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
    for method, lines in groupby(rows, key=lambda r: r[0]):
        look, cells = looks[method], 100 * np.array([r[2:] for r in lines], dtype=float)
        axes.vlines(cells[:, 3], cells[:, 5], cells[:, 6], color=look.colour, linewidth=1.2)
        axes.plot(cells[:, 3], cells[:, 4], **look.dots, markersize=6, linewidth=1.3)
    axes.set(xlim=(0, 100), ylim=(0, 100), ylabel="right answers (%)")
    axes.set_xticks(range(0, 101, 20))
    axes.set_yticks(range(0, 101, 20))


def draw_bin_counts(axes: Any, rows: Sequence[tuple[Any, ...]], looks: dict[str, Look]) -> None:
    """Draw how many questions each bin holds, the bars of the methods side by side."""
    for i, (method, look) in enumerate(looks.items()):
        mine = [r for r in rows if r[0] == method]
        step = 88 * (mine[0][3] - mine[0][2]) / len(looks)
        left = [100 * r[2] + 0.06 * 100 * (r[3] - r[2]) + i * step for r in mine]
        axes.bar(left, [r[4] for r in mine], step, align="edge", **look.bars)
    axes.set_ylabel("questions")
    axes.locator_params(axis="y", nbins=3)
    axes.grid(False)


# --- risk and coverage ------------------------------------------------------------------------------------------------


def risk_finding(evaluation: Evaluation, looks: dict[str, Look], *, bands: Sequence[str], n_boot: int) -> Finding:
    """Return the error rate among the surest answers, for every share of them."""
    curves = {m: numbers.risk_with_interval(p, n_boot=n_boot) for m, p in evaluation.predictions.items()}
    columns = ("method", "coverage", "risk", "low", "high", "threshold")
    rows: list[tuple[Value, ...]] = [
        (m, *(float(x) for x in line))
        for m, c in curves.items()
        for line in zip(c.coverage, c.risk, c.low, c.high, c.threshold, strict=True)
    ]

    def paint(figure: Figure) -> None:
        (axes,) = panels(figure, 1)
        for i, (method, c) in enumerate(curves.items()):
            look = looks[method]
            if method in bands:
                axes.fill_between(
                    100 * c.coverage, 100 * c.low, 100 * c.high, color=look.colour, alpha=0.13, linewidth=0
                )
            every = (i % 4, 4)  # methods that lie on each other show their marks in turn
            axes.plot(100 * c.coverage, 100 * c.risk, **look.dots, markersize=6, markevery=every)
        axes.set(xlim=(0, 100), xlabel="questions answered, the surest first (%)", ylabel="wrong answers (%)")
        axes.set_ylim(bottom=0)
        method_key(figure, {m: looks[m] for m in curves})

    alt = f"Wrong answers by share of questions answered, {about(evaluation)}. " + "; ".join(
        f"{method_name(m)}: {percent(float(c.risk[4]))} % wrong among the surest quarter, {percent(float(c.risk[-1]))} % "
        "among all"
        for m, c in curves.items()
    )
    caption = (
        "How often answers are wrong when only the surest are given: lower is better, and a line that rises to the right "
        f"knows what it does not know. Shaded: 95 % intervals of {' and '.join(map(method_name, dict.fromkeys(bands)))}."
    )
    name = f"risk-{file_name(evaluation.name)}"
    picture = Picture(name, paint, 3.6 + 0.22 * ((len(curves) - 1) // 2), alt, caption)
    return Finding(name, f"Risk and coverage: {about(evaluation)}", columns, tuple(rows), picture)


# --- how sure, and right or not ---------------------------------------------------------------------------------------


def histogram_finding(evaluation: Evaluation, looks: dict[str, Look]) -> Finding:
    """Return how many answers have which confidence, right and wrong, before and after."""
    columns = ("method", "low", "high", "n_right", "n_wrong")
    rows = [(m, *line) for m, p in evaluation.predictions.items() for line in numbers.histogram(p)]
    means = {m: numbers.confidence_summary(evaluation.predictions[m], base=None) for m in looks}
    tallest = max(r[3] + r[4] for r in rows if r[0] in looks)

    def paint(figure: Figure) -> None:
        for axes, (method, look) in zip(panels(figure, len(looks)), looks.items(), strict=True):
            mine, mean = [r for r in rows if r[0] == method], means[method]
            left, width = [100 * r[1] + 0.25 for r in mine], 4.5
            right, wrong = [r[3] for r in mine], [r[4] for r in mine]
            axes.bar(left, right, width, align="edge", color=look.colour, linewidth=0)
            hollow = {"color": "white", "edgecolor": look.colour, "hatch": "////", "linewidth": 0.8}
            axes.bar(left, wrong, width, align="edge", bottom=right, **hollow)
            axes.axvline(100 * mean.confidence.value, color=INK, linewidth=1.4)
            axes.axvline(100 * mean.accuracy.value, color=INK, linewidth=1.4, linestyle=(0, (1, 1.2)))
            said, was = percent(mean.confidence.value), percent(mean.accuracy.value)
            axes.set_title(f"{clipped(method_name(method), 22)}: {said} % sure, {was} % right")
            axes.set(ylim=(0, 1.06 * tallest), xlim=(0, 100), ylabel="questions")
            axes.locator_params(axis="y", nbins=4)
        axes.set_xlabel("confidence (%)")
        histogram_key(figure)

    alt = f"Confidence of the answers, {about(evaluation)}. " + "; ".join(
        f"{method_name(m)}: mean confidence {percent(s.confidence.value)} %, accuracy {percent(s.accuracy.value)} % "
        f"({percent(s.accuracy.low)} to {percent(s.accuracy.high)})"
        for m, s in means.items()
    )
    gaps = "; ".join(f"{method_name(m)} {signed(s.overconfidence)}" for m, s in means.items())
    caption = f"Mean confidence minus accuracy, in points with 95 % intervals: {gaps}."
    name = f"histogram-{file_name(evaluation.name)}"
    picture = Picture(name, paint, 0.95 + 1.45 * len(looks), alt, caption)
    return Finding(name, f"Confidence before and after: {about(evaluation)}", columns, tuple(rows), picture)


def histogram_key(figure: Figure) -> None:
    """Say what bars and lines mean."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    keys = [
        Patch(color=FAINT, label="right"),
        Patch(facecolor="white", edgecolor=FAINT, hatch="////", label="wrong"),
        Line2D([], [], color=INK, linewidth=1.4, label="mean confidence"),
        Line2D([], [], color=INK, linewidth=1.4, linestyle=(0, (1, 1.2)), label="accuracy"),
    ]
    figure.legend(
        handles=keys, loc="outside lower left", ncols=4, handlelength=1.3, handletextpad=0.4, columnspacing=0.8
    )


# --- position bias ----------------------------------------------------------------------------------------------------


def position_finding(evaluation: Evaluation, looks: dict[str, Look], *, n_boot: int) -> Finding:
    """Return how often each place is chosen against how often it is right."""
    biases = [b for p in evaluation.predictions.values() for b in numbers.position_bias(p, n_boot=n_boot)]
    columns: tuple[str, ...] = ("method", "position", "n_questions")
    for name in ("right", "chosen", "excess"):
        columns += (name, f"{name}_low", f"{name}_high")
    rows = [
        (b.method, b.position, b.n_questions, *(x for s in (b.right, b.chosen, b.excess) for x in interval_cells(s)))
        for b in biases
    ]
    drawn = [b for b in biases if b.method in looks]

    def paint(figure: Figure) -> None:
        (axes,) = panels(figure, 1)
        draw_positions(axes, drawn, looks)
        method_key(figure, looks)

    alt = f"How often each position is chosen, {about(evaluation)}. " + "; ".join(
        f"{method_name(b.method)} chooses {b.position} on {percent(b.chosen.value)} %, right is {percent(b.right.value)} %"
        for b in drawn
    )
    worst = {m: max((b for b in drawn if b.method == m), key=lambda b: abs(b.excess.value)) for m in looks}
    largest = "; ".join(f"{method_name(m)} {b.position} {signed(b.excess)}" for m, b in worst.items())
    caption = (
        "Bars: how often the position is right; dots: how often it is chosen, with 95 % (Wilson) intervals. Largest bias, "
        f"chosen minus right in points: {largest}."
    )
    name = f"positions-{file_name(evaluation.name)}"
    picture = Picture(name, paint, 3.5, alt, caption)
    return Finding(name, f"Position bias: {about(evaluation)}", columns, tuple(rows), picture)


def draw_positions(axes: Any, biases: Sequence[PositionBias], looks: dict[str, Look]) -> None:
    """Draw a bar for each place and a dot for each method beside the others."""
    places = list(dict.fromkeys(b.position for b in biases))
    right = {b.position: b.right for b in biases}
    axes.bar(range(len(places)), [100 * right[k].value for k in places], 0.8, color="#e6eaed", edgecolor="#9aa5ae")
    for i, (method, look) in enumerate(looks.items()):
        for b in (b for b in biases if b.method == method):
            x = places.index(b.position) + 0.56 * ((i + 0.5) / len(looks) - 0.5)
            axes.vlines(x, 100 * b.chosen.low, 100 * b.chosen.high, color=look.colour, linewidth=1.6)
            axes.plot(x, 100 * b.chosen.value, **{**look.dots, "linestyle": ""}, markersize=7)
    axes.set_xticks(range(len(places)), places)
    axes.set(ylabel="questions (%)", xlabel="position of the option (bar: right there)")
    axes.set_ylim(bottom=0)
    axes.grid(False, axis="x")


# --- subjects ---------------------------------------------------------------------------------------------------------


def subject_finding(summaries: Sequence[ConfidenceSummary], looks: dict[str, Look], methods: Sequence[str]) -> Finding:
    """Return accuracy and overconfidence of every task."""
    columns: tuple[str, ...] = ("test", "task", "method", "n_questions")
    for name in ("accuracy", "confidence", "overconfidence", "gain"):
        columns += (name, f"{name}_low", f"{name}_high")
    rows = []
    for s in summaries:
        scores = (s.accuracy, s.confidence, s.overconfidence, s.gain)
        rows.append((s.test, s.task, s.method, s.n_questions, *(x for score in scores for x in interval_cells(score))))
    few = numbers.methods_drawn(list(dict.fromkeys(s.method for s in summaries)))
    shown = list(methods) or list(dict.fromkeys((few[0], few[-1])))
    drawn = [s for s in summaries if s.method in shown]
    names = short_names(drawn)

    def paint(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        draw_summaries(left, drawn, "accuracy", {m: looks[m] for m in shown})
        draw_summaries(right, drawn, "overconfidence", {m: looks[m] for m in shown})
        left.set_yticks(range(len(names)), [clipped(n, 24) for n in names.values()], fontsize=8.5)
        left.set(ylim=(len(names) - 0.4, -0.6), xlabel="accuracy (%)")
        right.axvline(0, color=INK, linewidth=1)
        right.set_xlabel("too sure by (points)")
        method_key(figure, {m: looks[m] for m in shown})

    alt = "Accuracy and overconfidence by task. " + "; ".join(
        f"{s.task}, {method_name(s.method)}: {percent(s.accuracy.value)} % right, too sure by {signed(s.overconfidence)} points"
        for s in drawn
    )
    caption = (
        "Too sure by: mean confidence minus accuracy, 0 where both agree. Lines are 95 % intervals (Wilson; bootstrap)."
    )
    picture = Picture("subjects", paint, 1.2 + 0.25 * len(names), alt, caption)
    return Finding("subjects", "Accuracy and overconfidence by task", columns, tuple(rows), picture)


def short_names(summaries: Sequence[ConfidenceSummary]) -> dict[tuple[str, str], str]:
    """Return a label for each test set's tasks: what tells them apart."""
    keys = list(dict.fromkeys((s.test, s.task) for s in summaries))
    alone = [sum(test == other for other, _ in keys) == 1 for test, _ in keys]
    heads = [f"{task_family(task)}_" for _, task in keys]
    titles = task_names(dict.fromkeys(test for test, _ in keys))
    return {
        (test, task): titles[test] if single and heads.count(head) < TASKS_OF_FAMILY else task.removeprefix(head)
        for (test, task), single, head in zip(keys, alone, heads, strict=True)
    }


def draw_summaries(axes: Any, summaries: Sequence[ConfidenceSummary], part: str, looks: dict[str, Look]) -> None:
    """Draw a dot with its interval for each task and method."""
    keys, methods = list(dict.fromkeys((s.test, s.task) for s in summaries)), list(looks)
    for s in summaries:
        at = keys.index((s.test, s.task)) + 0.5 * ((methods.index(s.method) + 0.5) / len(methods) - 0.5)
        score, look = getattr(s, part), looks[s.method]
        axes.hlines(at, 100 * score.low, 100 * score.high, color=look.colour, linewidth=1.4)
        axes.plot(100 * score.value, at, **{**look.dots, "linestyle": ""}, markersize=5)


# --- words and cells that the findings share ---------------------------------------------------------------------------


def about(evaluation: Evaluation) -> str:
    """Return a test set's name and size."""
    return f"{task_name(evaluation.name)}, {len(evaluation.questions):,} questions"


def interval_cells(score: Score | None) -> tuple[Value, ...]:
    """Return a value with its interval as three cells."""
    return (score.value, score.low, score.high) if score else (None, None, None)


def signed(score: Score) -> str:
    """Return a difference in points with its interval."""
    value, low, high = (percent(x, sign=True) for x in (score.value, score.low, score.high))
    return f"{value} ({low} to {high})"
