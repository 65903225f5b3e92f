"""The command that serves lenses over HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from coral_lens.cli.options import OtherModelChoice, flat
from coral_lens.errors import need
from coral_lens.serve.settings import Address, Answering, Batching, Limits, ServeSettings

app = typer.Typer()


@app.command()
@flat
def serve(
    lens: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FOLDER, or a folder or hub id (owner/name@revision), whose last part is then its name; give several "
            "lenses of one model to serve them together. By default `general`, which ships with the package."
        ),
    ] = None,
    *,
    address: Address,
    answering: Answering,
    batching: Batching,
    limits: Limits,
    model: OtherModelChoice,
) -> None:
    """Serve lenses over HTTP, in our own format and in those of OpenAI's and TypeSafe's clients.

    Its address is also that of a page to try it. Only this machine can reach it unless --host says otherwise. SIGTERM and
    Ctrl-C end it when what waits is answered.
    Example: `coral serve`, or `coral serve --lens my-lens`, then open http://127.0.0.1:8000
    """
    need("serve", by="coral serve")
    settings = ServeSettings(address=address, limits=limits, batching=batching, answering=answering)
    _ = address.key  # a key that is missing is said before a model is loaded
    from coral_lens.serve.lenses import open_lenses
    from coral_lens.serve.server import LensServer

    lenses = open_lenses(lens or ["general"])
    loaded = model.opener(next(iter(lenses)).lens.model)()
    lenses = lenses.settled(lambda lens: model.settled(lens, lambda: loaded))
    names = ", ".join(lenses.by_name)
    LensServer(loaded, lenses, settings).run(lambda address: typer.echo(f"{address} serves {names}"))
