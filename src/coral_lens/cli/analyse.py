"""`coral analyse`: what a run, or the states behind it, show beyond its table. Each command writes tables and figures.

Commands that say where correctness lives: `coral analyse layers`, `heads`, `dimensions`, each from an activation store."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coral_lens.cli.options import beside, flat
from coral_lens.errors import CoralError, need
from coral_lens.lens.settings import BaseRule
from coral_lens.storage.settings import Count, Layers, Seed, Settings

if TYPE_CHECKING:
    from coral_lens.analysis.folds import Folded
    from coral_lens.analysis.layers import Forward
    from coral_lens.engine.activations import ActivationStore, JoinedStore
    from coral_lens.lens.settings import FitSettings


app = typer.Typer(no_args_is_help=True)


@app.callback()
def analyse() -> None:
    """Look closer: tables and figures that `coral report` gathers in a run's page."""


@app.command()
def confidence(
    run: Annotated[Path, typer.Argument(help="Folder made by `coral eval --out`, `coral demo` or a study.")],
    method: Annotated[
        list[str] | None, typer.Option("--method", help="Draw these; default: base, temperature and the lens.")
    ] = None,
    bins: Annotated[int, typer.Option(min=2, max=100, help="Bins of the reliability diagrams.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Folder; default: analysis/confidence in the run's.")] = None,
) -> None:
    """Reliability in bins of both kinds, risk against coverage, confidence before and after, subjects, position bias.

    Needs predictions only: lm-eval's logs will do (`coral eval --lm-eval-samples`). Example: `coral analyse confidence run`
    """
    from coral_lens.report.figures.confidence import confidence_findings
    from coral_lens.report.findings import FOLDER, write_findings
    from coral_lens.report.runs import load_run

    need("report", by="coral analyse confidence")
    target = out or run / FOLDER / "confidence"
    names = write_findings(confidence_findings(load_run(run), methods=method or (), n_bins=bins), target)
    for name in names:
        typer.echo(f"{target / name}.csv .json .svg .png")
    typer.echo(f"`coral report {run}` puts them into its page." if not out else f"{len(names)} findings.")


# ---------------------------------------------------------------------------------------------------- states


@dataclass(frozen=True)
class Studied(Settings):
    """What is analysed, and where the table and the figures go."""

    store: tuple[Path, ...]
    """Folder made by `coral extract`, of labelled questions; several are read as one."""
    out: Path = Path("analysis")
    """Folder for NAME.csv, NAME.json, NAME.png and NAME.svg."""
    limit: Count | None = None
    """At most so many questions of each store, the first ones."""
    base: BaseRule = "token"
    """Score whose softmax is the base probability: `sum`, `token` (mean per token) or `char` (lm-eval's acc_norm)."""
    seed: Seed = 0
    """Seed of the division into folds."""

    def opened(self) -> tuple[JoinedStore, Folded]:
        """Return the stores as one, and their questions in five folds."""
        from coral_lens.analysis.folds import folded
        from coral_lens.engine.activations import ActivationStore, JoinedStore, first_questions

        store = JoinedStore([first_questions(ActivationStore(folder), self.limit) for folder in self.store])
        return store, folded(store, base=self.base, seed=self.seed)

    def write(self, name: str, record: Any) -> None:
        """Write the table and the figures, and say where."""
        write(self.out, name, record)


@app.command()
@flat
def layers(*, studied: Studied) -> None:
    """Probe every layer: R2, steered accuracy and ECE, layers side by side, and what leaving the model early costs.

    Example: `coral analyse layers --store states/csqa --out analysis`
    """
    from coral_lens.analysis.layers import analyse_layers
    from coral_lens.cli.printing import say_layers
    from coral_lens.progress import shown

    need("report", by="coral analyse layers")
    store, data = studied.opened()
    work = beside(studied.out) / "layers"
    found = analyse_layers(store, data, forward=forward_of(store), base_rule=studied.base, work=work, bar=shown)
    studied.write("layers", found)
    typer.echo(say_layers(found))


