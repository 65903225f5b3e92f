"""Commands that make lenses: extract, fit, calibrate, push."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coral_lens.cli.options import Asking, LensModelChoice, ModelChoice, beside, flat, refuse_unwritable, work_for
from coral_lens.data.settings import Style
from coral_lens.lens.settings import FitSettings, Guarantees
from coral_lens.storage.settings import Layers, Option, Settings, parse_layers

if TYPE_CHECKING:
    from coral_lens.engine.extract import Extraction
    from coral_lens.engine.model import Model

app = typer.Typer()


def parse_blocks(text: str, option: str) -> tuple[int, ...] | None:
    """Return the blocks of `1-30`, or None for `all`."""
    return None if text == "all" else parse_layers(text, option)


@dataclass(frozen=True)
class KeptStates(Settings):
    """What is kept of each option."""

    layers: Layers = None
    """Layers to keep, such as `12-20` or `0,16`; by default all."""
    heads: Annotated[tuple[int, ...] | None, Option(read=parse_blocks)] = ()
    """Keep the heads of these blocks too, such as `1-30`, or `all`; by default none."""
    style: Style = Style()  # noqa: RUF009  (frozen)
    """How questions without a template of their own are asked."""

    def extraction(self, model: Model) -> Extraction:
        """Return what is extracted of a model."""
        from coral_lens.engine.extract import Extraction, all_blocks, all_layers, head_outputs, refuse_layers

        refuse_layers(model, self.layers or ())
        blocks = all_blocks(model) if self.heads is None else self.heads
        readings = head_outputs(model, blocks) if blocks else None
        return Extraction(self.layers or all_layers(model), self.style, readings=readings)


@app.command()
@flat
def extract(
    source: Annotated[
        list[str], typer.Argument(help="TASK[:SPLIT], or a file of questions (.jsonl, .csv, .parquet, ...).")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the activation store.")],
    *,
    kept: KeptStates,
    asking: Asking,
    model: ModelChoice,
) -> None:
    """Score questions and keep the pooled hidden states of each option.

    Example: `coral extract commonsense_qa_cloze:validation --out states/csqa --layers 12-20`
    """
    from coral_lens.engine.extract import extract as run
    from coral_lens.storage.progress import questions_bar

    loaded = model.opener(folder=out)
    questions = asking.gather(source, chat=loaded if kept.style.chat else None)
    extraction = kept.extraction(loaded())
    with questions_bar("extracting", len(questions)) as advance:
        store = run(loaded(), questions, out, extraction=extraction, progress=advance)
    size = sum(f.stat().st_size for f in out.iterdir()) / 2**20
    parts = f"{len(extraction.layers)} layers"
    if extraction.readings:
        parts += f", the heads of {len(extraction.readings.about['heads'])} blocks"
    typer.echo(f"{len(store.questions)} questions, {parts}, {size:,.0f} MiB in {out}")


@app.command()
@flat
def fit(
    train: Annotated[list[str], typer.Option("--train", help="TASK[:SPLIT] or a file; may be given several times.")],
    out: Annotated[Path, typer.Option(help="Folder for the lens. Activations are kept beside it, in OUT.work.")],
    *,
    settings: FitSettings,
    asking: Asking,
    model: ModelChoice,
) -> None:
    """Fit a lens on labelled questions: learn from the model's hidden states where its probabilities are wrong.

    Layer and strength are chosen on a fifth of the questions, which nothing is fitted on. Hundreds of questions are needed,
    better thousands; the same command goes on where it was stopped.
    Example: `coral fit --train train.jsonl --out my-lens`, or `coral fit --train commonsense_qa_cloze:validation --out my-lens`
    """
    from coral_lens.cli.printing import print_fit
    from coral_lens.lens.fit import check_questions
    from coral_lens.lens.fit import fit as run
    from coral_lens.lens.folder import refuse_other_folder
    from coral_lens.storage.progress import shown

    refuse_other_folder(out)
    work = beside(out)
    loaded = model.opener(folder=work)
    questions = asking.gather(train, chat=loaded if settings.style.chat else None, own_shots=True)
    check_questions(questions)
    fitted = run(loaded(), questions, settings, work_dir=work, bar=shown)
    fitted.save(out)
    print_fit(fitted)
    typer.echo(f"Lens in {out}. The activations in {work} make a second fit fast; delete them when you like.")


@app.command()
@flat
def calibrate(
    lens: Annotated[Path, typer.Option(help="Folder of a lens made by `coral fit`; it is written again.")],
    questions: Annotated[list[str], typer.Option(help="TASK[:SPLIT] or a file of labelled questions it has not seen.")],
    *,
    guarantees: Guarantees,
    asking: Asking,
    model: LensModelChoice,
) -> None:
    """Give a lens prediction sets of a stated coverage, and a rule when to abstain, from questions it has never seen.

    Example: `coral calibrate --lens my-lens --questions held-out.jsonl --coverage 0.9 --risk 0.2`
    """
    from coral_lens.lens.calibrate import calibrate_on, fresh_of
    from coral_lens.lens.folder import load_lens
    from coral_lens.storage.progress import questions_bar

    refuse_unwritable(lens)
    fitted = load_lens(lens)
    loaded = model.opener(fitted.model)
    labelled = asking.gather(questions, chat=loaded if fitted.style.chat else None)
    fresh_of(fitted, labelled)
    target = beside(lens).with_suffix(".calibration")  # in .work are the activations of the fit
    with work_for(target, fitted, loaded(), labelled) as work:
        with (
            questions_bar("calibrating", len(labelled)) as advance,
            fitted.scored(loaded(), labelled, work_dir=work, progress=advance) as store,
        ):
            calibrated, left_out = calibrate_on(fitted, store, guarantees)
        calibrated.save(lens)
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
    from coral_lens.lens.folder import load_lens
    from coral_lens.lens.publish import push_to_hub
    from coral_lens.storage.temporary import temporary_folder

    with temporary_folder() as temporary:
        sent = temporary / "lens"
        load_lens(lens).public().save(sent)
        if (card := lens / "README.md").exists():
            shutil.copy(card, sent)
        typer.echo(push_to_hub(sent, repo, private=not public))
