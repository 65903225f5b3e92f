"""Commands of whole experiments: run, report, demo, and baseline, a study of methods that are named on the command line."""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coral_lens.cli.options import Machine, ModelChoice, beside, flat, folder_of_data, helpers_on, refuse_unwritable
from coral_lens.data.settings import Style
from coral_lens.errors import CoralError, need
from coral_lens.lens.settings import BaseRule
from coral_lens.scale.settings import RaySettings
from coral_lens.storage.parts import Part, parse_part
from coral_lens.storage.settings import Count, CountOrZero, Option, Seed, Settings

if TYPE_CHECKING:
    from coral_lens.study.config import Study

app = typer.Typer()
Full = Annotated[bool, typer.Option("--full", help="Print all tables, with intervals and tests.")]
TUTORIAL = "docs/tutorial.md"
"""Where the demo ends and one's own work begins."""


@dataclass(frozen=True)
class Running(Settings):
    """Where a study runs, and how far."""

    out: Path | None = None
    """Folder for results. By default the study's name."""
    work: Path | None = None
    """Folder for states, lenses and predictions, which studies may share. By default OUT.work."""
    data: Path | None = None
    """Folder with TASK/SPLIT.jsonl[.gz] or .parquet, looked into before the embedded data and the hub."""
    check: bool = False
    """Say which questions it would use and stop before a model is loaded."""
    part: Annotated[Part | None, Option(read=parse_part)] = None
    """Compute this share of the states and fits alone, such as 3/16; other processes compute the others in the same folders."""
    mixed: bool = False
    """Go on with states that were begun on another kind of device, although it rounds in another way."""
    listed: Annotated[bool, Option("--list")] = False
    """List the ready-made studies and stop."""


@app.command()
@flat
def run(
    study: Annotated[
        str | None, typer.Argument(help="A study: a TOML file, or the name of a ready-made one (see `--list`).")
    ] = None,
    *,
    running: Running,
    spread: RaySettings,
    machine: Machine,
) -> None:
    """Run the models, mixtures, tests and methods of a study to a report; go on where it was if it was stopped.

    Example: `coral run probe1-small --data DIR`
    """
    from coral_lens.study.config import load_study, ready_made

    if running.listed:
        return typer.echo("\n".join(f"{name:<17}{line}" for name, line in ready_made().items()))
    if study is None:
        raise CoralError("Give a study: a TOML file, or the name of a ready-made one; `coral run --list` lists them.")
    from coral_lens.cli.printing import print_plan, print_study
    from coral_lens.storage.progress import shown
    from coral_lens.study.folders import Folders
    from coral_lens.study.run import prepare_study, run_prepared

    if not running.check:
        need("report", by="coral run")
    data, wanted = folder_of_data(running.data), load_study(study)
    out = running.out or Path(wanted.name)
    folders = Folders(
        out, running.work or beside(out), data=data, dtype=machine.dtype, adapter=machine.adapter, mixed=running.mixed
    )
    typer.echo("reading questions ...", err=True)
    prepared = prepare_study(wanted, data)
    print_plan(prepared.record())
    spread.refuse_without_ray()
    if running.part and spread.ray is not None:
        raise CoralError("--part is for processes of your own, --ray has workers of its own; leave one of them out.")
    if running.part and not running.check:
        from coral_lens.study.parts import run_study_part

        done = run_study_part(
            prepared, folders, running.part, open_model=machine.open, bar=shown, device=machine.device
        )
        return typer.echo(done.words)
    if not running.check:
        with helpers_on(spread, machine) as helpers:
            page = run_prepared(
                prepared, folders, open_model=machine.open, bar=shown, device=machine.device, helpers=helpers
            )
        print_study(page)