@app.command()
@flat
def dimensions(
    most: Annotated[int, typer.Option(help="Principal components to go up to.")] = 100,
    standardise: Annotated[
        bool, typer.Option("--standardise", help="Give every column the same variance before the decomposition.")
    ] = False,
    *,
    studied: Studied,
) -> None:
    """Ask how many directions the signal needs: R2 against the number of principal components, by groups of layers.

    Example: `coral analyse dimensions --store states/csqa --out analysis`
    """
    from coral_lens.analysis.dimensions import analyse_dimensions
    from coral_lens.cli.printing import say_dimensions
    from coral_lens.progress import shown

    need("report", by="coral analyse dimensions")
    if most < 2:
        raise CoralError(f"--most must be at least 2 components. Got {most} instead.")
    store, data = studied.opened()
    work = beside(studied.out) / "dimensions"
    found = analyse_dimensions(store, data, most=most, standardise=standardise, work=work, bar=shown)
    studied.write("dimensions", found)
    typer.echo(say_dimensions(found))


@app.command()
@flat
def heads(
    store: Annotated[list[Path] | None, typer.Option(help="Folder made by `coral extract --heads all`.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for heads.csv, heads.json and figures.")] = Path("analysis"),
    limit: Annotated[int | None, typer.Option(help="At most so many questions of each store, the first ones.")] = None,
    base: Annotated[str, typer.Option(help="Base score: `sum`, `token` or `char`.")] = "token",
    seed: Annotated[int, typer.Option(help="Of the division into folds.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how much memory and time it would take here, and stop.")
    ] = False,
    shape: Annotated[
        str | None, typer.Option(help="With --dry-run, instead of a store: BLOCKSxHEADSxDIM, e.g. `30x32x128`.")
    ] = None,
    rows: Annotated[int, typer.Option(help="With --shape: options of all questions.")] = 8000,
) -> None:
    """Probe every attention head: is the signal in a few heads or in many? All heads and folds are trained in stacks.

    Example: `coral analyse heads --store states/csqa --out analysis`, or `coral analyse heads --dry-run --shape 30x32x128`
    """
    from coral_lens.analysis.heads import analyse_heads, plan_heads, shape_of, shape_of_store
    from coral_lens.cli.printing import say_heads, say_plan
    from coral_lens.progress import shown

    if shape is not None:
        if not dry_run:
            raise CoralError("--shape stands in for a store in a --dry-run only; give --dry-run or --store.")
        return typer.echo(say_plan(plan_heads(shape_of(shape, rows))))
    if not store:
        raise CoralError("Give --store, a folder made by `coral extract TASK --out FOLDER --heads all`.")
    if not dry_run:
        need("report", by="coral analyse heads")
    studied = Studied(tuple(store), out, limit, base, seed)  # type: ignore[arg-type]
    opened, data = studied.opened()
    if dry_run:
        return typer.echo(say_plan(plan_heads(shape_of_store(opened))))
    found = analyse_heads(opened, data, work=beside(out) / "heads", bar=shown)
    studied.write("heads", found)
    typer.echo(say_heads(found))


@dataclass(frozen=True)
class Compared(Settings):
    """Stores of one or more tasks, and how lenses are fitted on them."""

    store: tuple[Path, ...]
    """Folder made by `coral extract`; several are several tasks, and so are the tasks within one."""
    out: Path = Path("analysis")
    """Folder for tables and figures."""
    base: BaseRule = "token"
    """Score whose softmax is the base probability: `sum`, `token` (mean per token) or `char` (lm-eval's acc_norm)."""
    layers: Layers = None
    """Layers to try, such as `12-20`; by default all."""
    seed: Seed = 0
    """Seed of the split into training and validation questions."""

    def settings(self, lens: str) -> FitSettings:
        """Return how lenses are fitted: untempered, as in the paper."""
        from coral_lens.lens.settings import FitSettings

        return FitSettings(lens=lens, base=self.base, layers=self.layers, temper=False, seed=self.seed)

    def stores(self) -> list[ActivationStore]:
        """Return the stores."""
        from coral_lens.engine.activations import ActivationStore

        return [ActivationStore(folder) for folder in self.store]

    def tasks(self, stores: list[ActivationStore]) -> list[str]:
        """Return what counts as a task, and say what is missing if it is one only."""
        from coral_lens.analysis.held_out import tasks_of

        found = tasks_of(stores)
        if len(found) == 1:
            typer.echo(f"One task only, {found[0]}: nothing is said of transfer; give another --store for that.")
        return found


