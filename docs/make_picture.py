"""Draw docs/images/reliability.svg, a run's reliability before and after: python docs/make_picture.py RUN [TEST]

RUN is a folder of `coral eval --out` or `coral demo`; TEST is one of its test sets, by default the first. Before is the
unsteered model, after is the last method of the run, which is its lens.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from coral_lens.metrics.curves import reliability
from coral_lens.metrics.scores import score
from coral_lens.records import Predictions
from coral_lens.report.confidence import wilson
from coral_lens.report.figures.style import INK, RC, inline, looks_of
from coral_lens.report.runs import Evaluation, load_run

OUT = Path(__file__).parent / "images" / "reliability.svg"
N_BINS = 8
"""Each holds equally many questions."""


def main(folder: str, *names: str) -> None:
    """Draw one test set of a run."""
    evaluations = load_run(Path(folder)).evaluations
    chosen = next((e for e in evaluations if e.name in names), evaluations[0])
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(picture(chosen) + "\n", "utf-8")


def picture(evaluation: Evaluation) -> str:
    """Return the SVG: the unsteered model on the left, the lens on the right."""
    before, after = "base", list(evaluation.predictions)[-1]
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(7.4, 3.7), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for one, method, title in zip(
            axes, (before, after), ("before: the model", "after: with the lens"), strict=True
        ):
            draw(one, evaluation.predictions[method], colour=looks_of([method])[method].colour)
            one.set_title(title)
        axes[0].set_ylabel("right answers (%)")
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    words = " ".join(sentence(evaluation.predictions[m], when) for m, when in ((before, "Before"), (after, "After")))
    drawn = inline(text.getvalue(), name="reliability", alt=f"Share of right answers over confidence. {words}")
    return drawn.replace("<svg ", '<svg width="740" height="370" ', 1)


def draw(axes: Any, predictions: Predictions, *, colour: str) -> None:
    """Draw a dot with its 95 % interval for each bin of confidence."""
    bins = reliability(predictions, n_bins=N_BINS, adaptive=True)
    low, high = wilson(bins.accuracy * bins.count, bins.count)
    axes.plot([0, 100], [0, 100], color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
    axes.vlines(100 * bins.confidence, 100 * low, 100 * high, color=colour, linewidth=1.6)
    axes.plot(100 * bins.confidence, 100 * bins.accuracy, color=colour, marker="o", markersize=7, linestyle="")
    axes.set(xlim=(0, 100), ylim=(0, 100), xlabel="confidence (%)")
    axes.text(3, 95, said(predictions), va="top", linespacing=1.5)


def said(predictions: Predictions) -> str:
    """Return the two numbers that stand in a panel."""
    right, brier = (100 * score(predictions, name) for name in ("accuracy", "brier"))
    return f"{right:.1f} % right\nBrier score {brier:.1f}"


def sentence(predictions: Predictions, when: str) -> str:
    """Return a panel in words."""
    return f"{when}: {said(predictions).replace(chr(10), ', ')} on {len(predictions):,} questions."


if __name__ == "__main__":
    main(*sys.argv[1:])
