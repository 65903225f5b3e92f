"""`coral analyse`: what a run, or the states behind it, show beyond its table. Each command writes tables and figures.

`confidence` needs predictions only; `layers`, `dimensions`, `heads`, `data` and `probes` say from activation stores where
correctness lives, how many labels it takes, and how far it carries.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coral_lens.analysis.settings import DimensionSettings, LayerPlan, ProbePlan
from coral_lens.cli.options import TrainingPlace, beside, flat
from coral_lens.errors import CoralError, need
from coral_lens.lens.settings import BaseRule, FitSettings, LensName
from coral_lens.storage.settings import Count, Layers, Option, Range, Seed, Settings

if TYPE_CHECKING:
    from coral_lens.analysis.folds import Folded
    from coral_lens.analysis.layers import Forward
    from coral_lens.engine.activations import ActivationStore, JoinedStore


app = typer.Typer(no_args_is_help=True)


@app.callback()
def analyse() -> None:
    """Look closer: tables and figures that `coral report` gathers in a run's page."""


# --------------------------------------------------------------------------------------------------------- confidence


@dataclass(frozen=True)
class Drawing(Settings):
    """What is drawn, and where it goes."""

    methods: Annotated[tuple[str, ...], Option("--method")] = ()
    """Draw this method; may be given several times. By default base, temperature and the lens."""
    bins: Annotated[int, Range(2, 100)] = 10
    """Bins of the reliability diagrams."""
    out: Path | None = None
    """Folder for tables and figures. By default analysis/confidence in the run's."""


@app.command()
@flat
def confidence(
    run: Annotated[Path, typer.Argument(help="Folder made by `coral eval --out`, `coral demo` or a study.")],
    *,
    drawing: Drawing,
) -> None:
    """Reliability in bins of both kinds, risk against coverage, confidence before and after, subjects, position bias.

    Needs predictions only: lm-eval's logs will do (`coral eval --lm-eval-samples`). Example: `coral analyse confidence run`
    """
    from coral_lens.report.figures.confidence import confidence_findings
    from coral_lens.report.findings import FOLDER, write_findings
    from coral_lens.report.runs import load_run

    need("report", by="coral analyse confidence")
    out = drawing.out or run / FOLDER / "confidence"
    findings = confidence_findings(load_run(run), methods=drawing.methods, n_bins=drawing.bins)
    names = write_findings(findings, out)
    for name in names:
        typer.echo(f"{out / name}.csv .json .svg .png")
    typer.echo(f"{len(names)} findings." if drawing.out else f"`coral report {run}` puts them into its page.")


# ------------------------------------------------------------------------------------------------------ states of a task


@dataclass(frozen=True)
class Studied(Settings):
    """What is analysed, and where the table and the figures go."""

    store: tuple[str, ...]
    """Made by `coral extract`, of labelled questions: a folder or an address; several are read as one."""
    out: Path = Path("analysis")
    """Folder for NAME.csv, NAME.json, NAME.png and NAME.svg."""
    limit: Count | None = None
    """At most this many questions of each store, the first ones."""
    base: BaseRule = "token"
    """Score whose softmax is the base probability: `sum`, `token` (mean per token), `char` (lm-eval's acc_norm) or `pmi` (the sum
    less that after a neutral context, of stores made with `coral extract --neutral`)."""
    seed: Seed = 0
    """Seed of the division into folds."""

    def opened(self) -> tuple[JoinedStore, Folded]:
        """Return the stores as one, and their questions in five folds."""
        from coral_lens.analysis.folds import divide_into_folds
        from coral_lens.engine.activations import ActivationStore, JoinedStore, first_questions

        store = JoinedStore([first_questions(ActivationStore(folder), self.limit) for folder in self.store])
        return store, divide_into_folds(store, base=self.base, seed=self.seed)


