"""Commands that use lenses: eval, predict, and lm-eval's own command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coral_lens.cli.options import Asking, DataDir, OtherModelChoice, beside, flat, folder_of_data, work_for
from coral_lens.errors import CoralError, need
from coral_lens.storage.settings import Settings

if TYPE_CHECKING:
    from coral_lens.lens.answers import Answer
    from coral_lens.lens.artefact import Lens
    from coral_lens.records import Question
    from coral_lens.report.runs import Run

app = typer.Typer()
OWN_ARGUMENTS = """\
Beside lm-eval's own arguments, `coral lm-eval` takes
  --data DIR     a folder with TASK/SPLIT.jsonl[.gz] or .parquet, looked into before the embedded data and the hub
  --split SPLIT  evaluate this split of every task instead of the one that lm-eval evaluates
"""


@dataclass(frozen=True)
class Measured(Settings):
    """What is measured: lenses on tasks, or what lm-eval logged."""

    lens: tuple[str, ...] = ()
    """Folder or hub id of a lens; give several to compare them."""
    task: tuple[str, ...] = ()
    """TASK[:SPLIT] or a file; may be given several times."""
    lm_eval_samples: tuple[str, ...] = ()
    """Instead of a lens and tasks: logs of lm-eval (`samples_*.jsonl`)."""
    out: Path | None = None
    """Folder for predictions, tables and report.html."""
    full: bool = False
    """Print all tables: every method and metric with intervals and tests."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lm_eval_samples and (self.lens or self.task):
            raise CoralError("--lm-eval-samples are measured by themselves; leave --lens and --task out.")


@app.command(name="eval")
@flat
def evaluate(
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    *,
    measured: Measured,
    asking: Asking,
    model: OtherModelChoice,
) -> None:
    """Measure a lens on tasks: base, temperature and CORAL side by side, with 95 % intervals.

    Example: `coral eval --lens my-lens --task arc_challenge:validation --task openbookqa:validation --out run`,
    or, without any model, on what lm-eval logged: `coral eval --lm-eval-samples results/*/samples_*.jsonl --out run`
    """
    from coral_lens.cli.printing import show_run
    from coral_lens.lens.folder import load_lens
    from coral_lens.report.names import last_part, told_apart
    from coral_lens.report.reach import reach_notes
    from coral_lens.report.runs import refuse_other_run, save_run

    if more and not measured.lm_eval_samples:
        raise CoralError(f"Unexpected argument {more[0]!r}; tasks and files are given with --task.")
    if not measured.lm_eval_samples and not (measured.lens and measured.task):
        raise CoralError("Give --lens and --task, or --lm-eval-samples.")
    # a shell puts the first file of a pattern behind the option, and the others behind that
    if logs := [*measured.lm_eval_samples, *(more or [])]:
        audit_logs(logs, measured)
        return
    if measured.out:
        need("report", by="coral eval --out")
        refuse_other_run(measured.out)
    lenses = {name: load_lens(folder) for folder, name in told_apart(measured.lens, last_part).items()}
    run = run_of_lenses(lenses, measured, asking, model)
    if measured.out:
        save_run(run, measured.out)
    show_run(run, measured.out, full=measured.full)
    show_left_out(run, list(lenses.values()))
    for note in reach_notes(run) + exit_notes(list(lenses.values())):
        typer.echo(note)


def audit_logs(logs: list[str], measured: Measured) -> None:
    """Audit what lm-eval logged: `coral audit` of these files."""
    from coral_lens.audit.measure import audit, run_of
    from coral_lens.audit.reading import TASK, read_logs
    from coral_lens.audit.settings import AuditSettings
    from coral_lens.cli.audit import refuse_other_out, show_audit
    from coral_lens.cli.printing import show_run

    refuse_other_out(measured.out, by="coral eval --out")
    audited = read_logs(logs)
    if measured.full:
        show_run(run_of(audited), None, full=True)
    show_audit(audit(audited, AuditSettings(by=(TASK,) if audited.tests else ())), measured.out)


def exit_notes(lenses: Sequence[Lens]) -> list[str]:
    """Say of lenses that exit early what that saves and loses."""
    from coral_lens.lens.publish import exit_cost

    return [f"Early exit: {exit_cost(lens)}" for lens in lenses if lens.exits]


def run_of_lenses(lenses: Mapping[str, Lens], measured: Measured, asking: Asking, model: OtherModelChoice) -> Run:
    """Measure lenses on tasks, under the names of their folders where nothing else tells them apart."""
    from coral_lens.data.leaks import guard_of_shown
    from coral_lens.storage.files import versions
    from coral_lens.storage.progress import shown as bar
    from coral_lens.study.evaluate import evaluate as measure

    first = next(iter(lenses.values()))
    loaded = model.opener(first.model)
    chat = loaded if first.style.chat else None
    tests = {name: asking.gather([name], chat=chat) for name in dict.fromkeys(measured.task)}
    shown = [q for name in tests for q in worked_examples(name, asking)]
    lenses = {name: model.settled(lens, loaded) for name, lens in lenses.items()}
    guard, work = guard_of_shown(shown) if shown else None, measured.out / "work" if measured.out else None
    run = measure(lenses, loaded(), tests, guard=guard, work_dir=work, bar=bar)
    about = {"lens": ", ".join(measured.lens), "versions": versions(), "num_fewshot": asking.num_fewshot or 0}
    return replace(run, provenance=about | run.provenance)


