"""Figures of the analyses, drawn from what NAME.json holds: the same file gives the same figure. Only draws.

Curves carry their 95 % interval as a band, and differ in line and marker as well as in colour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coral_lens.metrics.scores import METRICS
from coral_lens.report.figures.style import FAINT, INK, KNOWN, Look, Picture, clipped, panels, spare_look
from coral_lens.report.findings import refuse_others
from coral_lens.storage.files import write_atomic, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Record = Mapping[str, Any]
SIZES = (20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)
"""Numbers of questions that are marked on an axis."""
LOOKS = (KNOWN["coral"], KNOWN["temperature"], KNOWN["listwise"], KNOWN["listwise tempered"])


def write_analysis_pictures(record: Record, folder: Path) -> list[str]:
    """Draw an analysis into NAME.svg and NAME.png, and what needs a figure of its own into NAME-PART; return the names.

    Title and caption of each go into its JSON, where the page of a run looks for them.
    """
    pictures = PICTURES[record["analysis"]](record)
    for picture in pictures:
        words = {"title": TITLES[picture.name], "caption": picture.caption, "alt": picture.alt}
        write_json(folder / f"{picture.name}.json", {**words, **(record if picture.name == record["analysis"] else {})})
        for ending, data in picture.files().items():
            write_atomic(folder / f"{picture.name}{ending}", data)
    return [picture.name for picture in pictures]


def refuse_other_files(name: str, folder: Path) -> None:
    """Refuse a folder in which an analysis would replace files of somebody else."""
    pictures = [known for known in TITLES if known == name or known.startswith(f"{name}-")]
    refuse_others(folder, [*pictures, f"{name}-paper"])


def with_looks(names: Iterable[str]) -> dict[str, Look]:
    """Return a look of its own for each of any number of curves."""
    return {name: LOOKS[i] if i < len(LOOKS) else spare_look(i - len(LOOKS)) for i, name in enumerate(names)}


def column(rows: Sequence[Record], *path: str) -> list[Any]:
    """Return one entry of every row."""
    entries: list[Any] = list(rows)
    for name in path:
        entries = [entry[name] for entry in entries]
    return entries


def draw_banded_curve(
    axes: Any, x: Sequence[Any], scores: Sequence[Record], look: Look, *, label: str = "", unit: int = 100
) -> None:
    """Draw scores with their intervals as a band."""
    values, low, high = ([unit * s[part] for s in scores] for part in ("value", "low", "high"))
    axes.fill_between(x, low, high, color=look.colour, alpha=0.16, linewidth=0)
    axes.plot(
        x,
        values,
        **look.dots,
        markersize=3.4,
        markevery=1 if len(x) <= 40 else len(x) // 8,
        label=clipped(label, 28) or None,
    )


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


def caption_subject(record: Record) -> str:
    """Return the model, the task and the number of questions of an analysis, for a caption."""
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
            draw_banded_curve(ax, x, column(rows, "at_one", metric), LOOKS[1], label="steered, γ = 1")
            draw_banded_curve(ax, x, column(rows, "chosen", metric), LOOKS[0], label="steered, chosen γ")
            ax.set_title(title_of(metric), fontsize=10.5)
        axes[2].axhline(0.0, color=FAINT, linewidth=1.0)
        draw_banded_curve(axes[2], x, column(rows, "r2"), KNOWN["listwise"], unit=1)
        axes[2].set_title("R² of predicted residuals ↑", fontsize=10.5)
        axes[2].set_xlabel("layer (0: embeddings)")
        legend(axes[0], columns=3)

    best = max(rows, key=lambda row: row["r2"]["value"])
    lens = record.get("lens", "ridge")
    probe = {"ridge": "a ridge probe", "mlp": "the paper's network", "linear": "a linear network"}[lens]
    part = (
        f" ({record['n_tested']:,} tested)"
        if record.get("n_tested", record["n_questions"]) < record["n_questions"]
        else ""
    )
    caption = (
        f"{caption_subject(record)}{part}: {probe} at every layer, scored out of fold. R² is highest at layer {best['layer']} "
        f"({best['r2']['value']:.3f}); bands are 95 % intervals."
    )
    pictures = [Picture("layers", paint, 5.6, caption, caption)]
    if rows[0].get("exit_best"):
        pictures.append(exit_picture(record))
    return [*pictures, strength_picture(record)] if record.get("gammas") else pictures


def strength_picture(record: Record) -> Picture:
    """Accuracy, ECE and Brier score of the best layer at every strength."""
    rows = record["gammas"]
    x = column(rows, "gamma")

    def paint(figure: Figure) -> None:
        axes = panels(figure, 3)
        for ax, metric in zip(axes, ("accuracy", "ece", "brier"), strict=True):
            draw_level(ax, record["base"][metric], "base", KNOWN["base"])
            draw_banded_curve(ax, x, column(rows, "scores", metric), LOOKS[0], label="best single layer")
            ax.axvline(1.0, color=FAINT, linewidth=1.0)
            ax.set_title(title_of(metric), fontsize=10.5)
        axes[2].set_xlabel("steering strength gamma (the paper's claim: 1)")
        legend(axes[0])

    best = min(rows, key=lambda row: row["scores"]["brier"]["value"])
    behind = between(best["over_one"]["brier"], 100, 1)
    caption = (
        f"{caption_subject(record)}: the best single layer, chosen on other folds, at every strength. The Brier score is lowest "
        f"at gamma {best['gamma']:g}: {behind} points less than at gamma 1."
    )
    return Picture("layers-gamma", paint, 5.2, caption, caption)


def exit_picture(record: Record) -> Picture:
    """Accuracy and Brier score of a lens without any base, against the share of the forward pass that it needs."""
    rows = record["rows"]
    x = [100 * row["share"] for row in rows]

    def paint(figure: Figure) -> None:
        axes = panels(figure, 2)
        for ax, metric in zip(axes, ("accuracy", "brier"), strict=True):
            draw_level(ax, record["base"][metric], "base, full pass", KNOWN["base"])
            draw_level(ax, record["single"][metric], "steered, full pass", KNOWN["coral"])
            draw_banded_curve(ax, x, column(rows, "exit_best", metric), LOOKS[1], label="no base, states up to here")
            ax.set_title(title_of(metric), fontsize=10.5)
        axes[1].set_xlabel("share of the forward pass, %")
        legend(axes[0])

    caption = (
        f"{caption_subject(record)}: a lens that needs no base probability and stops at the best layer up to here, against base "
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
        for name, look in with_looks(groups).items():
            rows = by_group[name]
            x = column(rows, "components")
            draw_banded_curve(axes[0], x, column(rows, "r2"), look, unit=1, label=name)
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
    caption = (
        f"{caption_subject(record)}: ridge on the first k principal components, averaged over five layers; {said}."
    )
    return [Picture("dimensions", paint, 5.2, caption, caption)]


# --------------------------------------------------------------------------------------------------------------- heads


def head_pictures(record: Record) -> list[Picture]:
    """How R2 is spread over heads, how fast it adds up, and where in the model the heads are."""
    values = column(record["rows"], "r2", "value")
    n, mean, needed, share = len(values), record["mean"], record["needed"], record["needed_share"]

    def paint(figure: Figure) -> None:
        top, bottom = figure.subplots(2, 1)
        top.hist(values, bins=30, color=LOOKS[1].colour, alpha=0.75, edgecolor="white", linewidth=0.6)
        top.axvspan(mean["low"], mean["high"], color=INK, alpha=0.12, linewidth=0)
        top.axvline(mean["value"], color=INK, linestyle="--", linewidth=1.4, label=f"mean {mean['value']:.3f}")
        top.set_xlabel("R² of one head, out of fold")
        top.set_ylabel("heads")
        right = mean["value"] > (min(values) + max(values)) / 2
        top.legend(loc="upper left" if right else "upper right")
        bottom.plot(range(1, n + 1), [100 * c for c in record["cumulative"]], color=LOOKS[0].colour)
        bottom.axhline(80, color=FAINT, linewidth=1.0, linestyle=":")
        if needed["value"]:
            at = needed["value"]
            bottom.plot([needed["low"], needed["high"]], [80, 80], color=INK, linewidth=3, alpha=0.5)
            bottom.plot(at, 80, LOOKS[0].marker, color=LOOKS[0].colour, markeredgecolor=INK, markersize=8)
            said = f"{at:.0f} heads ({100 * share['value']:.0f} %)"
            beside = {"xytext": (10, -14)} if at < n / 2 else {"xytext": (-10, 8), "ha": "right"}
            bottom.annotate(said, (at, 80), textcoords="offset points", fontsize=10, **beside)
        bottom.set_xlabel("best heads")
        bottom.set_ylabel("positive signal, %")
        bottom.set_ylim(0, 103)

    caption = (
        f"{caption_subject(record)}: a small network on each of {n} heads. Mean R² {between(mean, 1, 3)}, highest "
        f"{record['highest']:.3f}; {between(needed, 1, 0)} heads hold 80 % of the positive signal, the best 48 hold "
        f"{between(record['top_share'], 100, 0)} %; {record['clear']} have an interval above 0{counted_above(record)}. "
        "Brackets, band and bar: 95 %."
    )
    return [Picture("heads", paint, 4.9, caption, caption), head_map(record)]


def counted_above(record: Record) -> str:
    """Return how many heads are above the values that the paper counts by; earlier versions did not count them."""
    return "".join(f", {n} an R² above {value}" for value, n in record.get("above", {}).items())


def between(score: Record, unit: int, digits: int) -> str:
    """Return a score with its interval, for a caption."""
    value, low, high = (f"{unit * score[part]:.{digits}f}" for part in ("value", "low", "high"))
    return f"{value} [{low} to {high}]"


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

    caption = f"{caption_subject(record)}: R² of every head; a dot marks heads whose 95 % interval lies above 0."
    return Picture("heads-map", paint, min(6.0, 1.4 + 0.2 * len(heads)), caption, caption)


# ---------------------------------------------------------------------------------------------------------------- data


def transfer_pictures(record: Record) -> list[Picture]:
    """Accuracy gained by a lens of each task on each task, with the shift between them."""
    rows = record["rows"]
    tasks = list(dict.fromkeys(row["train"] for row in rows))
    at = {(row["train"], row["test"]): row for row in rows}
    most = max(*(abs(row["gain"]["accuracy"]["value"]) for row in rows), 1e-6)

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        grid = [[at[a, b]["gain"]["accuracy"]["value"] for b in tasks] for a in tasks]
        axes.imshow(grid, cmap="PuOr_r", vmin=-1.6 * most, vmax=1.6 * most, aspect="auto")
        for i, a in enumerate(tasks):
            for j, b in enumerate(tasks):
                gain = at[a, b]["gain"]["accuracy"]
                clear = "" if gain["low"] <= 0 <= gain["high"] else "*"
                text = f"{100 * gain['value']:+.1f}{clear}\n[{100 * gain['low']:+.0f}, {100 * gain['high']:+.0f}]\n"
                axes.text(j, i, f"{text}shift {at[a, b]['shift']:.2f}", ha="center", va="center", fontsize=8.5)
        axes.set_xticks(range(len(tasks)), [clipped(t, 22) for t in tasks], rotation=20, ha="right")
        axes.set_yticks(range(len(tasks)), [clipped(t, 22) for t in tasks])
        axes.grid(False)
        axes.set_xlabel("tested on")
        axes.set_ylabel("fitted on")

    caption = (
        f"{caption_subject(record)}: points of accuracy that a {record['lens']} lens gains over the unsteered model, paired 95 % "
        "interval below (* leaves out 0), and the median shift of the test questions (1: none)."
    )
    return [Picture("data", paint, 1.6 + 0.85 * len(tasks), caption, caption)]


def curve_pictures(record: Record) -> list[Picture]:
    """Accuracy, ECE and Brier score against the number of labelled questions: every drawing a point, their mean a line."""
    rows = record["rows"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))

    def paint(figure: Figure) -> None:
        axes = panels(figure, 3)
        for task, look in with_looks(tasks).items():
            for ax, metric in zip(axes, ("accuracy", "ece", "brier"), strict=True):
                draw_learning(ax, [row for row in rows if row["task"] == task], metric, look, task)
                base = 100 * record["base"][task][metric]["value"]
                ax.axhline(base, color=look.colour, linewidth=1.0, linestyle=(0, (1, 2)))
                ax.set_title(title_of(metric), fontsize=10.5)
        axes[2].set_xlabel("labelled questions (dotted: the unsteered model)")
        axes[2].set_xscale("log")
        sizes = column(rows, "n_train")
        axes[2].set_xticks(ticks := [t for t in SIZES if min(sizes) <= t <= max(sizes)], [f"{t:,}" for t in ticks])
        axes[2].minorticks_off()
        legend(axes[0])

    caption = f"{caption_subject(record)}: {record['lens']} lenses fitted and chosen anew at each size; bands: 95 %."
    return [Picture("data-curves", paint, 5.8, caption, caption)]


def draw_learning(axes: Any, rows: Sequence[Record], metric: str, look: Look, label: str) -> None:
    """Draw one task's curve: the mean over drawings, and each of them."""
    sizes = sorted({row["n_train"] for row in rows})
    by_size = [[row["scores"][metric] for row in rows if row["n_train"] == n] for n in sizes]
    draw_banded_curve(axes, sizes, [averaged(scores) for scores in by_size], look, label=label)
    for n, scores in zip(sizes, by_size, strict=True):
        axes.plot([n] * len(scores), [100 * s["value"] for s in scores], ".", color=look.colour, markersize=3)