@app.command()
@flat
def layers(*, studied: Studied, plan: LayerPlan, place: TrainingPlace) -> None:
    """Probe every layer: R2, steered accuracy and ECE, layers side by side, and what leaving the model early costs.

    With `--lens mlp` the probe is the paper's network, searched and trained at every layer: minutes to hours.
    Example: `coral analyse layers --store states/csqa --out analysis`
    """
    from coral_lens.analysis.layers import LayerWork, analyse_layers
    from coral_lens.cli.printing import print_layers
    from coral_lens.storage.progress import shown

    begin("layers", studied.out)
    store, data = studied.opened()
    work = LayerWork(beside(studied.out) / "layers", shown, place.usable())
    analysis = analyse_layers(store, data, plan, forward=forward_of(store), work=work)
    write(studied.out, "layers", analysis)
    print_layers(analysis)


def forward_of(store: JoinedStore) -> Forward | None:
    """Return what the parts of the model cost, where its configuration is at hand; no weights are read."""
    from coral_lens.analysis.layers import Forward
    from coral_lens.engine.loading import load_outline

    with suppress(CoralError):
        outline = load_outline(store.manifest["model"]["name"])
        return Forward(outline.block_parameters, outline.head_parameters, outline.n_layers)
    return None


@app.command()
@flat
def dimensions(*, studied: Studied, settings: DimensionSettings) -> None:
    """Ask how many directions the signal needs: R2 against the number of principal components, by groups of layers.

    Example: `coral analyse dimensions --store states/csqa --out analysis`
    """
    from coral_lens.analysis.dimensions import analyse_dimensions
    from coral_lens.cli.printing import print_dimensions
    from coral_lens.storage.progress import shown

    begin("dimensions", studied.out)
    store, data = studied.opened()
    analysis = analyse_dimensions(store, data, settings, work=beside(studied.out) / "dimensions", bar=shown)
    write(studied.out, "dimensions", analysis)
    print_dimensions(analysis)


