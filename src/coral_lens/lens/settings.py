"""How a lens is fitted, as settings. Light: they are also the options of `coral fit` and a method's table in a study."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from coral_lens.data.settings import Style
from coral_lens.errors import CoralError
from coral_lens.storage.settings import (
    LATER,
    NO_OPTION,
    Count,
    Layers,
    OneOf,
    Option,
    Range,
    Seed,
    Settings,
    parse_counts,
    parse_names,
    parse_numbers,
)

FEWEST_QUESTIONS = 20
"""Fewer labelled questions than this are refused."""
FEW_QUESTIONS = 1000
"""Below so many labelled questions, the one who leaves the choice to us gets folds."""
HIDDEN = (1024, 512, 256, 128)
"""The widths of the paper's four hidden layers."""
SEARCHED = ("mlp", "linear")
"""Lenses whose network's settings are searched."""


def lens_names() -> Iterable[str]:
    """Return the lenses that can be fitted."""
    from coral_lens.lens.probes.registry import LENSES

    return (*LENSES, "auto")


def metric_names() -> Iterable[str]:
    """Return the metrics that can choose something on validation questions."""
    from coral_lens.metrics.scores import METRICS

    return METRICS


def input_names() -> Iterable[str]:
    """Return what a probe can be shown beside the states."""
    from coral_lens.lens.features import INPUTS

    return INPUTS


def set_kinds() -> Iterable[str]:
    """Return the kinds of prediction sets."""
    from coral_lens.metrics.conformal import SCORES

    return SCORES


ReadName = Literal["answer", "less-letter", "listed", "context"]
"""Which states stand for an option: an entry of `readouts.READ_OUTS`."""
BaseRule = Literal["sum", "token", "char", "pmi"]
LensName = Annotated[str, OneOf(lens_names)]
Criterion = Annotated[str, OneOf(metric_names)]
Share = Annotated[float, Range(above=0, below=1)]


NotNegative = Annotated[float, Range(0)]
Numbers = Option(read=parse_numbers)


@dataclass(frozen=True)
class NetworkSearch(Settings):
    """How the networks of `mlp` and `linear` are searched and trained."""

    search: Literal["halving", "grid"] = "halving"
    """`grid` trains every setting at every layer to its end, as the paper does. `halving` drops the worse ones early: several
    times faster, and every layer still gets a network of its own, trained to its end."""
    grid: Literal["coarse", "paper"] = "coarse"
    """The settings that are tried: 24 points, or the 80 of the authors' code over the same range."""
    weight_decay: Annotated[tuple[NotNegative, ...], Numbers] = ()
    """Weight decays of AdamW to try, such as `1,45`; by default those of the grid."""
    output_penalty: Annotated[tuple[NotNegative, ...], Numbers] = ()
    """Weights of the mean squared output in the loss to try, the paper's lambda_out; by default those of the grid."""
    learning_rate: Annotated[tuple[Annotated[float, Range(above=0)], ...], Numbers] = ()
    """Learning rates to try; by default those of the grid."""
    dropout: Annotated[float, Range(0, 0.95)] = 0.2
    """Share of the hidden values that each step leaves out."""
    hidden: Annotated[tuple[Count, ...], Option(read=parse_counts)] = ()
    """Widths of the hidden layers, such as `256,128`; by default the paper's 1024, 512, 256 and 128, or the first of them that
    `depth` says."""
    epochs: Count = 100
    """Epochs of a network, at most: it stops when its validation loss has not fallen for a while."""


