"""What the command line shows of a fitted lens and of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from coral_lens.lens import Lens
from coral_lens.manifest import read_json
from coral_lens.report.compare_page import write_comparison
from coral_lens.report.confidence_figures import confidence_findings
from coral_lens.report.findings import FOLDER, write_findings
from coral_lens.report.formats import percent, terminal
from coral_lens.report.page import write_report
from coral_lens.report.tables import results_table
from coral_lens.runs import Run

NOTHING = {
    "residual": "No strength of this lens beat the unsteered model on validation, so it does nothing.",
    "listwise": "No strength of this lens's scores helped on validation: it only scales the base probabilities.",
}
"""What is said of gamma 0 under each rule."""
COLUMNS = {"accuracy": "accuracy", "ece": "ECE", "brier": "Brier", "nll": "NLL"}


def print_fit(lens: Lens) -> None:
    """Print the validation table, what was chosen, how flat the choice is, and how many questions were enough."""
    table = Table("validation", *COLUMNS.values(), box=None)  # intervals stand below, to fit a narrow terminal
    for method, scores in lens.trace["validation"].items():
        cells = (scores[m] for m in COLUMNS)
        shown = (f"{100 * c['value']:.1f}\n{100 * c['low']:.1f} to {100 * c['high']:.1f}" for c in cells)
        table.add_row(method, *shown)
    Console().print(table)
    training, chosen = lens.training, lens.trace["chosen"]
    typer.echo(
        f"Chosen: {lens.name} (R2 {chosen['r2']:.3f}), fitted on {training['n_train']} questions and chosen on "
        f"{training['n_validation']}. The scores above (with 95 % intervals) flatter it; measure it with `coral eval`."
    )
    if chosen["gamma"] == 0:
        typer.echo(NOTHING[lens.rule])
    print_flatness(lens)
    if curve := lens.trace.get("learning_curve"):
        print_curve(curve)


def print_flatness(lens: Lens) -> None:
    """Say how many layers would have done as well."""
    tried, good = lens.trace["layers"], lens.trace["as_good"]
    shown = ", ".join(map(str, good))
    typer.echo(f"{len(good)} of {len(tried)} layers tried are within one standard error of the best (Brier): {shown}.")


def print_curve(curve: dict[str, object]) -> None:
    """Print the scores at each number of training questions."""
    table = Table("training questions", *COLUMNS.values(), box=None)
    for point in curve["points"]:  # type: ignore[attr-defined]
        table.add_row(str(point["questions"]), *(f"{100 * point[m]:.1f}" for m in COLUMNS))
    Console().print(table)
    typer.echo(f"{curve['enough']} training questions would have been enough: more gain less than a standard error.")


def show_run(run: Run, folder: Path | None, *, again: bool = False) -> None:
    """Print the results of a run, and if it has a folder, write what its confidence is worth and its report.

    `again`: findings that are there already stay as they are.
    """
    table = results_table(run)
    console = Console()
    console.print(terminal(table), width=None if console.is_terminal else 100)
    if folder:
        findings = folder / FOLDER / "confidence"
        if not (again and findings.exists()):
            write_findings(confidence_findings(run), findings)
        typer.echo(f"Report: {write_report(run, folder, table=table)}")


def print_comparison(a: Run, b: Run, folder: Path) -> None:
    """Compare two runs, and print what changed from the first to the second."""
    page = write_comparison(a, b, folder)
    for test in read_json(folder / "comparison.json")["tests"]:
        table = Table(f"{test['task']} ({test['n_shared']:,} shared)", "accuracy", "ECE", "Brier", box=None)
        for c in test["comparisons"]:
            cells = [c["differences"][m] for m in ("accuracy", "ece", "brier")]
            shown = [f"{percent(d['value'], sign=True)} ({percent(d['low'])} to {percent(d['high'])})" for d in cells]
            names = [c["method"].removeprefix("B: "), c["against"].removeprefix("A: ")]
            table.add_row(names[0] if names[0] == names[1] else f"{c['method']} − {c['against']}", *shown)
        Console().print(table)
    typer.echo(f"B minus A, x 100, with paired 95 % intervals.\nReport: {page}")


def print_plan(record: dict[str, Any]) -> None:
    """Print which questions a study trains on and tests on, and how many were dropped because they would leak."""
    training = Table("training", "dropped", "questions", "of", box=None)
    for name, about in record["mixtures"].items():
        for i, (source, n) in enumerate(about["questions"].items()):
            training.add_row(*(("", "") if i else (name, f"{about['n_dropped']:,}")), f"{n:,}", source)
    tests = Table("test", "shots", "questions", "left out", box=None)
    for name, about in record["tests"].items():
        tests.add_row(name, str(about["shots"]), f"{about['questions']:,}", f"{about['n_left_out']:,}")
    console = Console()
    console.print(training)
    console.print(tests)
    typer.echo("Dropped: a test set holds them too. Left out: a prompt shows them as worked examples.")


def print_study(page: Path) -> None:
    """Print what each method gained on average, and where the report is."""
    table = Table("trained on", "tests", "method", "accuracy", "ECE", box=None)
    for one in read_json(page.parent / "tables.json")["improvements"]:
        gains = [f"{percent(one['mean'][m], sign=True)} %" if m in one["mean"] else "n/a" for m in ("accuracy", "ece")]
        mark = "" if one["ece_ranks"] else " (too few questions)"
        table.add_row(one["mixture"], f"{one['kind']}, {one['n_cells']}", one["method"], gains[0], gains[1] + mark)
    Console().print(table)
    typer.echo(f"Mean relative improvement on the unsteered model with the same prompts (few-shot).\nReport: {page}")


def print_quality(quality: dict[str, Any]) -> None:
    """Print how good autoencoders are on states that they were not trained on."""
    head = f"{'':<6}{'features':>9}{'L0':>8}{'explained':>11}{'raw':>8}{'dead':>8}   loss: clean, patched, zeroed; recovered"
    typer.echo(head)
    for name, found in quality.items():
        loss = found["loss"]
        shown = (
            f"{loss['clean']:.3f}, {loss['patched']:.3f}, {loss['zeroed']:.3f}; {loss['share']:.1%}" if loss else "-"
        )
        typer.echo(
            f"{name:<6}{found['n_features']:>9}{found['l0']:>8.1f}{found['explained']:>11.1%}{found['explained_raw']:>8.1%}"
            f"{found['dead']:>8.1%}   {shown}"
        )
    n = next(iter(quality.values()))
    typer.echo(
        f"Trained on {n['about']['steps']['states']:,} states; measured on {n['n_states']:,} held-out states and "
        f"{n['loss'].get('n_questions', 0)} held-out questions; {n['n_massive']:,} held-out attention sinks stay as they are."
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
        for metric, found in group.items():
            mean, (first, median, third) = found["mean"], found["quartiles"]
            typer.echo(
                f"  {found['n_features']} by {name}, {metric}: mean {mean['value']:+.2e} [{mean['low']:+.2e}, "
                f"{mean['high']:+.2e}], quartiles {first:+.2e}, {median:+.2e}, {third:+.2e}, largest {found['largest']:.1e}"
            )
    for name, found in record.get("against random", {}).items():
        ece = found["ece"]
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
