"""Commands that make lenses: fit, adapt, calibrate, push."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coral_lens.cli.ask import gather_open
from coral_lens.cli.options import (
    AnyModelChoice,
    Asking,
    LensModelChoice,
    ModelChoice,
    beside,
    flat,
    refuse_unwritable,
    work_for,
)
from coral_lens.engine.settings import Sampling
from coral_lens.errors import CoralError
from coral_lens.lens.settings import FitSettings, Guarantees

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from jaxtyping import Bool

    from coral_lens.data.open_questions import OpenQuestion
    from coral_lens.engine.model import Model
    from coral_lens.lens.artefact import Lens
    from coral_lens.records import Question

app = typer.Typer()


@app.command()
@flat
def fit(
    out: Annotated[Path, typer.Option(help="Folder for the lens. Activations are kept beside it, in OUT.work.")],
    train: Annotated[
        list[str] | None, typer.Option("--train", help="TASK[:SPLIT] or a file; may be given several times.")
    ] = None,
    open_files: Annotated[
        list[str] | None,
        typer.Option(
            "--open", metavar="SOURCE", help="Instead: a file of questions without options, each with its `answers`."
        ),
    ] = None,
    *,
    settings: FitSettings,
    sampling: Sampling,
    asking: Asking,
    model: ModelChoice,
) -> None:
    """Fit a lens on labelled questions: learn from the model's hidden states where its probabilities are wrong.

    Layer and strength are chosen on a fifth of the questions, which nothing is fitted on. Hundreds of questions are needed,
    better thousands; the same command goes on where it was stopped.
    With `--open` the model writes answers to questions without options, and the lens learns which of them are right.
    Example: `coral fit --train train.jsonl --out my-lens`, or `coral fit --train commonsense_qa_cloze:validation --out my-lens`,
    or `coral fit --open open.jsonl --out my-lens`
    """
    from coral_lens.cli.printing import print_fit
    from coral_lens.lens.fit import check_questions
    from coral_lens.lens.fit import fit as run
    from coral_lens.lens.folder import refuse_other_folder
    from coral_lens.storage.progress import shown

    if bool(train) == bool(open_files):
        raise CoralError("Give --train with questions that have options, or --open with questions that have none.")
    refuse_other_folder(out)
    work = beside(out)
    if open_files:
        fit_on_open(open_files, out, settings=settings, sampling=sampling, asking=asking, model=model)
        return
    if sampling != replace(Sampling(), seed=sampling.seed):
        raise CoralError("How candidates are written is for open questions; give --open, or leave these options out.")
    assert train, "one of the two is given"
    loaded = model.opener(folder=work)
    questions = asking.gather(train, chat=loaded if settings.style.chat else None, own_shots=True)
    check_questions(questions)
    fitted = run(loaded(), questions, settings, work_dir=work, bar=shown)
    fitted.save(out)
    print_fit(fitted)
    typer.echo(f"Lens in {out}. The activations in {work} make a second fit fast; delete them when you like.")


def fit_on_open(
    files: list[str], out: Path, *, settings: FitSettings, sampling: Sampling, asking: Asking, model: ModelChoice
) -> None:
    """Fit a lens on open questions, and on what the model writes to them."""
    from coral_lens.cli.printing import print_fit
    from coral_lens.lens.asking import STATES, check_open_questions, fit_open
    from coral_lens.storage.progress import shown

    work = beside(out)
    loaded = model.opener(folder=work / STATES)
    questions = gather_open(files, asking)
    check_open_questions(questions, settings)
    fitted = fit_open(loaded(), questions, settings, sampling=sampling, work_dir=work, bar=shown)
    fitted.save(out)
    print_fit(fitted)
    typer.echo(f"Lens in {out}, for `coral ask`. What the model wrote is in {work}; delete it when you like.")


def refuse_shipped(lens: Path) -> None:
    """Refuse to write a lens that comes with the package."""
    from coral_lens.lens.publish import SHIPPED

    if str(lens) in SHIPPED and not lens.exists():
        raise CoralError(
            f"The lens {lens} comes with the package and is calibrated already; to make it your own, use `coral adapt --lens "
            f"{lens}`, or calibrate a copy of {SHIPPED[str(lens)]}."
        )


@app.command()
@flat
def calibrate(
    lens: Annotated[Path, typer.Option(help="Folder of a lens made by `coral fit`; it is written again.")],
    questions: Annotated[list[str], typer.Option(help="TASK[:SPLIT] or a file of labelled questions it has not seen.")],
    home: Annotated[
        bool,
        typer.Option(
            "--home",
            help="The questions are of the kind that the lens was fitted on; later commands then need no --home.",
        ),
    ] = False,
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

    refuse_shipped(lens)
    refuse_unwritable(lens)
    fitted = load_lens(lens)
    # what was promised before is replaced
    fitted = replace(fitted, sets=None, abstention=None).at_home() if home else fitted
    loaded = model.opener(fitted.model)
    if fitted.open:
        calibrate_on_open(fitted, loaded(), gather_open(questions, asking), lens, guarantees)
        return
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
    show_promises(calibrated, left_out)


def calibrate_on_open(
    fitted: Lens, model: Model, questions: Sequence[OpenQuestion], folder: Path, guarantees: Guarantees
) -> None:
    """Calibrate a lens for open questions: when to abstain, and which candidates a set holds, with none of them as one more."""
    from coral_lens.lens.asking import remove_work, scored_open
    from coral_lens.lens.calibrate import calibrate_on
    from coral_lens.storage.progress import shown

    unlabelled = [q.id for q in questions if not q.answers]
    if unlabelled:
        raise CoralError(
            f"Question {unlabelled[0]!r} has no answer; to calibrate a lens takes the right answer of each."
        )
    work = beside(folder).with_suffix(".calibration")
    with scored_open(fitted, model, questions, work_dir=work, bar=shown) as store:
        calibrated, left_out = calibrate_on(fitted, store, guarantees)
    calibrated.save(folder)
    remove_work(work)
    show_promises(calibrated, left_out)


def show_promises(lens: Lens, left_out: int) -> None:
    """Print what is promised of a lens, and how many questions it had seen before."""
    for promise in (lens.sets, lens.abstention):
        if promise:
            typer.echo(f"{promise}")
    show_left_out(left_out, adapted=bool(len(lens.adapted_on)))


def show_left_out(n: int, *, adapted: bool = False) -> None:
    """Say how many questions were left out because a lens had seen them; `adapted`: perhaps as labels that adapted it."""
    from coral_lens.cli.printing import why_left_out

    if n:
        typer.echo(f"{n} questions were left out, {why_left_out(adapted=adapted)}.")


@app.command()
@flat
def adapt(
    lens: Annotated[str, typer.Option(help="Folder of a lens made by `coral fit`, or a hub id.")],
    questions: Annotated[
        list[str], typer.Option(help="TASK[:SPLIT] or a file of labelled questions of the new task, 30 to 100 of them.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the lens of that task.")],
    learning_curve: Annotated[
        bool,
        typer.Option(
            "--learning-curve", help="Also say what fewer labels would have given, and whether more are worth it."
        ),
    ] = False,
    *,
    asking: Asking,
    model: AnyModelChoice,
) -> None:
    """Adapt a lens to a task that it was not fitted on: some tens of labels say how far it is to be believed there.

    Twenty labels and more also teach it a small probe of that task. Prints by how much it is better than temperature alone, and
    leaves the lens out where it is clearly worse.
    Example: `coral adapt --lens my-lens --questions few.jsonl --out my-lens-for-it`
    """
    from coral_lens.cli.printing import print_adaptation
    from coral_lens.lens.adapt import adapt_on, refuse_few
    from coral_lens.lens.calibrate import fresh_of
    from coral_lens.lens.folder import load_lens, refuse_other_folder
    from coral_lens.storage.progress import questions_bar

    refuse_other_folder(out)
    refuse_unwritable(out)
    fitted = load_lens(lens)
    loaded = model.opener(fitted.model)
    labelled = asking.gather(questions, chat=loaded if fitted.style.chat else None)
    fresh = fresh_of(fitted, labelled, to="adapt")
    refuse_few(int(fresh.sum()), with_curve=learning_curve)
    warn_of_home(fitted, labelled)
    fitted = model.settled(fitted, loaded)
    with work_for(beside(out), fitted, loaded(), labelled) as work:
        with (
            questions_bar("adapting", len(labelled)) as advance,
            fitted.scored(loaded(), labelled, work_dir=work, progress=advance) as store,
        ):
            adapted = adapt_on(fitted, store, with_curve=learning_curve)
        adapted.save(out)
    print_adaptation(adapted)
    show_forgotten(fitted, labelled, fresh)
    typer.echo(f"Lens in {out}, for questions of this task alone.")


def show_forgotten(lens: Lens, questions: Sequence[Question], fresh: Bool[np.ndarray, " question"]) -> None:
    """Say what has no part in an adapted lens: questions that the lens had seen, earlier labels, and promises."""
    import numpy as np

    from coral_lens.data.leaks import question_keys

    show_left_out(len(fresh) - int(fresh.sum()))
    if n := len(np.setdiff1d(lens.adapted_on, question_keys(questions, version=lens.keys))):
        typer.echo(f"{n} labels of the earlier adaptation are forgotten: give them together with the new ones.")
    if lens.sets or lens.abstention:
        typer.echo("Its prediction sets and its abstention were for the lens before that: run `coral calibrate` again.")


def warn_of_home(lens: Lens, questions: list[Question]) -> None:
    """Say that labels of a task that the lens was fitted on make it worse there: adapted, it has no home any more."""
    from coral_lens.lens.home import have_keys

    if (lens.is_home(questions) & ~have_keys(lens, questions, lens.seen)).any():
        typer.echo(
            "Some of these questions are of a task that the lens was fitted on: adapting makes it forget that task, and the "
            "lens as it was fitted is better there.",
            err=True,
        )


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
