"""The `coral` command: argument parsing and printing only. Everything heavy is imported by the command that needs it.

Each file here is a group of commands. A new group is a new file with `app = typer.Typer()` and one line below: without a
name its commands stand at the top (`coral fit`), with one they stand under it (`coral sae train`).
"""

from __future__ import annotations

import errno
import sys
import warnings
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from coral_lens.cli import analyse, cache, check, evaluate, fit, sae, study
from coral_lens.errors import CoralError

PANELS = {
    "First steps": "demo tasks show doctor assets cache",
    "A lens": "fit eval predict calibrate push",
    "Experiments": "run baseline report lm-eval",
    "Inside a model": "extract analyse sae",
}
"""The groups of `coral --help`, in its order, and the commands of each."""

INTERRUPTED = "Interrupted. Finished work is kept; the same command goes on where it was."


class Commands(TyperGroup):
    """The commands, with Ctrl-C answered like every other end: typer itself would leave without a word."""

    def main(self, *args: Any, **settings: Any) -> Any:
        for panel, names in PANELS.items():
            for name in names.split():
                self.commands[name].rich_help_panel = panel  # type: ignore[attr-defined]
        show_flags(self)
        return super().main(*args, **settings)

    def list_commands(self, ctx: Any) -> list[str]:
        grouped = [name for names in PANELS.values() for name in names.split()]
        return [*grouped, *(name for name in super().list_commands(ctx) if name not in grouped)]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise CoralError(INTERRUPTED) from None


def show_flags(command: Any) -> None:
    """Have the help of a command, and of those below it, show a flag as a flag: typer writes `<bool>` behind it."""
    for option in command.get_params(command.context_class(command)):
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        show_flags(inner)


def show_version(asked: bool) -> bool:
    """Print the version and stop, if that is asked."""
    if asked:
        typer.echo(f"coral-lens {version('coral-lens')}")
        raise typer.Exit
    return asked


app = typer.Typer(
    name="coral",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Steer and calibrate a frozen language model's answers to multiple-choice questions. Start with `coral demo`.",
)
app.add_typer(fit.app)
app.add_typer(evaluate.app)
app.add_typer(study.app)
app.add_typer(analyse.app, name="analyse")
app.add_typer(check.app)
app.add_typer(sae.app, name="sae")
app.add_typer(cache.app, name="cache")


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Stand before every command: what is the same for all of them."""


def main() -> None:
    """Run the command line; a user's mistake is one sentence and exit code 2."""
    warnings.showwarning = lambda message, *_: typer.secho(f"coral: {message}", fg="yellow", err=True)
    try:
        app()
    except CoralError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail(INTERRUPTED)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        fail("No space left on the disk. Finished work is kept; make room and run the same command again.")


def fail(message: str) -> None:
    """Print one sentence and exit with code 2."""
    typer.secho(f"coral: {message}", fg="red", err=True)
    sys.exit(2)
