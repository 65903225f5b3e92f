"""Commands of whole experiments: run, report, demo."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from coral_lens.cli.options import DataDir, Machine, beside, flat, folder_of_data
from coral_lens.errors import CoralError

app = typer.Typer()


@app.command()
@flat
def run(
    study: Annotated[Path, typer.Argument(help="A study as TOML; ready-made ones are in configs/.")],
    out: Annotated[Path | None, typer.Option(help="Folder for results. Default: the study's name.")] = None,
    work: Annotated[
        Path | None,
        typer.Option(help="Folder for states, lenses and predictions, which studies may share. Default: OUT.work."),
    ] = None,
    data: DataDir = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say which questions it would use and stop before a model is loaded.")
    ] = False,
    *,
    machine: Machine,
) -> None:
    """Walk the whole line for the models, mixtures, tests and methods of a study; go on where it was if it was stopped.

    Example: `coral run configs/probe1-small.toml --data DIR`
    """
    from coral_lens.places import Places
    from coral_lens.printing import print_plan, print_study
    from coral_lens.progress import shown
    from coral_lens.running import prepare_study, run_study
    from coral_lens.study import load_study

    data, asked = folder_of_data(data), load_study(study)
    target = out or Path(asked.name)
    places = Places(out=target, work=work or beside(target), data=data, dtype=machine.dtype)
    typer.echo("reading questions ...", err=True)
    prepared = prepare_study(asked, data)
    print_plan(prepared.record())
    if not check:
        print_study(run_study(prepared, places, open_model=machine.open, bar=shown))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder made by `coral eval --out` or `coral demo`.")],
    other: Annotated[Path | None, typer.Argument(help="A second run: compare the two, question by question.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for a comparison; default: coral-comparison.")] = None,
) -> None:
    """Make report.html and the tables of a run again, or compare two runs.

    Whatever lies under the run's `analysis/` (see `coral analyse`) is gathered.
    Example: `coral report run`, or `coral report run-a run-b --out comparison`
    """
    from coral_lens.printing import print_comparison, show_run
    from coral_lens.runs import load_run

    if other:
        return print_comparison(load_run(run), load_run(other), out or Path("coral-comparison"))
    if out:
        raise CoralError("--out is for a comparison of two runs; the report of one is written into its own folder.")
    show_run(load_run(run), run, again=True)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the lens, the predictions and the report.")] = Path(
        "coral-demo"
    ),
) -> None:
    """Fit a lens on real questions with a real model, and measure it on held-out questions and on tasks it never saw.

    Takes a few minutes on two cores; a second run reuses what is there. Example: `coral demo`
    """
    from coral_lens.assets import embedded_data, embedded_model, fetch_assets
    from coral_lens.demo import run_demo
    from coral_lens.printing import show_run

    if embedded_model() is None or embedded_data() is None:
        if not sys.stdin.isatty() or not typer.confirm(
            "The demo's model and data are not here. Fetch them (180 MB)?", default=True
        ):
            raise CoralError("The demo's model and data are not installed; run `coral assets` first.")
        fetch_assets(lambda message: typer.echo(message, err=True))
    show_run(run_demo(out), out)
