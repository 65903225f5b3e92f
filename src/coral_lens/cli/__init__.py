"""The `coral` command: argument parsing and printing only. Everything heavy is imported by the command that needs it.

Each file here is a group of commands. A new group is a new file with `app = typer.Typer()` and one line below: without a
name its commands stand at the top (`coral fit`), with one they stand under it (`coral sae train`).
"""

from __future__ import annotations

import errno
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from coral_lens.cli import analyse, ask, audit, cache, check, evaluate, extract, fit, reproduce, sae, serve, study
from coral_lens.cli.options import SOURCES
from coral_lens.errors import CoralError
from coral_lens.storage.escape import for_terminal

PANELS = {
    "First steps": "demo tasks show doctor assets cache",
    "A lens": "fit eval predict ask adapt calibrate serve push",
    "Anyone's probabilities": "audit",
    "Experiments": "run reproduce baseline report lm-eval",
    "Inside a model": "extract analyse sae",
}
"""The groups of `coral --help`, in its order, and the commands of each."""

MOST_SHOWN = 200
"""Characters of a file's name that a complaint repeats."""
HELP = ["-h", "--help"]
USAGE: Any = typer.BadParameter.__base__
"""What a wrong command line raises; where its class is defined depends on the version of typer."""
INTERRUPTED = "Interrupted. Finished work is kept; the same command goes on where it was."


class Stopped(KeyboardInterrupt):
    """A signal that ends a program: it unwinds like Ctrl-C, so that temporary folders are removed."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class InterruptionError(CoralError):
    """The end of a command that was stopped from outside."""

    def __init__(self, cause: KeyboardInterrupt) -> None:
        super().__init__(INTERRUPTED)
        self.code = 128 + (cause.number if isinstance(cause, Stopped) else signal.SIGINT)


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
        except KeyboardInterrupt as cause:
            raise InterruptionError(cause) from None
        except USAGE as error:
            name_sources(error)
            raise
        except OSError as error:
            raise disk_complaint(error) from error


def name_sources(error: Any) -> None:
    """Have a complaint say how questions are given to this command: `fit` calls it --train, `eval` --task, others otherwise."""
    parameters = error.ctx.command.params if error.ctx else ()
    options = [p.opts[0] for p in parameters if p.name in (*SOURCES, "store") and p.opts[0].startswith("--")]
    wrong = getattr(error, "option_name", "").removeprefix("--").replace("-", "_")
    if options and wrong in SOURCES:
        error.possibilities = options
    elif options and "unexpected extra argument" in error.message:
        error.message += f". Give questions or states as {' or '.join(options)}."


def disk_complaint(error: OSError) -> Exception:
    """Return one sentence for what a disk or the name of a file refuses, and any other error as it is."""
    if error.errno == errno.ENOSPC:
        return CoralError("No space left on the disk. Finished work is kept; make room and run the same command again.")
    if error.filename is None or error.strerror is None:
        return error
    name = str(error.filename)
    shown = name if len(name) <= MOST_SHOWN else f"{name[:MOST_SHOWN]}..."
    return CoralError(f"{shown} cannot be used: {error.strerror}. Check the name and its permissions.")


def show_flags(command: Any) -> None:
    """Have the help of a command, and of those below it, show a flag as a flag: typer writes `<bool>` behind it."""
    for option in command.get_params(command.context_class(command, help_option_names=HELP)):
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
    context_settings={"help_option_names": HELP},
    help="Steer and calibrate a frozen language model's answers to multiple-choice questions. Start with `coral demo`.",
)
app.add_typer(extract.app)
app.add_typer(fit.app)
app.add_typer(evaluate.app)
app.add_typer(ask.app)
app.add_typer(audit.app)
app.add_typer(serve.app)
app.add_typer(study.app)
app.add_typer(reproduce.app)
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


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise where the command is, and not end it on the spot; one that is ignored (nohup) stays so."""
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [n for n in (getattr(signal, name) for name in names) if signal.getsignal(n) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # Python lets only the main thread decide about signals

    def stop(number: int, _: Any) -> None:
        raise Stopped(number)

    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def main() -> None:
    """Run the command line; a user's mistake is one sentence and exit code 2, a signal one and 128 and its number."""
    warnings.showwarning = lambda message, *_: typer.secho(
        f"coral: {for_terminal(str(message))}", fg="yellow", err=True
    )
    try:
        with signals_as_exceptions():
            app()
    except InterruptionError as error:
        fail(str(error), code=error.code)
    except CoralError as error:
        fail(str(error))
    except KeyboardInterrupt as cause:
        fail(INTERRUPTED, code=InterruptionError(cause).code)


def fail(message: str, *, code: int = 2) -> None:
    """Print one sentence and exit."""
    typer.secho(f"coral: {for_terminal(message)}", fg="red", err=True)
    sys.exit(code)