def show_left_out(run: Run, lenses: Sequence[Lens]) -> None:
    """Say which questions the guard against leaks left out, and what it could not check."""
    from coral_lens.cli.printing import why_left_out
    from coral_lens.data.leaks import REPEATED
    from coral_lens.report.names import task_name
    from coral_lens.study.evaluate import LEAK_GUARD

    guard = run.provenance[LEAK_GUARD]
    seen = why_left_out(
        adapted=any(len(lens.adapted_on) for lens in lenses), calibrated=any(len(lens.calibrated_on) for lens in lenses)
    )
    for name, reasons in guard["left out"].items():
        for reason, n in reasons.items():
            why = seen if reason == REPEATED else f"each is {reason}"
            typer.echo(f"{task_name(name)}: {n} questions were left out, {why}.")
    if "not checked" in guard:
        typer.echo(f"Not checked: {guard['not checked']}.")


def worked_examples(task: str, asking: Asking) -> list[Question]:
    """Return the questions that may stand as worked examples in the prompts of a task, with their answers."""
    from coral_lens.data.questions import task_and_split
    from coral_lens.data.sources import is_file
    from coral_lens.data.tasks import definitions, shot_splits

    if is_file(task):
        from coral_lens.data.questions import read_questions

        return list(read_questions(asking.fewshot_from, asking)) if asking.num_fewshot and asking.fewshot_from else []
    name, _ = task_and_split(task)
    pool = replace(asking, num_fewshot=0, limit=None)
    return [q for split in shot_splits(definitions(name), asking.num_fewshot) for q in pool.gather([f"{name}:{split}"])]


@app.command()
@flat
def predict(
    questions: Annotated[
        str, typer.Option(help="A file of questions (.jsonl, .csv, .parquet, ...); answers are not needed.")
    ],
    out: Annotated[Path, typer.Option(help="File to write: .jsonl, .csv or .parquet, one row per question.")],
    lens: Annotated[
        str,
        typer.Option(
            help="Folder of a lens made by `coral fit`, or a hub id. By default the one that ships with the package, for the "
            "embedded model."
        ),
    ] = "general",
    *,
    asking: Asking,
    model: OtherModelChoice,
) -> None:
    """Answer questions with steered probabilities; each answer says how far it is from what the lens was fitted on.

    The columns of the input come first. After `coral calibrate` each answer also says which options the prediction set holds,
    and whether to abstain.
    Example: `coral predict --questions new.jsonl --out answers.jsonl`, or with `--lens my-lens`
    """
    from coral_lens.lens.answers import holds_answers
    from coral_lens.lens.folder import load_lens
    from coral_lens.storage.files import write_atomic
    from coral_lens.storage.outputs import output_file
    from coral_lens.storage.progress import questions_bar
    from coral_lens.storage.rows import writer_of

    write = writer_of(out)
    file = output_file(out, is_ours=holds_answers)
    fitted, target = load_lens(lens), beside(out)
    loaded = model.opener(fitted.model)
    asked = asking.gather([questions], chat=loaded if fitted.style.chat else None)
    fitted = model.settled(fitted, loaded)
    fitted.check(loaded())
    with work_for(target, fitted, loaded(), asked) as work:
        with questions_bar("answering", len(asked)) as advance:
            answers = fitted.predict(loaded(), asked, work_dir=work, progress=advance)
        write_atomic(file, write(answers.rows()))
    typer.echo(f"{len(answers)} answers in {out}")
    # labels of a task say that it is the lens's own
    typer.echo(trust_line(answers, is_own=fitted.adaptation is not None))
    for note in exit_notes([fitted]):
        typer.echo(note)


def trust_line(answers: list[Answer], *, is_own: bool) -> str:
    """Say of how many answers little is known: far from the training questions, not of a task of theirs, or abstained.

    A question of a task of theirs that lies too far off is believed less as well, and is counted by itself.
    """
    from coral_lens.records import FAR
    from coral_lens.report.reach import unchecked

    n = len(answers)
    found = [
        f"{sum(a.shift >= FAR for a in answers):,} of {n:,} questions are far from those that the lens was fitted on"
    ]
    if any(a.abstain is not None for a in answers):
        found.append(f"{sum(bool(a.abstain) for a in answers):,} abstained")
    line = ", ".join(found)
    counts = {
        "of a task that it was not fitted on": 0 if is_own else sum(not a.home for a in answers),
        "of its own task, but too far off for it to be fully believed": sum(
            a.home and a.trust is not None and a.trust < 1.0 for a in answers
        ),
        "answered by the model alone, scaled by temperature": sum(a.trust == 0.0 for a in answers),
        "answered as by the model alone, with the lens's confidence": sum(a.kept and a.trust != 0.0 for a in answers),
    }
    line = "; ".join(
        [line, *(f"{count:,} {'is' if count == 1 else 'are'} {what}" for what, count in counts.items() if count)]
    )
    return f"{line}. {'' if is_own else unchecked(answers)}".rstrip()


@app.command("lm-eval", add_help_option=False, context_settings={"ignore_unknown_options": True})
def lm_eval(
    arguments: Annotated[list[str] | None, typer.Argument(help="As of `lm-eval`; see `coral lm-eval --help`.")] = None,
    data: DataDir = None,
    split: Annotated[
        str | None, typer.Option(help="Evaluate this split of every task instead of the one that lm-eval evaluates.")
    ] = None,
) -> None:
    """Run lm-eval's own command line, which then knows `--model coral` and measures calibration too.

    Data comes from `--data DIR` (DIR/TASK/SPLIT.jsonl), then the embedded data, then the hub.
    Example: `coral lm-eval run --model coral --model_args pretrained=smollm2,lens=my-lens --tasks hellaswag`
    """
    from coral_lens.harness.command import run_lm_eval

    if {"-h", "--help"} & set(arguments or []):
        typer.echo(OWN_ARGUMENTS)
    run_lm_eval(arguments or [], data_dir=folder_of_data(data), split=split)
