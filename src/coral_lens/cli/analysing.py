"""`coral analyse`: what a run, or the states behind it, show beyond its table. Each command writes tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def analyse() -> None:
    """Look closer: tables and figures that `coral report` gathers in a run's page."""


@app.command()
def confidence(
    run: Annotated[Path, typer.Argument(help="Folder made by `coral eval --out`, `coral demo` or a study.")],
    method: Annotated[
        list[str] | None, typer.Option("--method", help="Draw these; default: base, temperature and the lens.")
    ] = None,
    bins: Annotated[int, typer.Option(min=2, max=100, help="Bins of the reliability diagrams.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Folder; default: analysis/confidence in the run's.")] = None,
) -> None:
    """Reliability in bins of both kinds, risk against coverage, confidence before and after, subjects, leaning to positions.

    Needs predictions only: lm-eval's logs will do (`coral eval --lm-eval-samples`). Example: `coral analyse confidence run`
    """
    from coral_lens.report.confidence_figures import confidence_findings
    from coral_lens.report.findings import FOLDER, write_findings
    from coral_lens.runs import load_run

    target = out or run / FOLDER / "confidence"
    names = write_findings(confidence_findings(load_run(run), methods=method or (), n_bins=bins), target)
    for name in names:
        typer.echo(f"{target / name}.csv .json .svg .png")
    typer.echo(f"`coral report {run}` puts them into its page." if not out else f"{len(names)} findings.")