@dataclass(frozen=True)
class FitSettings(Settings):
    """How a lens is fitted and chosen."""

    lens: LensName = "listwise"
    """`mlp` is the paper's; `ridge` and `linear` are its simpler forms. `listwise`, `listwise-mlp` and `ensemble` go beyond the
    paper. `auto` takes the one with the best cross-validated Brier score on the training questions."""
    base: Literal["sum", "token", "char", "pmi", "auto"] = "token"
    """Score whose softmax is the base probability: `sum`, `token` (mean per token), `char` (lm-eval's acc_norm) or `pmi` (the sum
    less that after a neutral context, which takes one more short pass). `auto` takes the best on validation."""
    style: Style = Style()  # noqa: RUF009  (frozen)
    """How questions without a template of their own are asked."""
    criterion: Criterion = "brier"
    """Validation metric that chooses layer and gamma."""
    layers: Layers = None
    """Layers to try, such as `12-20` or `0,16`; by default all."""
    read: Annotated[Literal["answer", "less-letter", "listed", "context", "auto"], LATER] = "answer"
    """Which states stand for an option. `answer`: its own tokens'. Where letters are scored, also `less-letter` (the same less
    its letter's mean), `listed` (its text's in the prompt's list) and `context` (that times the last token's before the options).
    `auto` takes the best on validation."""
    layer_by: Annotated[Literal["criterion", "r2"], LATER] = "criterion"
    """What chooses among layers: the criterion after steering, or how well the probe predicts residuals."""
    validation: Annotated[Share, NO_OPTION] = 0.2
    """Share of the questions, by whole groups, that choose setting, layer and gamma."""
    stratified: Annotated[bool, LATER, NO_OPTION] = True
    """Whether every task has the same share of them; otherwise they are drawn from all questions alike."""
    folds: Annotated[int, Range(0, 20)] = 1
    """1: one split, as in the paper. More: grouped folds choose, and a lens of closed form is then fitted on everything. 0: five
    folds where there are fewer than 1,000 questions, else one split."""
    inputs: Annotated[tuple[Annotated[str, OneOf(input_names)], ...], Option(read=parse_names)] = ()
    """What the authors' code shows the probe beside the states, and the paper does not: `centred`, `rank`, or both with a
    comma between them."""
    top_layers: Annotated[int, Range(1, 8)] = 1
    """Read this many of the best layers side by side; the paper tries 3 to 5."""
    depth: Annotated[int, Range(1, 4)] = 4
    """Hidden layers of the network of `mlp`; the paper's has 4."""
    network: Annotated[NetworkSearch, LATER] = NetworkSearch()
    """How its settings are searched, and how it is trained."""
    scale_base: bool = False
    """Start from temperature-scaled base probabilities."""
    then_temperature: bool = False
    """Scale the steered probabilities by a temperature fitted on validation questions."""
    temper: bool | None = None
    """Weaken the correction of questions that are unlike the training ones. By default listwise lenses are tempered, and the
    paper's are not."""
    exit_layer: Annotated[Annotated[int, Range(1)] | None, LATER] = None
    """Read nothing above this layer and start from no base probabilities: answers then need neither the blocks above it nor the
    vocabulary head. They are cheaper, and far from home the lens can only be less sure."""
    exit: Annotated[Annotated[str, OneOf(("auto",))] | None, LATER] = None
    """`auto` takes the lowest such layer that is as good as the best, by one standard error on validation."""
    learning_curve: bool = False
    """Fit the chosen lens on fewer questions too, and say how many would have been enough."""
    seed: Seed = 0
    """Seed of the split into training and validation questions, and of networks."""

    def __post_init__(self) -> None:
        from coral_lens.lens.probes.registry import LENSES

        super().__post_init__()
        averages = self.lens != "auto" and LENSES[self.lens].average > 1
        if averages and ("rank" in self.inputs or self.top_layers > 1):
            raise CoralError(
                f"{self.lens} averages probes of single layers: it takes neither rank inputs nor top layers."
            )
        if self.exits and (self.scale_base or self.base in ("pmi", "auto")):
            raise CoralError(
                "A lens that exits early has no base probabilities: leave out scale_base, and base pmi and auto."
            )
        if self.exit_layer is not None and self.exit:
            raise CoralError("Give exit_layer or exit, not both: the one names the layer, the other has it chosen.")
        if self.then_temperature and self.temper:
            raise CoralError("A tempered lens has its own temperature; leave out then_temperature, or do not temper.")
        if self.network != NetworkSearch() and self.lens not in SEARCHED:
            raise CoralError(
                f"A {self.lens} lens has no network to search; leave search, grid and what else is of networks out, or take "
                f"one of {', '.join(SEARCHED)}."
            )
        if self.network.hidden and (self.lens == "linear" or self.depth != len(HIDDEN)):
            raise CoralError("hidden says how deep the network is; leave depth out, and do not take a linear lens.")

    def record(self) -> dict[str, Any]:
        """Return the settings as they are kept and compared; how a network was searched is always said."""
        return super().record() | ({"network": asdict(self.network)} if self.lens in SEARCHED else {})

    def hidden_of(self, kind: str) -> tuple[int, ...]:
        """Return the widths of the hidden layers of a network of this kind; a linear one has none."""
        return () if kind == "linear" else self.network.hidden or HIDDEN[: self.depth]

    @property
    def neutral(self) -> bool:
        """Whether options are scored after a neutral context too."""
        return self.base in ("pmi", "auto")

    @property
    def exits(self) -> bool:
        """Whether the lens is to start from no base probabilities."""
        return self.exit_layer is not None or self.exit is not None

    def within_exit(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the layers that are not above the exit."""
        if self.exit_layer is None:
            return layers
        if not any(layer <= self.exit_layer for layer in layers):
            raise CoralError(f"No layer to try lies at or below the exit layer {self.exit_layer}; give lower --layers.")
        return tuple(layer for layer in layers if layer <= self.exit_layer)

    def tempers(self, kind: str) -> bool:
        """Return whether a lens of this kind is to be tempered."""
        from coral_lens.lens.probes.registry import LENSES

        if self.temper is not None:
            return self.temper
        return LENSES[kind].rule == "listwise" and not self.then_temperature


@dataclass(frozen=True)
class Guarantees(Settings):
    """What is to be promised of a lens's answers; None promises nothing."""

    coverage: Share | None = 0.9
    """Share of questions whose prediction set holds the right option."""
    kind: Annotated[str, OneOf(set_kinds), Option("--sets")] = "lac"
    """How prediction sets are formed: `lac` (the smallest on average), `aps` or `raps`."""
    risk: Share | None = None
    """Abstain so often that at most this share of the given answers is wrong."""
    delta: Annotated[Share, NO_OPTION] = 0.1
    """Chance that the risk is exceeded all the same."""
