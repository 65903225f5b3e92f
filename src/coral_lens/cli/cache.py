"""`coral cache`: what is kept between runs, where, how large it is, and how to be rid of it."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from coral_lens.errors import CoralError


class ListsByDefault(TyperGroup):
    """`coral cache` without a word behind it is `coral cache list`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["list"])


app = typer.Typer(cls=ListsByDefault)


@app.callback()
def cache() -> None:
    """List what is kept between runs, where and how large it is, or remove it.

    Converted models, fetched data, the index of tasks and timings are kept in `$CORAL_CACHE`, else in `coral-lens` in your
    cache folder (`$XDG_CACHE_HOME`, else `~/.cache`). All of it can be made again. What a command is given as `--out` is
    never there. Example: `coral cache`
    """


@app.command(name="list")
def list_kept() -> None:
    """List what is kept between runs, with sizes and places; `coral cache` alone does the same.

    Example: `coral cache list`
    """
    from coral_lens.data.assets import cache_dir
    from coral_lens.data.cache import elsewhere, kept
    from coral_lens.storage.files import size_of, size_text

    parts = kept()
    typer.echo(f"{cache_dir()}: {size_text(sum(p.n_bytes for p in parts)) if parts else 'nothing is kept here yet'}")
    for part in parts:
        typer.echo(f"  {part.name:<11}{size_text(part.n_bytes):>9}  {part.what}")
    if parts:
        typer.echo("`coral cache clear` removes it, `coral cache clear NAME` a part of it.")
    for what, path in elsewhere().items():
        typer.echo(f"Elsewhere, and never removed here: {what}, {size_text(size_of(path))} in {path}")


@app.command()
def clear(
    name: Annotated[
        list[str] | None, typer.Argument(help="Parts to remove, as `coral cache` lists them; by default all.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove what is kept between runs, after a question; only what coral-lens itself wrote there.

    Example: `coral cache clear`, or `coral cache clear models --yes`
    """
    from coral_lens.data.assets import cache_dir
    from coral_lens.data.cache import named, remove
    from coral_lens.storage.files import size_text

    parts = named(name or [])
    if not parts:
        return typer.echo(f"Nothing to remove in {cache_dir()}.")
    what = f"{', '.join(p.name for p in parts)} ({size_text(sum(p.n_bytes for p in parts))}) in {cache_dir()}"
    if not yes and not can_ask():
        raise CoralError(f"Nothing was removed, because nobody can be asked here: add --yes to remove {what}.")
    if not yes and not typer.confirm(f"Remove {what}?"):
        return typer.echo("Nothing was removed.")
    remove(parts)
    typer.echo(f"Removed {what}.")


def can_ask() -> bool:
    """Whether somebody sits at a terminal."""
    return sys.stdin.isatty()
