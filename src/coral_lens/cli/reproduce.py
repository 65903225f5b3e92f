"""The command that reproduces the paper on a model of one's own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from coral_lens.cli.options import Machine, beside, flat, folder_of_data, helpers_on
from coral_lens.errors import need
from coral_lens.scale.settings import RaySettings
from coral_lens.study.reproduce.settings import Reproducing

if TYPE_CHECKING:
    from coral_lens.study.reproduce.run import Undertaking

app = typer.Typer()


@app.command()
@flat
def reproduce(*, reproducing: Reproducing, spread: RaySettings, machine: Machine) -> None:
    """Reproduce the paper on your model: every table and figure on one page, ours beside the paper's, a sentence to each claim.

    Parts run one after another; the same command goes on where it was stopped, and tries a part that failed once more. `--check`
    says beforehand what each takes. Example: `coral reproduce --model smollm2 --data DIR`
    """
    from coral_lens.study.reproduce.run import reproduce as run

    if reproducing.check:
        return print_plans(undertaking_of(reproducing, machine))
    need("report", by="coral reproduce")
    spread.refuse_without_ray()
    with helpers_on(spread, machine) as helpers:
        undertaking = replace(undertaking_of(reproducing, machine), helpers=helpers)
        page = run(undertaking, tell=lambda said: typer.echo(said, err=True))
    typer.echo(f"Page: {page}")


def undertaking_of(reproducing: Reproducing, machine: Machine) -> Undertaking:
    """Return what is to be done, from the command line."""
    from coral_lens.lens.training_data import usable_device
    from coral_lens.storage.progress import shown
    from coral_lens.study.folders import Folders
    from coral_lens.study.reproduce.run import Undertaking, parts_of
    from coral_lens.study.reproduce.scale import SCALES, limited

    scale = SCALES[reproducing.scale]
    data = folder_of_data(reproducing.data)
    work = reproducing.work or beside(reproducing.out)
    return Undertaking(
        models=tuple(dict.fromkeys(reproducing.models)),
        scale=limited(scale, reproducing.limit) if reproducing.limit else scale,
        folders=Folders(
            reproducing.out, work, data=data, dtype=machine.dtype, adapter=machine.adapter, mixed=reproducing.mixed
        ),
        parts=parts_of(reproducing.parts),
        open_model=machine.open,
        bar=shown,
        device=usable_device(machine.device),
        anyway=reproducing.anyway,
    )


def print_plans(undertaking: Undertaking) -> None:
    """Print what every part would take, model by model; no model is loaded."""
    from rich.table import Table

    from coral_lens.report.terminal import plain_console
    from coral_lens.storage.escape import for_terminal
    from coral_lens.storage.files import size_text
    from coral_lens.storage.progress import duration
    from coral_lens.study.reproduce.parts import PARTS
    from coral_lens.study.reproduce.plan import plan_parts
    from coral_lens.study.reproduce.run import records_of, size_complaint

    for model in undertaking.models:
        typer.echo(f"reading the questions for {model} ...", err=True)
        plans = plan_parts(undertaking.place(model), undertaking.wanted)
        done = records_of(undertaking, model)
        typer.echo(for_terminal(f"{model}, scale {undertaking.scale.name}:"))
        table = Table("part", "in the paper", "questions", "passes", "time, about", "states", box=None)
        for plan in plans:
            rest = ("done", "") if plan.name in done else (duration(plan.seconds), size_text(plan.n_bytes))
            table.add_row(plan.name, PARTS[plan.name].where, f"{plan.questions:,}", f"{plan.passes:.1f}", *rest)
        plain_console().print(table)
        left = [plan.seconds for plan in plans if plan.name not in done]
        if left:
            typer.echo(
                f"What is left: about {duration(sum(left))} if this machine does nothing else, reckoned from how fast it "
                "multiplies."
            )
        else:
            typer.echo("All of it is done.")
        if complaint := size_complaint(model, undertaking):
            typer.echo(for_terminal(f"It would be refused: {complaint}"))
