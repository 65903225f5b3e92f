"""Commands of sparse autoencoders: sae train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coral_lens.cli.options import Asking, Machine, ModelName, Styling, flat
from coral_lens.errors import CoralError

app = typer.Typer(
    no_args_is_help=True, help="Sparse autoencoders: train them, select features, ablate them, steer by them."
)


@app.command()
@flat
def train(
    source: Annotated[
        list[str], typer.Argument(help="TASK[:SPLIT] or files of questions whose token states are used.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the autoencoders (OUT/4x ...), states and checkpoints.")],
    layer: Annotated[int, typer.Option(help="The layer whose residual stream is taken apart.")],
    model: ModelName = "smollm2",
    expansion: Annotated[
        list[int] | None, typer.Option(help="Features per dimension, trained in one pass. Default: 4, 8, 16.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="States at least, if the questions have so many; 0: all.")] = 500_000,
    where: Annotated[str, typer.Option(help="Tokens to use: `all`, `answer` or `context`.")] = "all",
    penalty: Annotated[float, typer.Option(help="The paper's lambda, of z-scored states.")] = 3.0,
    top_k: Annotated[int, typer.Option(help="Keep so many features of a state instead of a penalty.")] = 0,
    learning_rate: Annotated[float, typer.Option(help="After warm-up.")] = 1e-3,
    batch_size: Annotated[int, typer.Option(help="States in a step.")] = 512,
    epochs: Annotated[int, typer.Option(help="Passes over the states.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the draw of questions, the first weights and the order.")] = 0,
    *,
    styling: Styling,
    asking: Asking,
    machine: Machine,
) -> None:
    """Train sparse autoencoders on the token states of a layer, and say how good they are on states held out.

    Example: `coral sae train commonsense_qa_cloze:train --data DIR --layer 16 --out sae`
    """
    from coral_lens.printing import print_quality
    from coral_lens.progress import shown
    from coral_lens.readers import TOKENS
    from coral_lens.sae.tokens import Sampling
    from coral_lens.sae.training import TrainingSettings
    from coral_lens.sae.workflow import train_on_tokens

    if where not in TOKENS:
        raise CoralError(f"--where must be one of {', '.join(TOKENS)}. Got {where!r} instead.")
    settings = TrainingSettings(
        expansions=tuple(expansion or (4, 8, 16)),
        penalty=penalty,
        k=top_k,
        learning_rate=learning_rate,
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
    )
    opened = machine.opener(model)
    questions = asking.gather(source, chat=opened if styling.apply_chat_template else None)
    sampling = Sampling(layer, tokens, where, styling.made(), seed=seed)
    print_quality(train_on_tokens(opened(), questions, out, how=(sampling, settings), bar=shown))
    typer.echo(f"Autoencoders in {out}, in SAELens' layout.")
