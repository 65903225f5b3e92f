"""Commands that make lenses: extract, fit, calibrate, push."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from coral_lens.cli.options import (
    Asking,
    LensModel,
    Machine,
    ModelName,
    Styling,
    beside,
    flat,
    parse_layers,
    remove_work,
)

app = typer.Typer()


@app.command()
@flat
def extract(
    source: Annotated[list[str], typer.Argument(help="TASK[:SPLIT], or a .jsonl or .csv file of questions.")],
    out: Annotated[Path, typer.Option(help="Folder for the activation store.")],
    model: ModelName = "smollm2",
    layers: Annotated[str | None, typer.Option(help="Layers to keep, e.g. `12-20` or `0,16`. Default: all.")] = None,
    heads: Annotated[
        str | None, typer.Option(help="Keep the heads of these blocks too, e.g. `1-30`, or `all`. Default: none.")
    ] = None,
    *,
    styling: Styling,
    asking: Asking,
    machine: Machine,
) -> None:
    """Score questions and keep the pooled hidden states of each option.

    Example: `coral extract commonsense_qa_cloze:validation --out states/csqa --layers 12-20`
    """
    from coral_lens.engine.extract import Extraction, all_blocks, all_layers, head_outputs
    from coral_lens.engine.extract import extract as run
    from coral_lens.progress import questions_bar

    style, wanted, loaded = styling.made(), parse_layers(layers), machine.opener(model)
    blocks = () if heads == "all" else parse_layers(heads, "--heads") or ()
    questions = asking.gather(source, chat=loaded if style.chat else None)
    chosen = wanted or all_layers(loaded())
    blocks = all_blocks(loaded()) if heads == "all" else blocks
    what = Extraction(layers=chosen, style=style, readings=head_outputs(loaded(), blocks) if blocks else None)
    with questions_bar("extracting", len(questions)) as advance:
        run(loaded(), questions, out, what=what, progress=advance)
    size = sum(f.stat().st_size for f in out.iterdir()) / 2**20
    kept = f"{len(chosen)} layers" + (f", the heads of {len(blocks)} blocks" if blocks else "")
    typer.echo(f"{len(questions)} questions, {kept}, {size:,.0f} MiB in {out}")


@app.command()
@flat
def fit(
    train: Annotated[list[str], typer.Option("--train", help="TASK[:SPLIT] or a file; may be given several times.")],
    out: Annotated[Path, typer.Option(help="Folder for the lens. Activations are kept beside it, in OUT.work.")],
    model: ModelName = "smollm2",
    lens: Annotated[
        str,
        typer.Option(
            help="`listwise`, `ensemble`, `listwise-mlp`: beyond the paper. `mlp`: the paper's; `ridge`, `linear`: its simpler "
            "forms. `auto`: the best by cross-validation."
        ),
    ] = "listwise",
    base: Annotated[
        str, typer.Option(help="Base score: `sum`, `token` (mean per token) or `char` (acc_norm).")
    ] = "token",
    criterion: Annotated[str, typer.Option(help="Validation metric that chooses layer and gamma.")] = "brier",
    layers: Annotated[str | None, typer.Option(help="Layers to try, e.g. `12-20`. Default: all.")] = None,
    temper: Annotated[
        bool | None,
        typer.Option(
            "--temper/--no-temper", help="Weaken corrections of unlike questions. Default: all but the paper's."
        ),
    ] = None,
    folds: Annotated[int, typer.Option(help="1: one split, as in the paper. More: grouped cross-validation.")] = 1,
    depth: Annotated[int, typer.Option(help="Hidden layers of the network of `mlp`, 1 to 4.")] = 4,
    top_layers: Annotated[int, typer.Option(help="Read so many of the best layers side by side.")] = 1,
    inputs: Annotated[
        str, typer.Option(help="Beyond the states, as in the authors' code: `centred`, `rank`, or `centred,rank`.")
    ] = "",
    scale_base: Annotated[
        bool, typer.Option("--scale-base", help="Start from temperature-scaled probabilities.")
    ] = False,
    then_temperature: Annotated[bool, typer.Option("--then-temperature", help="Temperature after the lens.")] = False,
    learning_curve: Annotated[
        bool, typer.Option("--learning-curve", help="Say how many labelled questions would have been enough.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the split into training and validation, and of networks.")] = 0,
    *,
    styling: Styling,
    asking: Asking,
    machine: Machine,
) -> None:
    """Fit a lens on labelled questions.

    Example: `coral fit --train train.jsonl --out my-lens`, or `coral fit --train commonsense_qa_cloze:validation --out my-lens`
    """
    from coral_lens.cli.printing import print_fit
    from coral_lens.lens.artefact import refuse_other_folder
    from coral_lens.lens.fit import fit as run
    from coral_lens.lens.settings import FitSettings
    from coral_lens.progress import shown

    refuse_other_folder(out)
    work = beside(out)
    settings = FitSettings(
        lens=lens,
        base=base,  # type: ignore[arg-type]
        style=styling.made(),
        criterion=criterion,
        layers=parse_layers(layers),
        folds=folds,
        inputs=tuple(part.strip() for part in inputs.split(",") if part.strip()),
        top_layers=top_layers,
        depth=depth,
        scale_base=scale_base,
        then_temperature=then_temperature,
        temper=temper,
        learning_curve=learning_curve,
        seed=seed,
    )
    loaded = machine.opener(model)
    questions = asking.gather(train, chat=loaded if settings.style.chat else None)
    fitted = run(loaded(), questions, settings, work_dir=work, bar=shown)
    fitted.save(out)
    print_fit(fitted)
    typer.echo(f"Lens in {out}. The activations in {work} make a second fit fast; delete them when you like.")


@app.command()
@flat
def calibrate(
    lens: Annotated[Path, typer.Option(help="Folder of a lens made by `coral fit`; it is written again.")],
    questions: Annotated[list[str], typer.Option(help="TASK[:SPLIT] or a file of labelled questions it has not seen.")],
    coverage: Annotated[float | None, typer.Option(help="Share of prediction sets that hold the right option.")] = 0.9,
    sets: Annotated[str, typer.Option(help="Kind of sets: `lac` (smallest), `aps` or `raps`.")] = "lac",
    risk: Annotated[float | None, typer.Option(help="Abstain so that at most this share of answers is wrong.")] = None,
    model: LensModel = None,
    *,
    asking: Asking,
    machine: Machine,
) -> None:
    """Give a lens prediction sets of a stated coverage, and a rule when to abstain, from questions it has never seen.

    Example: `coral calibrate --lens my-lens --questions held-out.jsonl --coverage 0.9 --risk 0.2`
    """
    from coral_lens.lens.artefact import load_lens
    from coral_lens.lens.calibrate import Guarantees, fresh_of
    from coral_lens.lens.calibrate import calibrate as run
    from coral_lens.progress import questions_bar

    fitted = load_lens(lens)
    wanted, loaded = Guarantees(coverage, sets, risk), machine.opener(model or fitted.model["name"])
    asked = asking.gather(questions, chat=loaded if fitted.style.chat else None)
    fresh_of(fitted, asked)
    work = beside(lens).with_suffix(".calibration")  # in .work are the activations of the fit
    with (
        questions_bar("calibrating", len(asked)) as advance,
        fitted.scored(loaded(), asked, work_dir=work, progress=advance) as store,
    ):
        calibrated, left_out = run(fitted, store, wanted)
    calibrated.save(lens)
    remove_work(work)
    for promise in (calibrated.sets, calibrated.abstention):
        if promise:
            typer.echo(f"{promise}")
    if left_out:
        typer.echo(f"{left_out} questions were left out, because the lens was fitted on them.")


@app.command()
def push(
    lens: Annotated[Path, typer.Argument(help="Folder of a lens.")],
    repo: Annotated[str, typer.Argument(help="Where on the hub, e.g. `me/my-lens`.")],
    public: Annotated[bool, typer.Option("--public", help="Let everybody see it.")] = False,
) -> None:
    """Upload a lens to the Hugging Face hub; others then use it by its id.

    Names of local folders stay here, but for their last part; the card is sent as it stands in the folder.
    Example: `coral push my-lens me/my-lens`, then `coral predict --lens me/my-lens ...`
    """
    from coral_lens.lens.artefact import load_lens
    from coral_lens.lens.publish import push_to_hub

    with TemporaryDirectory(prefix="coral-") as temporary:
        sent = Path(temporary) / "lens"
        load_lens(lens).public().save(sent)
        if (card := lens / "README.md").exists():
            shutil.copy(card, sent)
        typer.echo(push_to_hub(sent, repo, private=not public))