@app.command()
@flat
def report(
    run: Annotated[Path, typer.Argument(help="Folder made by `coral eval --out` or `coral demo`.")],
    other: Annotated[Path | None, typer.Argument(help="A second run: compare the two, question by question.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for a comparison; default: coral-comparison.")] = None,
    full: Full = False,
) -> None:
    """Make report.html and the tables of a run again, or compare two runs.

    Whatever lies under the run's `analysis/` (see `coral analyse`) is gathered.
    Example: `coral report run`, or `coral report run-a run-b --out comparison`
    """
    from coral_lens.cli.printing import print_comparison, show_run
    from coral_lens.report.runs import load_run, refuse_other_run
    from coral_lens.storage.outputs import refuse_inputs

    need("report", by="coral report")
    if other:
        folder = out or Path("coral-comparison")
        refuse_inputs(folder, (run, other))
        return print_comparison(load_run(run), load_run(other), folder)
    refuse_unwritable(run)
    if out:
        raise CoralError("--out is for a comparison of two runs; the report of one is written into its own folder.")
    measured = load_run(run)
    refuse_other_run(run)
    show_run(measured, run, again=True, full=full)


@app.command()
@flat
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the lens, the predictions and the report.")] = Path(
        "coral-demo"
    ),
    full: Full = False,
) -> None:
    """Fit a lens on real questions with a real model, and measure it on held-out questions and on tasks it never saw.

    How long it takes on your machine is measured and said before it starts; a second run reuses what is there. States, lenses
    and the report are kept in `--out`, the converted model in the cache (`coral cache`). Example: `coral demo`
    """
    from coral_lens.cli.printing import show_run
    from coral_lens.data.assets import cache_dir, embedded_data, embedded_model, fetch_assets
    from coral_lens.storage.progress import shown
    from coral_lens.study.demo import run_demo

    def tell(message: str) -> None:
        typer.echo(message, err=True)

    need("eval", "report", "gguf", by="coral demo")
    if embedded_model() is None or embedded_data() is None:
        if not sys.stdin.isatty() or not typer.confirm(
            f"The demo's model and data are not here. Fetch them (180 MB) into {cache_dir()}?", default=True
        ):
            raise CoralError("The demo's model and data are not installed; run `coral assets` first.")
        fetch_assets(tell)
    tell(
        f"Model and data are here, nothing is downloaded. What is kept between runs is in {cache_dir()}: `coral cache`."
    )
    tell("loading the model and the questions (the first time this takes a minute) ...")
    show_run(run_demo(out, tell=tell, bar=shown), out, full=full)
    typer.echo(
        f"Next, with a file of your own questions: `{this_command()} fit --train FILE --out LENS`; see {TUTORIAL}."
    )


def this_command() -> str:
    """Return what to type for `coral`: its path where the name alone is not found, short if that is below the folder."""
    if which("coral"):
        return "coral"
    beside = Path(sys.executable).with_name("coral")
    if not beside.exists():
        return f"{shlex.quote(sys.executable)} -m coral_lens"
    here = Path.cwd()
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))


# ---------------------------------------------------------------------------------------------------------- baselines

NAMES = (
    "`isotonic`, `vector-scaling`; for options under letters `contextual-calibration`, `batch-calibration`, `pride`, `cyclic`; "
    "`iti`, `ccps`, `steerconf`, `corrsteer`; controls `control-random`, `control-untrained`, `control-base`, "
    "`control-text`, `control-other`; or a lens"
)