# -------------------------------------------------------------------------------------------------------------- probes


def probe_pictures(record: Record) -> list[Picture]:
    """Brier score by kind of probe, by regularisation and by gamma, in distribution and in transfer."""
    rows = record["rows"]
    tests = list(dict.fromkeys(row["test"] for row in rows))
    kinds = [name for name in dict.fromkeys(row["probe"] for row in rows) if name != "grid" and "re-chosen" not in name]

    def paint(figure: Figure) -> None:
        axes = figure.subplots(3, 1)
        for test, look in with_looks(tests).items():
            mine = [row for row in rows if row["test"] == test]
            draw_mean(axes[0], {k: [r for r in mine if r["probe"] == k] for k in kinds}, look, test)
            grid = [r for r in mine if r["probe"] == "grid"]
            decays = sorted({r["weight_decay"] for r in grid})
            draw_mean(axes[1], {f"{d:g}": [r for r in grid if r["weight_decay"] == d] for d in decays}, look, test)
            curve = [g for g in record["gammas"] if g["test"] == test]
            draw_banded_curve(axes[2], column(curve, "gamma"), column(curve, "scores", "brier"), look)
        axes[2].axvline(1.0, color=FAINT, linewidth=1.0)
        axes[0].set_xlabel("probe")
        axes[1].set_xlabel("weight decay (mean over lambda_out, dropout and seeds)")
        axes[2].set_xlabel("gamma of the ridge probe")
        for ax in axes:
            ax.set_title(title_of("brier"), fontsize=10.5)
        legend(axes[0])

    caption = (
        f"{caption_subject(record)}: probes of layer {record['layer']}, fitted on the first task. Bars and bands: 95 % intervals "
        "over questions, their ends averaged over seeds and settings; dots: each of these. The first task is in distribution, "
        "the others are transfer."
    )
    return [Picture("probes", paint, 6.6, caption, caption)]


