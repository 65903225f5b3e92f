"""Two findings about parts of a test set: does a method lean to positions, and how does it stand on each subject. Only draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coral_lens.metrics import Score
from coral_lens.records import FAMILY, family_of
from coral_lens.report import confidence as numbers
from coral_lens.report.confidence import Position, Standing
from coral_lens.report.findings import Finding, Value
from coral_lens.report.formats import label_of, percent
from coral_lens.report.style import INK, Look, Picture, clipped, method_key, panels
from coral_lens.runs import Evaluation, file_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def about(evaluation: Evaluation) -> str:
    """Return a test set's name and size."""
    return f"{evaluation.name}, {len(evaluation.questions):,} questions"


def parts(score: Score | None) -> tuple[Value, ...]:
    """Return a value with its interval as three cells."""
    return (score.value, score.low, score.high) if score else (None, None, None)


def signed(score: Score) -> str:
    """Return a difference in points with its interval."""
    value, low, high = (percent(x, sign=True) for x in (score.value, score.low, score.high))
    return f"{value} ({low} to {high})"


# --- positions --------------------------------------------------------------------------------------------------------


def position_finding(evaluation: Evaluation, looks: dict[str, Look], *, n_boot: int) -> Finding:
    """Return how often each place is chosen against how often it is right."""
    found = [p for q in evaluation.predictions.values() for p in numbers.positions(q, n_boot=n_boot)]
    columns: tuple[str, ...] = ("method", "position", "n_questions")
    for name in ("right", "chosen", "excess"):
        columns += (name, f"{name}_low", f"{name}_high")
    rows = [(p.method, p.position, p.n_questions, *parts(p.right), *parts(p.chosen), *parts(p.excess)) for p in found]
    drawn = [p for p in found if p.method in looks]

    def paint(figure: Figure) -> None:
        (axes,) = panels(figure, 1)
        draw_positions(axes, drawn, looks)
        method_key(figure, looks)

    alt = f"How often each position is chosen, {about(evaluation)}. " + "; ".join(
        f"{label_of(p.method)} chooses {p.position} on {percent(p.chosen.value)} %, right is {percent(p.right.value)} %"
        for p in drawn
    )
    worst = {m: max((p for p in drawn if p.method == m), key=lambda p: abs(p.excess.value)) for m in looks}
    lean = "; ".join(f"{label_of(m)} {p.position} {signed(p.excess)}" for m, p in worst.items())
    caption = (
        "Bars: how often the position is right; dots: how often it is chosen, with 95 % (Wilson) intervals. Largest leaning, "
        f"chosen minus right in points: {lean}."
    )
    name = f"positions-{file_name(evaluation.name)}"
    return Finding(
        name,
        f"Leaning to positions: {about(evaluation)}",
        columns,
        tuple(rows),
        Picture(name, paint, 3.5, alt, caption),
    )


def draw_positions(axes: Any, found: Sequence[Position], looks: dict[str, Look]) -> None:
    """Draw a bar for each place and a dot for each method beside the others."""
    places = list(dict.fromkeys(p.position for p in found))
    right = {p.position: p.right for p in found}
    axes.bar(range(len(places)), [100 * right[k].value for k in places], 0.8, color="#e6eaed", edgecolor="#9aa5ae")
    for i, (method, look) in enumerate(looks.items()):
        for p in (p for p in found if p.method == method):
            x = places.index(p.position) + 0.56 * ((i + 0.5) / len(looks) - 0.5)
            axes.vlines(x, 100 * p.chosen.low, 100 * p.chosen.high, color=look.colour, linewidth=1.6)
            axes.plot(x, 100 * p.chosen.value, **{**look.dots, "linestyle": ""}, markersize=7)
    axes.set_xticks(range(len(places)), places)
    axes.set(ylabel="questions (%)", xlabel="position of the option (bar: right there)")
    axes.set_ylim(bottom=0)
    axes.grid(False, axis="x")


# --- subjects ---------------------------------------------------------------------------------------------------------


def subject_finding(standings: Sequence[Standing], looks: dict[str, Look], methods: Sequence[str]) -> Finding:
    """Return accuracy and overconfidence of every task."""
    columns: tuple[str, ...] = ("test", "task", "method", "n_questions")
    for name in ("accuracy", "confidence", "overconfidence", "gain"):
        columns += (name, f"{name}_low", f"{name}_high")
    scores = [(s, (s.accuracy, s.confidence, s.overconfidence, s.gain)) for s in standings]
    rows = [(s.test, s.task, s.method, s.n_questions, *(x for one in some for x in parts(one))) for s, some in scores]
    few = numbers.drawn(list(dict.fromkeys(s.method for s in standings)))
    shown = list(methods) or list(dict.fromkeys((few[0], few[-1])))
    drawn = [s for s in standings if s.method in shown]
    names = short_names(drawn)

    def paint(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        draw_standings(left, drawn, "accuracy", {m: looks[m] for m in shown})
        draw_standings(right, drawn, "overconfidence", {m: looks[m] for m in shown})
        left.set_yticks(range(len(names)), [clipped(n, 24) for n in names.values()], fontsize=8.5)
        left.set(ylim=(len(names) - 0.4, -0.6), xlabel="accuracy (%)")
        right.axvline(0, color=INK, linewidth=1)
        right.set_xlabel("too sure by (points)")
        method_key(figure, {m: looks[m] for m in shown})

    alt = "Accuracy and overconfidence by task. " + "; ".join(
        f"{s.task}, {label_of(s.method)}: {percent(s.accuracy.value)} % right, too sure by {signed(s.overconfidence)} points"
        for s in drawn
    )
    caption = (
        "Too sure by: mean confidence minus accuracy, 0 where both agree. Lines are 95 % intervals (Wilson; bootstrap)."
    )
    picture = Picture("subjects", paint, 1.2 + 0.25 * len(names), alt, caption)
    return Finding("subjects", "Accuracy and overconfidence by task", columns, tuple(rows), picture)


def short_names(standings: Sequence[Standing]) -> dict[tuple[str, str], str]:
    """Return a label for each test set's tasks: what tells them apart."""
    keys = list(dict.fromkeys((s.test, s.task) for s in standings))
    alone = [sum(test == other for other, _ in keys) == 1 for test, _ in keys]
    heads = [f"{family_of(task)}_" for _, task in keys]
    return {
        (test, task): test if single and heads.count(head) < FAMILY else task.removeprefix(head)
        for (test, task), single, head in zip(keys, alone, heads, strict=True)
    }


def draw_standings(axes: Any, standings: Sequence[Standing], part: str, looks: dict[str, Look]) -> None:
    """Draw a dot with its interval for each task and method."""
    keys, methods = list(dict.fromkeys((s.test, s.task) for s in standings)), list(looks)
    for s in standings:
        at = keys.index((s.test, s.task)) + 0.5 * ((methods.index(s.method) + 0.5) / len(methods) - 0.5)
        score, look = getattr(s, part), looks[s.method]
        axes.hlines(at, 100 * score.low, 100 * score.high, color=look.colour, linewidth=1.4)
        axes.plot(100 * score.value, at, **{**look.dots, "linestyle": ""}, markersize=5)
