"""Open questions, which come without options: ask, and what fit and calibrate do with such."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coral_lens.cli.options import OtherModelChoice, beside, flat
from coral_lens.data.settings import SourceOptions, TaskOptions
from coral_lens.errors import CoralError
from coral_lens.storage.escape import for_terminal

if TYPE_CHECKING:
    from coral_lens.data.open_questions import OpenQuestion
    from coral_lens.lens.artefact import Lens
    from coral_lens.lens.open_answers import OpenAnswer, OpenAnswers

app = typer.Typer()


@app.command()
@flat
def ask(
    lens: Annotated[str, typer.Option(help="Folder of a lens made by `coral fit --open`, or a hub id.")],
    question: Annotated[list[str] | None, typer.Argument(help="What is asked; several questions may follow.")] = None,
    questions: Annotated[
        str | None, typer.Option(help="A file of questions (.jsonl, .csv, .parquet, ...); answers are not needed.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write: .jsonl, .csv or .parquet, one row per question.")
    ] = None,
    *,
    source: SourceOptions,
    model: OtherModelChoice,
) -> None:
    """Answer questions that come without options: the model writes candidates, and the lens says how likely each is right.

    Each answer says how sure it is, what else the model wrote, and after `coral calibrate` whether to abstain. The probabilities
    of all candidates may be low: then none of them is right.
    Example: `coral ask --lens my-lens "Which river flows through Vienna?"`, or `coral ask --lens my-lens --questions open.jsonl
    --out answers.jsonl`
    """
    from coral_lens.data.open_questions import as_open
    from coral_lens.lens.asking import ask as run
    from coral_lens.lens.folder import load_lens
    from coral_lens.storage.progress import shown

    if bool(question) == bool(questions):
        raise CoralError("Give a question, or a file of them with --questions; one of the two.")
    if questions and out is None:
        raise CoralError("Say with --out where the answers to the questions of a file are to be written.")
    fitted = load_lens(lens)
    fitted.check_kind(is_open=True)
    asked = gather_open([questions], source) if questions else as_open(question or [])
    loaded = model.opener(fitted.model)
    fitted = model.settled(fitted, loaded)
    if out is not None:
        answer_file(fitted, loaded(), asked, out)
        return
    answers = run(fitted, loaded(), asked, bar=shown if len(asked) > 1 else False)
    for answer in answers:
        print_open_answer(answer, asked)
    if sentence := unchecked_open(answers):
        typer.echo(sentence)


def answer_file(lens: Lens, model: object, asked: Sequence[OpenQuestion], out: Path) -> None:
    """Write the answers to questions; a killed run goes on where it was."""
    from coral_lens.engine.model import Model
    from coral_lens.lens.asking import ask as run
    from coral_lens.lens.asking import remove_work
    from coral_lens.lens.open_answers import holds_open_answers
    from coral_lens.storage.files import write_atomic
    from coral_lens.storage.outputs import output_file
    from coral_lens.storage.progress import shown
    from coral_lens.storage.rows import writer_of

    assert isinstance(model, Model), "a model is asked"
    write = writer_of(out)
    file = output_file(out, is_ours=holds_open_answers)
    work = beside(out)
    answers = run(lens, model, asked, work_dir=work, bar=shown)
    write_atomic(file, write(answers.rows()))
    remove_work(work)
    typer.echo(f"{len(answers)} answers in {out}")
    typer.echo(summary_line(answers))


def print_open_answer(answer: OpenAnswer, asked: Sequence[OpenQuestion]) -> None:
    """Print an answer, how sure it is, and what else the model wrote."""
    text = next(q.text for q in asked if q.id == answer.id)
    if len(asked) > 1:
        typer.echo(for_terminal(text.strip()))
    unsure = ", abstains" if answer.abstain else ""
    typer.echo(for_terminal(f"{answer.answer}  ({answer.confidence:.0%} sure{unsure})"))
    for candidate, p, n in zip(answer.candidates, answer.probs, answer.counts, strict=True):
        if candidate != answer.answer:
            typer.echo(for_terminal(f"  {p:4.0%}  {candidate}  (written {n} of {answer.n_written} times)"))
    typer.echo(f"  {answer.p_none:4.0%}  none of these")


def summary_line(answers: OpenAnswers) -> str:
    """Say how many abstained and are far, and where answers were known how many are right."""
    from coral_lens.records import FAR

    n = len(answers)
    parts = [
        f"{sum(a.shift >= FAR for a in answers):,} of {n:,} questions are far from those that the lens was fitted on"
    ]
    if any(a.abstain is not None for a in answers):
        parts.append(f"{sum(bool(a.abstain) for a in answers):,} abstained")
    if known := [a for a in answers if a.right is not None]:
        sure = sum(a.confidence for a in known) / len(known)
        right = sum(bool(a.right) for a in known) / len(known)
        parts.append(f"{right:.1%} of {len(known):,} with known answers are right, at a mean confidence of {sure:.1%}")
    return f"{', '.join(parts)}. {unchecked_open(answers)}".rstrip()


def unchecked_open(answers: OpenAnswers) -> str:
    """Say that harm cannot be excluded where answers are away from home and not all of them could be checked."""
    from coral_lens.report.reach import UNCHECKED_OPEN, unchecked

    return unchecked((answer for answer in answers if answer.right is None), UNCHECKED_OPEN)


def gather_open(sources: Sequence[str], options: SourceOptions) -> list[OpenQuestion]:
    """Load the open questions of all sources, and say in one line on standard error what was understood; no id comes twice."""
    from coral_lens.data.open_questions import load_open_questions

    if isinstance(options, TaskOptions) and (options.num_fewshot or options.fewshot_from):
        raise CoralError("Open questions bring their own worked examples: use --examples, and leave --num-fewshot out.")
    questions: dict[str, OpenQuestion] = {}
    for source in sources:
        loaded = load_open_questions(source, options)
        n_known = sum(bool(q.answers) for q in loaded)
        typer.echo(for_terminal(f"{source}: {len(loaded):,} open questions, {n_known:,} with answers"), err=True)
        for question in loaded:
            if question.id in questions:
                raise CoralError(
                    f"The question id {question.id!r} comes twice in {', '.join(sources)}; make ids unique."
                )
            questions[question.id] = question
    return list(questions.values())
