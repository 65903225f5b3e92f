"""What an analysis found, in a few lines for the terminal."""

from __future__ import annotations

from coral_lens.analysis.data import CurveAnalysis, TransferAnalysis
from coral_lens.analysis.dimensions import DimensionAnalysis
from coral_lens.analysis.head_plan import EPOCHS, HeadPlan
from coral_lens.analysis.heads import HeadAnalysis
from coral_lens.analysis.layers import LayerAnalysis
from coral_lens.analysis.probes import GammaRow, ProbeAnalysis
from coral_lens.analysis.scores import SHOWN
from coral_lens.metrics import Score
from coral_lens.stats import Difference


def percent(score: Score | Difference) -> str:
    """Return a score times 100 with its interval."""
    return f"{100 * score.value:.1f} [{100 * score.low:.1f} to {100 * score.high:.1f}]"


def say_layers(found: LayerAnalysis) -> str:
    """Return the base, every layer, the best layers side by side and the cheapest early exit."""
    lines = [
        f"base: accuracy {percent(found.base['accuracy'])}, ECE {percent(found.base['ece'])}",
        "layer  R2                      gamma  accuracy, gamma = 1    chosen gamma           ECE, gamma = 1  chosen  "
        "no base: accuracy, share of the pass",
    ]
    for row in found.rows:
        lines.append(
            f"{row.layer:5}  {row.r2!s:22}  {row.gamma:5.2f}  {percent(row.at_one['accuracy']):21}  "
            f"{percent(row.chosen['accuracy']):21}  {100 * row.at_one['ece'].value:14.1f}  "
            f"{100 * row.chosen['ece'].value:6.1f}  {percent(row.exit_best['accuracy'])}, {100 * row.share:.0f} %"
        )
    chosen = ", ".join(map(str, found.single_layers))
    lines.append(f"best single layer (by fold: {chosen}): accuracy {percent(found.single['accuracy'])}, ECE "
                 f"{percent(found.single['ece'])}")  # fmt: skip
    for top in found.top:
        lines.append(
            f"top {top.n_layers} side by side: accuracy {percent(top.scores['accuracy'])}, less the best single "
            f"{percent(top.behind_single['accuracy'])}; Brier less the best single {percent(top.behind_single['brier'])}"
        )
    return "\n".join(lines)


def say_dimensions(found: DimensionAnalysis) -> str:
    """Return a line per group of layers."""
    lines = [
        "layers     R2 at 10      at 50      at most     saturates at  second half adds        90 % of variance in"
    ]
    for group in found.groups:
        curve = [row.r2.value for row in found.rows if row.layers == group.layers]
        at = [curve[min(k, len(curve)) - 1] for k in (10, 50, len(curve))]
        shown = "  ".join(f"{value:9.3f}" for value in at)
        lines.append(f"{group.layers:9}  {shown}  {group.saturates_at:12}  {group.last_half!s:22}  {group.for_90}")
    return "\n".join(lines)


def say_heads(found: HeadAnalysis) -> str:
    """Return how the signal is spread over heads."""
    best = sorted(found.rows, key=lambda row: -row.r2.value)[:5]
    return (
        f"{len(found.rows)} heads: mean R2 {found.mean.value:.4f} [{found.mean.low:.4f} to {found.mean.high:.4f}], highest "
        f"{found.highest:.3f}; {found.clear} with an interval above 0.\n{found.needed.value:.0f} heads "
        f"[{found.needed.low:.0f} to {found.needed.high:.0f}], {percent(found.needed_share)} %, hold 80 % of the positive "
        f"signal; the best 48 hold {percent(found.top_share)} %.\nbest: "
        + ", ".join(f"layer {row.layer} head {row.head} ({row.r2})" for row in best)
    )


def say_plan(plan: HeadPlan) -> str:
    """Return what an analysis of heads would need."""
    return (
        f"{plan.networks:,} networks in stacks of {plan.stack}: {plan.memory / 2**30:.1f} GiB of memory, "
        f"{plan.disk / 2**30:.1f} GiB of stored heads.\n{1e3 * plan.step:.2f} ms a step and network here and now: about "
        f"{hours(plan.seconds)} if networks stop after {EPOCHS} epochs, {hours(plan.most_seconds)} at most."
    )


def hours(seconds: float) -> str:
    """Return a time for people."""
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:.0f} minutes"


def say_curves(found: CurveAnalysis) -> str:
    """Return a line per size, the mean over drawings."""
    lines = ["task                      questions  accuracy  ECE   Brier  (base: accuracy, ECE, Brier)"]
    for task, n in sorted({(row.task, row.n_train) for row in found.rows}):
        some = [row for row in found.rows if (row.task, row.n_train) == (task, n)]
        mean = {name: sum(100 * row.scores[name].value for row in some) / len(some) for name in SHOWN}
        base = ", ".join(f"{100 * found.base[task][name].value:.1f}" for name in SHOWN)
        values = f"{mean['accuracy']:8.1f}  {mean['ece']:4.1f}  {mean['brier']:5.1f}"
        lines.append(f"{task:24}  {n:9}  {values}  ({base})")
    return "\n".join(lines)


def say_transfer(found: TransferAnalysis) -> str:
    """Return a line per pair of tasks."""
    lines = ["fitted on                 tested on                 shift  over base: accuracy, ECE, Brier"]
    for row in found.rows:
        gains = "  ".join(f"{percent(row.gain[name]):21}" for name in SHOWN)
        lines.append(f"{row.train:24}  {row.test:24}  {row.shift:5.2f}  {gains}")
    return "\n".join(lines)


def say_probes(found: ProbeAnalysis) -> str:
    """Return a line per probe and test set, the mean over seeds, and the best gamma of each test set."""
    lines = [f"layer {found.layer}; less ridge, on the same questions:"]
    names = list(
        dict.fromkeys((row.probe, row.weight_decay if row.probe == "grid" else None, row.test) for row in found.rows)
    )
    for name, decay, test in names:
        some = [
            r for r in found.rows if (r.probe, r.test) == (name, test) and (name != "grid" or r.weight_decay == decay)
        ]
        mean = {m: sum(100 * r.scores[m].value for r in some) / len(some) for m in SHOWN}
        behind = sum(100 * r.gain["brier"].value for r in some) / len(some)
        what = name if decay is None else f"{name}, weight decay {decay:g}"
        values = f"accuracy {mean['accuracy']:.1f}, ECE {mean['ece']:.1f}, Brier {mean['brier']:.1f} ({behind:+.1f})"
        lines.append(f"{what}, {test}: {values}, {len(some)} fit(s)")
    for test in dict.fromkeys(row.test for row in found.gammas):
        best = min((row for row in found.gammas if row.test == test), key=lambda row: row.scores["brier"].value)
        lines.append(
            f"{test}: by Brier, {percent(best.scores['brier'])}, gamma {best.gamma:g} is best; {against_one(best)}"
        )
    return "\n".join(lines)


def against_one(row: GammaRow) -> str:
    """Return whether a strength that was picked on the test questions themselves is clearly better there than 1."""
    if row.gamma == 1.0:
        return "nothing is better than 1"
    over = row.over_one["brier"]
    return f"less gamma = 1: {percent(over)}, {'clear' if over.high < 0 else 'not clear'}, though picked on these questions"