@dataclass(frozen=True)
class StudiedHeads(Studied):
    """What is analysed, and where the table and the figures go."""

    store: tuple[str, ...] = ()
    """Folder made by `coral extract --heads all`, of labelled questions; several are read as one."""
    dry_run: bool = False
    """Say how much memory and time it would take here, and stop."""
    shape: str | None = None
    """With --dry-run, instead of a store: BLOCKSxHEADSxDIM, such as `30x32x128`."""
    rows: Count = 8000
    """With --shape: options of all questions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape is not None and not self.dry_run:
            raise CoralError("--shape stands in for a store in a --dry-run only; give --dry-run or --store.")
        if self.shape is None and not self.store:
            raise CoralError("Give --store, a folder made by `coral extract TASK --out FOLDER --heads all`.")


@app.command()
@flat
def heads(*, studied: StudiedHeads, place: TrainingPlace) -> None:
    """Probe every attention head: is the signal in a few heads or in many? All heads and folds are trained in stacks.

    Example: `coral analyse heads --store states/csqa --out analysis`, or `coral analyse heads --dry-run --shape 30x32x128`
    """
    from coral_lens.analysis.heads import HeadTraining, analyse_heads, plan_heads, shape_of, shape_of_store
    from coral_lens.cli.printing import print_head_plan, print_heads
    from coral_lens.storage.progress import shown

    if studied.shape is not None:
        return print_head_plan(plan_heads(shape_of(studied.shape, studied.rows)))
    if not studied.dry_run:
        begin("heads", studied.out)
    store, data = studied.opened()
    if studied.dry_run:
        return print_head_plan(plan_heads(shape_of_store(store)))
    training = HeadTraining(device=place.usable())
    analysis = analyse_heads(store, data, training=training, work=beside(studied.out) / "heads", bar=shown)
    write(studied.out, "heads", analysis)
    print_heads(analysis)


# ----------------------------------------------------------------------------------------------- states of several tasks


@dataclass(frozen=True)
class Compared(Settings):
    """Stores of one or more tasks, and how lenses are fitted on them."""

    store: tuple[str, ...]
    """Made by `coral extract`, a folder or an address; several are several tasks, and so are the tasks within one."""
    out: Path = Path("analysis")
    """Folder for tables and figures."""
    base: BaseRule = "token"
    """Score whose softmax is the base probability: `sum`, `token` (mean per token), `char` (lm-eval's acc_norm) or `pmi` (the sum
    less that after a neutral context, of stores made with `coral extract --neutral`)."""
    layers: Layers = None
    """Layers to try, such as `12-20`; by default all."""
    seed: Seed = 0
    """Seed of the split into training and validation questions."""

    def settings(self, lens: str) -> FitSettings:
        """Return how lenses are fitted: untempered, as in the paper."""
        return FitSettings(lens=lens, base=self.base, layers=self.layers, temper=False, seed=self.seed)

    def stores(self) -> list[ActivationStore]:
        """Return the stores."""
        from coral_lens.engine.activations import ActivationStore

        return [ActivationStore(folder) for folder in self.store]

    def tasks(self, stores: list[ActivationStore]) -> list[str]:
        """Return what counts as a task, and say what is missing if it is one only."""
        from coral_lens.analysis.held_out import tasks_of

        tasks = tasks_of(stores)
        if len(tasks) == 1:
            typer.echo(f"One task only, {tasks[0]}: nothing is said of transfer; give another --store for that.")
        return tasks


@dataclass(frozen=True)
class Curves(Settings):
    """Which learning curves are drawn."""

    lens: LensName = "ridge"
    """Lens that is fitted: `ridge` (the paper's form in closed form), `mlp`, `listwise`, ..."""
    draws: Count = 3
    """Drawings of the questions at each size of a learning curve."""


@app.command()
@flat
def data(*, compared: Compared, curves: Curves, place: TrainingPlace) -> None:
    """Learning curves, and how a lens of each task does on each other task, with the shift between them.

    Example: `coral analyse data --store states/csqa --store states/arc --out analysis`
    """
    from coral_lens.analysis.data import analyse_curves, analyse_transfer
    from coral_lens.cli.printing import print_learning_curves, print_transfer
    from coral_lens.storage.progress import shown

    begin("data", compared.out)
    settings, stores = compared.settings(curves.lens), compared.stores()
    tasks, journal = compared.tasks(stores), beside(compared.out) / "data.jsonl"
    device = place.usable()
    learning = analyse_curves(stores, settings, draws=curves.draws, journal=journal, bar=shown, device=device)
    write(compared.out, "data-curves", learning)
    print_learning_curves(learning)
    if len(tasks) > 1:
        transfer = analyse_transfer(stores, settings, journal=journal, bar=shown, device=device)
        write(compared.out, "data", transfer)
        print_transfer(transfer)


@app.command()
@flat
def probes(
    train: Annotated[
        str | None, typer.Option(metavar="TASK", help="Task to fit on; the others are transfer. By default the first.")
    ] = None,
    *,
    compared: Compared,
    plan: ProbePlan,
    place: TrainingPlace,
) -> None:
    """Compare probes: depth, regularisation and strength, in distribution and on the other tasks.

    Example: `coral analyse probes --store states/csqa --store states/arc --out analysis`
    """
    from coral_lens.analysis.probes import analyse_probes
    from coral_lens.cli.printing import print_probes
    from coral_lens.storage.progress import shown

    begin("probes", compared.out)
    stores = compared.stores()
    tasks = compared.tasks(stores)
    if train is not None and train not in tasks:
        raise CoralError(f"No store has questions of {train!r}; the tasks are {', '.join(tasks)}.")
    settings, journal = compared.settings("ridge"), beside(compared.out) / "probes.jsonl"
    train, device = train or tasks[0], place.usable()
    analysis = analyse_probes(stores, train, settings, plan=plan, journal=journal, bar=shown, device=device)
    write(compared.out, "probes", analysis)
    print_probes(analysis)


def begin(name: str, out: Path) -> None:
    """Refuse before anything is computed what would fail at the end: figures that cannot be drawn, files of somebody else."""
    need("report", by=f"coral analyse {name}")
    from coral_lens.report.figures.analysis import refuse_other_files

    refuse_other_files(name, out)


def write(out: Path, name: str, record: Any) -> None:
    """Write an analysis and its figures, and say where."""
    from coral_lens.analysis.files import write_analysis
    from coral_lens.report.figures.analysis import write_analysis_pictures
    from coral_lens.report.figures.paper import write_paper_figure

    plain = write_analysis(name, record, out)
    pictures = [*write_analysis_pictures(plain, out), write_paper_figure(plain, out)]
    pictures = [picture for picture in pictures if picture]
    typer.echo(f"{name}.csv, {name}.json, {', '.join(f'{p}.png' for p in pictures)} (and .svg) in {out}")