@app.command()
@flat
def data(
    lens: Annotated[str, typer.Option(help="`ridge` (the paper's form), `mlp`, `listwise`, ...")] = "ridge",
    draws: Annotated[int, typer.Option(help="Drawings of the questions at each size of a learning curve.")] = 3,
    *,
    compared: Compared,
) -> None:
    """Learning curves, and how a lens of each task does on each other task, with the shift between them.

    Example: `coral analyse data --store states/csqa --store states/arc --out analysis`
    """
    from coral_lens.analysis.data import analyse_curves, analyse_transfer
    from coral_lens.cli.printing import say_curves, say_transfer
    from coral_lens.progress import shown

    need("report", by="coral analyse data")
    settings, stores = compared.settings(lens), compared.stores()
    tasks, journal = compared.tasks(stores), beside(compared.out) / "data.jsonl"
    curves = analyse_curves(stores, settings, draws=draws, journal=journal, bar=shown)
    write(compared.out, "data-curves", curves)
    typer.echo(say_curves(curves))
    if len(tasks) > 1:
        transfer = analyse_transfer(stores, settings, journal=journal, bar=shown)
        write(compared.out, "data", transfer)
        typer.echo(say_transfer(transfer))


@app.command()
@flat
def probes(
    train: Annotated[
        str | None, typer.Option(help="Task to fit on; the others are transfer. Default: the first.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Networks of each kind.")] = 3,
    grid_depth: Annotated[int, typer.Option(help="Hidden layers of the network whose regularisation is varied.")] = 4,
    *,
    compared: Compared,
) -> None:
    """Compare probes: depth, regularisation and strength, in distribution and on the other tasks.

    Example: `coral analyse probes --store states/csqa --store states/arc --out analysis`
    """
    from coral_lens.analysis.probes import ProbePlan, analyse_probes
    from coral_lens.cli.printing import say_probes
    from coral_lens.lens.probes.mlp import hidden_of_depth
    from coral_lens.progress import shown

    need("report", by="coral analyse probes")
    hidden_of_depth(grid_depth)
    stores = compared.stores()
    known = compared.tasks(stores)
    if train is not None and train not in known:
        raise CoralError(f"No store has questions of {train!r}; the tasks are {', '.join(known)}.")
    plan = ProbePlan(seeds=seeds, grid_depth=grid_depth)
    settings, journal = compared.settings("ridge"), beside(compared.out) / "probes.jsonl"
    found = analyse_probes(stores, train or known[0], settings, plan=plan, journal=journal, bar=shown)
    write(compared.out, "probes", found)
    typer.echo(say_probes(found))


def write(out: Path, name: str, record: Any) -> None:
    """Write an analysis and its figures, and say where."""
    from coral_lens.analysis.files import write_analysis
    from coral_lens.report.figures.analysis import write_analysis_pictures

    pictures = write_analysis_pictures(write_analysis(name, record, out), out)
    typer.echo(f"{name}.csv, {name}.json, {', '.join(f'{p}.png' for p in pictures)} (and .svg) in {out}")


def forward_of(store: JoinedStore) -> Forward | None:
    """Return what the parts of the model cost, where its configuration is at hand; no weights are read."""
    from coral_lens.analysis.layers import Forward
    from coral_lens.engine.loading import load_outline

    with suppress(CoralError):
        outline = load_outline(store.manifest["model"]["name"])
        return Forward(outline.block_parameters, outline.head_parameters, outline.n_layers)
    return None
