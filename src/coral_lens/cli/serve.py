"""The command that serves lenses over HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from coral_lens.cli.options import OtherModelChoice, flat
from coral_lens.errors import CoralError, need
from coral_lens.serve.settings import Address, Answering, Batching, Limits, ServeSettings

app = typer.Typer()
NO_LENS = (
    "There is no lens to serve: fit one on your labelled questions (`coral fit --train questions.jsonl --out my-lens`), then "
    "run `coral serve --lens my-lens`."
)


@app.command()
@flat
def serve(
    lens: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FOLDER, or a folder or hub id (owner/name@revision), whose last part is then its name; give several "
            "lenses of one model to serve them together."
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

    Only this machine can reach it unless --host says otherwise. SIGTERM and Ctrl-C end it when what waits is answered.
    Example: `coral serve --lens my-lens`, then `curl http://127.0.0.1:8000/v1/models`
    """
    need("serve", by="coral serve")
    if not lens:
        raise CoralError(NO_LENS)
    settings = ServeSettings(address=address, limits=limits, batching=batching, answering=answering)
    _ = address.key  # a key that is missing is said before a model is loaded
    from coral_lens.serve.lenses import open_lenses
    from coral_lens.serve.server import LensServer

    lenses = open_lenses(lens)
    loaded = model.opener(next(iter(lenses)).lens.model)()
    lenses = lenses.settled(lambda lens: model.settled(lens, lambda: loaded))
    names = ", ".join(lenses.by_name)
    LensServer(loaded, lenses, settings).run(lambda address: typer.echo(f"{address} serves {names}"))