@dataclass(frozen=True)
class BaselineSettings(Settings):
    """What baselines are fitted and measured on."""

    train: tuple[str, ...]
    """TASK:SPLIT or a file of labelled questions to fit and choose on; may be given several times."""
    task: tuple[str, ...]
    """TASK[:SPLIT] or a file to test on; may be given several times."""
    out: Path
    """Folder for the run and its report. States are kept in OUT.work."""
    options: Annotated[tuple[str, ...], Option("--set")] = ()
    """An option of the method, as in a study: `questions=20`; may be given several times."""
    base: BaseRule = "token"
    """Score whose softmax is the base probability: `sum`, `token` (mean per token) or `char` (lm-eval's acc_norm)."""
    num_fewshot: CountOrZero = 0
    """Worked examples before each question, as in lm-eval."""
    limit: Count | None = None
    """At most this many questions of each source, drawn at random."""
    seed: Seed = 0
    """Seed of samples, splits and fits."""
    data: Path | None = None
    """Folder with TASK/SPLIT.jsonl[.gz] or .parquet, looked into before the embedded data and the hub."""
    style: Style = Style()  # noqa: RUF009  (frozen)
    """How questions without a template of their own are asked."""

    def study(self, kinds: list[str], model: str) -> Study:
        """Return the study that fits and measures these methods."""
        from coral_lens.study.config import study_of

        options = dict(map(parsed, self.options))
        train, tests = (
            tuple(source_of(s, shots=self.num_fewshot, limit=self.limit, tested=tested) for s in sources)
            for sources, tested in ((self.train, False), (self.task, True))
        )
        return study_of(
            {
                "name": "baseline",
                "models": (model,),
                "seed": self.seed,
                "seeds": (self.seed,),
                "base": self.base,
                "style": self.style.kind,
                "chat": self.style.chat,
                "mixture": ({"name": "train", "sources": train},),
                "test": tests,
                "method": tuple({"kind": k, "name": row_of(k, options), **options} for k in dict.fromkeys(kinds)),
            }
        )


@app.command()
@flat
def baseline(
    name: Annotated[list[str], typer.Argument(help=f"One or more of: {NAMES}.")],
    *,
    settings: BaselineSettings,
    model: ModelChoice,
) -> None:
    """Fit one or more baselines and measure them beside the model as it is and temperature scaling.

    Example: `coral baseline isotonic control-base --train arc_easy:train --task arc_challenge:test --out run`
    """
    from coral_lens.cli.printing import show_run
    from coral_lens.report.runs import load_run
    from coral_lens.storage.progress import shown
    from coral_lens.study.folders import Folders
    from coral_lens.study.run import prepare_study, run_alone

    need("report", by="coral baseline")
    study, machine = settings.study(name, model.model), model.machine
    data = folder_of_data(settings.data)
    folders = Folders(
        out=settings.out, work=beside(settings.out), data=data, dtype=machine.dtype, adapter=machine.adapter
    )
    typer.echo("reading questions ...", err=True)
    prepared = prepare_study(study, folders.data)
    folder = run_alone(prepared, folders, open_model=machine.open, bar=shown, device=machine.device)
    show_run(load_run(folder), None, full=True)
    typer.echo(f"Report: {folder / 'report.html'}\nCosts:  {folder / 'costs.md'}")


def source_of(text: str, *, shots: int, limit: int | None, tested: bool) -> dict[str, Any]:
    """Return the source that `task:split`, a task or a file names; only a test may leave its split to the task."""
    from coral_lens.data.questions import task_and_split
    from coral_lens.data.sources import is_file
    from coral_lens.data.tasks import definitions

    if is_file(text):
        return {"task": text, "n": limit, "shots": 0}
    name, split = task_and_split(text)
    known = definitions(name)
    if not split and tested:
        split = next((d.test_split for d in known if d.test_split), None) or "validation"
    if not split:
        raise CoralError(f"--train {text} names no split; say which, such as {name}:train.")
    return {"task": name, "split": split, "n": limit, "shots": shots}


def row_of(kind: str, options: dict[str, Any]) -> str:
    """Return what tables call a method: with what --set asks for, files by their last name: `iti (sigma=true)`."""
    shown = (f"{k}={Path(v).name if isinstance(v, str) else json.dumps(v)}" for k, v in options.items())
    return f"{kind} ({', '.join(shown)})" if options else kind


def parsed(text: str) -> tuple[str, Any]:
    """Return the key and value of `key=value`, the value as TOML has it, or as text."""
    from coral_lens.study.config import frozen

    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise CoralError(f"--set must look like questions=20. Got {text!r} instead.")
    try:
        return key.strip(), frozen(tomllib.loads(f"value = {value}")["value"])
    except (ValueError, RecursionError):  # no TOML, a number too long, or nested too deep
        return key.strip(), value.strip()
