"""What commands print: of a fitted lens, of runs and studies, of autoencoders and of analyses, in a few lines each.

Only prints; `show_run` and `print_comparison` also write the report that they name. Heavy: a command imports it when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from coral_lens.analysis.data import CurveAnalysis, TransferAnalysis
from coral_lens.analysis.dimensions import DimensionAnalysis
from coral_lens.analysis.heads import EPOCHS, HeadAnalysis, HeadPlan
from coral_lens.analysis.layers import LayerAnalysis
from coral_lens.analysis.probes import GammaRow, ProbeAnalysis, ProbeRow
from coral_lens.analysis.scores import SHOWN
from coral_lens.lens.artefact import Lens
from coral_lens.lens.publish import answer_sentences
from coral_lens.lens.trace import WORTH, LearningCurve
from coral_lens.metrics.comparisons import Difference
from coral_lens.metrics.scores import Score
from coral_lens.report.figures.confidence import confidence_findings
from coral_lens.report.figures.paper import components_text
from coral_lens.report.findings import FOLDER, write_findings
from coral_lens.report.names import task_name
from coral_lens.report.pages.compare import write_comparison
from coral_lens.report.pages.run import write_report
from coral_lens.report.runs import Run
from coral_lens.report.tables.clear import verdict_of
from coral_lens.report.tables.formats import MARKED, interval_text, percent
from coral_lens.report.tables.run import results_table
from coral_lens.report.tables.study import RELATIVE, Improvement, difference_of, improvements, tables_in
from coral_lens.report.terminal import WIDE, WIDTH, in_full, in_short, plain_console
from coral_lens.storage.escape import in_one_line
from coral_lens.storage.files import read_json

NOTHING = {
    "residual": "No strength of this lens beat the unsteered model on validation, so it does nothing.",
    "listwise": "No strength of this lens's scores helped on validation: it only scales the base probabilities.",
}
"""What is said of gamma 0 under each rule."""
COLUMNS = {"accuracy": "accuracy", "ece": "ECE", "brier": "Brier", "nll": "NLL"}

# --------------------------------------------------------------------------------------------------------- a fitted lens


def print_fit(lens: Lens) -> None:
    """Print the validation table, what was chosen, how flat the choice is, and how many questions were enough."""
    table = Table("validation", *COLUMNS.values(), box=None)  # intervals stand below, to fit a narrow terminal
    for method, scores in lens.trace.validation.items():
        cells = (scores[m] for m in COLUMNS)
        shown = (f"{100 * c.value:.1f}\n{100 * c.low:.1f} to {100 * c.high:.1f}" for c in cells)
        table.add_row(in_one_line(method), *shown)
    plain_console().print(table)
    training, chosen = lens.training, lens.trace.chosen
    typer.echo(
        f"Chosen: {lens.name} (R2 {chosen.r2:.3f}), fitted on {training.n_train} questions and chosen on "
        f"{training.n_validation}. The scores above (with 95 % intervals) flatter it; measure it with "
        f"`coral {'ask --questions FILE' if lens.open else 'eval'}`."
    )
    if chosen.gamma == 0:
        typer.echo(NOTHING[lens.correction.rule])
    for sentence in answer_sentences(lens.trace):
        typer.echo(in_one_line(sentence))
    print_flatness(lens)
    if lens.trace.learning_curve:
        print_curve(lens.trace.learning_curve)


def print_flatness(lens: Lens) -> None:
    """Say how many layers would have done as well."""
    tried, good = lens.trace.layers, lens.trace.as_good
    shown = ", ".join(map(str, good))
    typer.echo(f"{len(good)} of {len(tried)} layers tried are within one standard error of the best (Brier): {shown}.")


def print_curve(curve: LearningCurve) -> None:
    """Print the scores at each number of training questions."""
    table = Table("training questions", *COLUMNS.values(), box=None)
    for point in curve.points:
        table.add_row(str(point.questions), *(f"{100 * point.scores[m]:.1f}" for m in COLUMNS))
    plain_console().print(table)
    typer.echo(f"{curve.enough} training questions would have been enough: more gain less than a standard error.")


def print_adaptation(lens: Lens) -> None:
    """Print what labels of a task have shown, and what fewer of them would have."""
    found = lens.adaptation
    assert found is not None, "printed after adapting"
    typer.echo(str(found))
    if found.curve:
        table = Table("labels", "Brier", box=None)
        for point in found.curve.points:
            table.add_row(str(point.questions), f"{100 * point.scores['brier']:.1f}")
        plain_console().print(table)
        typer.echo(f"{enough_line(found.curve)} {more_line(found.curve, found.n_questions)}")


def why_left_out(*, adapted: bool, calibrated: bool = False) -> str:
    """Say why questions that a lens knows are left out: each had a part in it in one of these ways."""
    ways = ["fitted", *["adapted"] * adapted, *["calibrated"] * calibrated]
    said = f"{', '.join(ways[:-1])} or {ways[-1]}" if len(ways) > 1 else ways[0]
    return f"because the lens was {said} on them"


def enough_line(curve: LearningCurve) -> str:
    """Say whether fewer labels would have given as much, as far as the curve goes: half of the labels are its judges."""
    most = curve.points[-1].questions
    if curve.enough == most:
        return (
            f"Not fewer than {most} labels would have been enough: {most} gain more than a standard error over fewer."
        )
    if curve.enough == 0:
        return f"That labels help does not show here: {most} gain less than a standard error over none."
    return f"{curve.enough} labels would have been enough: {most} gain less than a standard error over them."


def more_line(curve: LearningCurve, n_labels: int) -> str:
    """Say how many more labels are worth it, if the curve goes on as it has begun."""
    gain = f"{100 * WORTH:.1f} (Brier score × 100)"
    if curve.more is None:
        return "Whether more labels are worth it, so few of them cannot tell."
    if curve.more == 0:
        return f"More labels are hardly worth it: ten times the {n_labels} would gain less than {gain}."
    return f"If the curve goes on so, about {curve.more} labels more would gain {gain}."


# ------------------------------------------------------------------------------------------------------ runs and studies


def show_run(run: Run, folder: Path | None, *, again: bool = False, full: bool = False) -> None:
    """Print whether a run helped, and if it has a folder, write what its confidence is worth and its report.

    `again`: findings that are there already stay as they are. `full`: all tables in place of the short one.
    """
    table = results_table(run)
    console = plain_console()
    if full:
        console.print(in_full(table), width=None if console.is_terminal else WIDE)
    else:
        console.print(in_short(table), width=None if console.is_terminal else WIDTH)
    if folder:
        findings = folder / FOLDER / "confidence"
        if not (again and findings.exists()):
            write_findings(confidence_findings(run), findings)
        typer.echo(f"Report: {write_report(run, folder, table=table)}")


def print_comparison(a: Run, b: Run, folder: Path) -> None:
    """Compare two runs, and print what changed from the first to the second."""
    page = write_comparison(a, b, folder)
    for test in read_json(folder / "comparison.json")["tests"]:
        table = Table(
            f"{in_one_line(task_name(test['task']))} ({test['n_shared']:,} shared)",
            "accuracy",
            "ECE",
            "Brier",
            box=None,
        )
        for c in test["comparisons"]:
            shown = [compared_cell(test, c, m) for m in ("accuracy", "ece", "brier")]
            names = [c["method"].removeprefix("B: "), c["against"].removeprefix("A: ")]
            label = names[0] if names[0] == names[1] else f"{c['method']} − {c['against']}"
            table.add_row(in_one_line(label), *shown)
        plain_console().print(table)
    typer.echo(f"B minus A, x 100, with paired 95 % intervals. {MARKED}\nReport: {page}")


def compared_cell(test: dict[str, Any], comparison: dict[str, Any], metric: str) -> str:
    """Return a saved difference with its interval, and a mark where it is clear."""
    difference, n_tests = difference_of(comparison, metric), sum(len(c["p_values"]) for c in test["comparisons"])
    verdict = verdict_of(difference, comparison["p_values"].get(metric), metric=metric, n_tests=n_tests)
    interval = interval_text(difference.low, difference.high, sign=True)
    return f"{percent(difference.value, sign=True)} ({interval}) {verdict.mark}".rstrip()


def print_plan(record: dict[str, Any]) -> None:
    """Print which questions a study trains on and tests on, and how many were dropped because they would leak."""
    training = Table("training", "dropped", "questions", "of", box=None)
    for name, about in record["mixtures"].items():
        for i, (source, n) in enumerate(about["questions"].items()):
            training.add_row(
                *(("", "") if i else (in_one_line(name), f"{about['n_dropped']:,}")), f"{n:,}", in_one_line(source)
            )
    tests = Table("test", "shots", "questions", "left out", box=None)
    for name, about in record["tests"].items():
        tests.add_row(in_one_line(name), str(about["shots"]), f"{about['questions']:,}", f"{about['n_left_out']:,}")
    console = plain_console()
    console.print(training)
    console.print(tests)
    typer.echo("Dropped: a test set holds them too. Left out: a prompt shows them as worked examples.")


def print_study(page: Path) -> None:
    """Print what each method gained on average, and where the report is."""
    table = Table("trained on", "tests", "method", "accuracy", "ECE", box=None)
    for one in improvements(tables_in(read_json(page.parent / "tables.json"))):
        accuracy, ece = (mean_cell(one, m) for m in RELATIVE)
        mark = "" if one.ranks else " (too few questions)"
        table.add_row(
            in_one_line(one.mixture), f"{one.kind}, {one.n_cells}", in_one_line(one.method), accuracy, ece + mark
        )
    plain_console().print(table)
    typer.echo(
        f"Mean relative improvement on the unsteered model with the same prompts, with 95 % intervals.\nReport: {page}"
    )


def mean_cell(improvement: Improvement, metric: str) -> str:
    """Return a mean relative improvement with its interval, where it is known."""
    if metric not in improvement.means:
        return "n/a"
    low_high = improvement.intervals.get(metric)
    interval = f" ({interval_text(*low_high, sign=True)})" if low_high else ""
    return f"{percent(improvement.means[metric], sign=True)} %{interval}"


# ---------------------------------------------------------------------------------------------------------- autoencoders


def print_quality(quality: dict[str, Any]) -> None:
    """Print how good autoencoders are on states that they were not trained on."""
    head = f"{'':<6}{'features':>9}{'L0':>8}{'explained':>11}{'raw':>8}{'dead':>8}   loss: clean, patched, zeroed; recovered"
    typer.echo(head)
    for name, measures in quality.items():
        loss = measures["loss"]
        shown = (
            f"{loss['clean']:.3f}, {loss['patched']:.3f}, {loss['zeroed']:.3f}; {loss['share']:.1%}" if loss else "-"
        )
        typer.echo(
            f"{name:<6}{measures['n_features']:>9}{measures['l0']:>8.1f}{measures['explained']:>11.1%}"
            f"{measures['explained_raw']:>8.1%}{measures['dead']:>8.1%}   {shown}"
        )
    first = next(iter(quality.values()))
    typer.echo(
        f"Trained on {first['about']['steps']['states']:,} states; measured on {first['n_states']:,} held-out states and "
        f"{first['loss'].get('n_questions', 0)} held-out questions; {first['n_massive']:,} held-out attention sinks stay as "
        "they are."
    )


def print_selection(selection: dict[str, Any]) -> None:
    """Print the best features by either criterion."""
    n, alive = selection["n_samples"], sum(a > 0 for a in selection["n_active"])
    typer.echo(f"{n:,} options; {alive:,} of {len(selection['r']):,} features are active in one of them.")
    for name, features in selection["chosen"].items():
        typer.echo(f"by {name}: {len(features)} features, the first five:")
        for j in features[:5]:
            typer.echo(
                f"  feature {j}: r {selection['r'][j]:+.3f}, active in {selection['n_active'][j] / n:.1%}, mean "
                f"{selection['mean'][j]:.3f}, impact {selection['impact'][j]:+.2e}"
            )


def print_ablation(record: dict[str, Any]) -> None:
    """Print what taking out single features does, on average and in quartiles, beside random ones."""
    typer.echo(f"{record['n_questions']} questions; changes against the reconstruction, with 95 % intervals.")
    for name, run in record["runs"].items():
        typer.echo(f"  {name}: accuracy {run['accuracy']:.4f}, ECE {run['ece']:.4f}, Brier {run['brier']:.4f}")
    for name, group in record["groups"].items():
        for metric, effect in group.items():
            mean, (first, median, third) = effect["mean"], effect["quartiles"]
            typer.echo(
                f"  {effect['n_features']} by {name}, {metric}: mean {mean['value']:+.2e} [{mean['low']:+.2e}, "
                f"{mean['high']:+.2e}], quartiles {first:+.2e}, {median:+.2e}, {third:+.2e}, largest {effect['largest']:.1e}"
            )
    for name, comparison in record.get("against random", {}).items():
        ece = comparison["ece"]
        typer.echo(
            f"  {name} less random, ECE: {ece['value']:+.2e} [{ece['low']:+.2e}, {ece['high']:+.2e}]; of the middle 95 % of "
            f"random ones {ece['above']:.1%} lie above, {ece['below']:.1%} below; rank {ece['rank']:.2f} (by chance 0.50)"
        )


def print_steering(record: dict[str, Any]) -> None:
    """Print the settings that were measured on test questions, and whether the chosen one helps."""
    typer.echo(
        f"{record['n_beneficial']} beneficial features; chosen by {record['criterion']} on {record['n_validation']} validation "
        f"questions, measured on {record['n_test']} test questions."
    )
    for row in record["rows"]:
        name = f"top {row['features']}, gamma {row['gamma']:g}" if row["gamma"] else "unsteered"
        scores = ", ".join(f"{m} {s['value']:.4f}" for m, s in row["test"].items())
        changes = "".join(
            f"; {m} {d['value']:+.4f} [{d['low']:+.4f}, {d['high']:+.4f}]"
            for m, d in row["less base"].items()
            if m in ("accuracy", "ece")
        )
        typer.echo(f"  {name}{' (chosen)' if row['chosen'] else ''}: {scores}{changes}")


# -------------------------------------------------------------------------------------------------------------- analyses


def with_interval(score: Score | Difference) -> str:
    """Return a score times 100 with its interval."""
    return f"{100 * score.value:.1f} [{100 * score.low:.1f} to {100 * score.high:.1f}]"


def print_layers(analysis: LayerAnalysis) -> None:
    """Print the base, every layer, the best layers side by side and the cheapest early exit."""
    lines = [
        f"base: accuracy {with_interval(analysis.base['accuracy'])}, ECE {with_interval(analysis.base['ece'])}",
        "layer  R2                      gamma  accuracy, gamma = 1    chosen gamma           ECE, gamma = 1  chosen"
        + ("  no base: accuracy, share of the pass" if analysis.rows[0].exit_best else ""),
    ]
    for row in analysis.rows:
        left = f"  {with_interval(row.exit_best['accuracy'])}, {100 * row.share:.0f} %" if row.exit_best else ""
        lines.append(
            f"{row.layer:5}  {row.r2!s:22}  {row.gamma:5.2f}  {with_interval(row.at_one['accuracy']):21}  "
            f"{with_interval(row.chosen['accuracy']):21}  {100 * row.at_one['ece'].value:14.1f}  "
            f"{100 * row.chosen['ece'].value:6.1f}{left}"
        )
    chosen = ", ".join(map(str, analysis.single_layers))
    lines.append(f"best single layer (by fold: {chosen}): accuracy {with_interval(analysis.single['accuracy'])}, ECE "
                 f"{with_interval(analysis.single['ece'])}")  # fmt: skip
    for top in analysis.top:
        lines.append(
            f"top {top.n_layers} side by side: accuracy {with_interval(top.scores['accuracy'])}, less the best single "
            f"{with_interval(top.behind_single['accuracy'])}; Brier less the best single "
            f"{with_interval(top.behind_single['brier'])}"
        )
    if analysis.left_out:
        lines.append(analysis.left_out)
    strongest = min(analysis.gammas, key=lambda row: row.scores["brier"].value)
    lines.append(
        f"the best single layer at gamma {strongest.gamma:g}, of all tried: Brier less that at gamma 1 "
        f"{with_interval(strongest.over_one['brier'])}, accuracy {with_interval(strongest.over_one['accuracy'])}"
    )
    typer.echo("\n".join(lines))


def print_dimensions(analysis: DimensionAnalysis) -> None:
    """Print a line per group of layers."""
    lines = [
        "layers     R2 at 10      at 50      at most     saturates at  second half adds        90 % of variance in"
    ]
    for group in analysis.groups:
        curve = [row.r2.value for row in analysis.rows if row.layers == group.layers]
        at = [curve[min(k, len(curve)) - 1] for k in (10, 50, len(curve))]
        shown, held = "  ".join(f"{value:9.3f}" for value in at), components_text(group.for_90, len(curve))
        lines.append(f"{group.layers:9}  {shown}  {group.saturates_at:12}  {group.last_half!s:22}  {held}")
    typer.echo("\n".join(lines))


def print_heads(analysis: HeadAnalysis) -> None:
    """Print how the signal is spread over heads."""
    mean, needed = analysis.mean, analysis.needed
    best = sorted(analysis.rows, key=lambda row: -row.r2.value)[:5]
    typer.echo(
        f"{len(analysis.rows)} heads: mean R2 {mean.value:.4f} [{mean.low:.4f} to {mean.high:.4f}], highest "
        f"{analysis.highest:.3f}; {analysis.clear} with an interval above 0, "
        + ", ".join(f"{n} above {value}" for value, n in analysis.above.items())
        + f".\n{needed.value:.0f} heads "
        f"[{needed.low:.0f} to {needed.high:.0f}], {with_interval(analysis.needed_share)} %, hold 80 % of the positive "
        f"signal; the best 48 hold {with_interval(analysis.top_share)} %.\nbest: "
        + ", ".join(f"layer {row.layer} head {row.head} ({row.r2})" for row in best)
    )


def print_head_plan(plan: HeadPlan) -> None:
    """Print what an analysis of heads would need."""
    typer.echo(
        f"{plan.networks:,} networks in stacks of {plan.stack}: {plan.memory / 2**30:.1f} GiB of memory, "
        f"{plan.disk / 2**30:.1f} GiB of stored heads.\n{1e3 * plan.step:.2f} ms a step and network here and now: about "
        f"{hours(plan.seconds)} if networks stop after {EPOCHS} epochs, {hours(plan.most_seconds)} at most."
    )


def hours(seconds: float) -> str:
    """Return a time for people."""
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:.0f} minutes"


def print_learning_curves(analysis: CurveAnalysis) -> None:
    """Print a line per size, the mean over drawings."""
    lines = ["task                      questions  accuracy  ECE   Brier  (base: accuracy, ECE, Brier)"]
    for task, n in sorted({(row.task, row.n_train) for row in analysis.rows}):
        drawn = [row for row in analysis.rows if (row.task, row.n_train) == (task, n)]
        mean = {name: sum(100 * row.scores[name].value for row in drawn) / len(drawn) for name in SHOWN}
        base = ", ".join(f"{100 * analysis.base[task][name].value:.1f}" for name in SHOWN)
        values = f"{mean['accuracy']:8.1f}  {mean['ece']:4.1f}  {mean['brier']:5.1f}"
        lines.append(f"{task:24}  {n:9}  {values}  ({base})")
    typer.echo("\n".join(lines))


def print_transfer(analysis: TransferAnalysis) -> None:
    """Print a line per pair of tasks."""
    lines = ["fitted on                 tested on                 shift  over base: accuracy, ECE, Brier"]
    for row in analysis.rows:
        gains = "  ".join(f"{with_interval(row.gain[name]):21}" for name in SHOWN)
        lines.append(f"{row.train:24}  {row.test:24}  {row.shift:5.2f}  {gains}")
    typer.echo("\n".join(lines))


def print_probes(analysis: ProbeAnalysis) -> None:
    """Print a line per probe and test set, the mean over seeds, and the best gamma of each test set."""
    lines = [f"layer {analysis.layer}; less ridge, on the same questions:"]
    fits: dict[tuple[str, str], list[ProbeRow]] = {}
    for row in analysis.rows:
        probe = f"{row.probe}, weight decay {row.weight_decay:g}" if row.probe == "grid" else row.probe
        fits.setdefault((probe, row.test), []).append(row)
    for (probe, test), rows in fits.items():
        mean = {m: sum(100 * row.scores[m].value for row in rows) / len(rows) for m in SHOWN}
        behind = sum(100 * row.gain["brier"].value for row in rows) / len(rows)
        values = f"accuracy {mean['accuracy']:.1f}, ECE {mean['ece']:.1f}, Brier {mean['brier']:.1f} ({behind:+.1f})"
        lines.append(f"{probe}, {test}: {values}, {len(rows)} fit(s)")
    for test in dict.fromkeys(row.test for row in analysis.gammas):
        best = min((row for row in analysis.gammas if row.test == test), key=lambda row: row.scores["brier"].value)
        lines.append(
            f"{test}: by Brier, {with_interval(best.scores['brier'])}, gamma {best.gamma:g} is best; {against_one(best)}"
        )
    typer.echo("\n".join(lines))


def against_one(row: GammaRow) -> str:
    """Return whether a strength that was picked on the test questions themselves is clearly better there than 1."""
    if row.gamma == 1.0:
        return "nothing is better than 1"
    over = row.over_one["brier"]
    return f"less gamma = 1: {with_interval(over)}, {'clear' if over.high < 0 else 'not clear'}, though picked on these questions"