def draw_mean(axes: Any, groups: Mapping[str, Sequence[Record]], look: Look, label: str) -> None:
    """Draw the mean Brier score of each group of rows with its interval, and each row of it."""
    scores = {name: column(rows, "scores", "brier") for name, rows in groups.items() if rows}
    middle = [averaged(group) for group in scores.values()]
    below, above = ([100 * abs(m["value"] - m[end]) for m in middle] for end in ("low", "high"))
    values = [100 * m["value"] for m in middle]
    axes.errorbar(
        range(len(values)),
        values,
        yerr=(below, above),
        **look.dots,
        markersize=4,
        capsize=2.5,
        label=clipped(label, 28),
    )
    for i, group in enumerate(scores.values()):
        # beside the bar, which would hide them
        axes.plot([i + 0.07] * len(group), [100 * s["value"] for s in group], ".", color=look.colour, markersize=4)
    axes.set_xticks(range(len(values)), list(scores), fontsize=8.5)


def averaged(scores: Sequence[Record]) -> dict[str, float]:
    """Return the mean of scores of the same questions, and of the ends of their intervals, which is no narrower than its own."""
    return {part: sum(s[part] for s in scores) / len(scores) for part in ("value", "low", "high")}


TITLES = {
    "layers": "Which layers know",
    "layers-exit": "Leaving the forward pass early",
    "layers-gamma": "How strong steering must be",
    "dimensions": "How many directions the signal needs",
    "heads": "How the signal is spread over heads",
    "heads-map": "Where the heads are",
    "data": "From task to task",
    "data-curves": "How many questions are enough",
    "probes": "What a probe must be",
}
PICTURES: dict[str, Callable[[Record], list[Picture]]] = {
    "layers": layer_pictures,
    "dimensions": dimension_pictures,
    "heads": head_pictures,
    "data": transfer_pictures,
    "data-curves": curve_pictures,
    "probes": probe_pictures,
}
"""How each analysis is drawn."""
