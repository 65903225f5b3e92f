"""How a lens is fitted, as settings. Light: it is also the command line and a table of a study."""

from __future__ import annotations

from dataclasses import dataclass

from coral_lens.data.splits import MOST_SEED
from coral_lens.errors import CoralError, nearest
from coral_lens.lens.features import check_inputs
from coral_lens.lens.rules import BASE_SCORES, BaseRule
from coral_lens.metrics.scores import METRICS
from coral_lens.records import Style

FEWEST = 20
"""Fewer labelled questions than this are refused."""


@dataclass(frozen=True)
class FitSettings:
    """How a lens is fitted and chosen."""

    lens: str = "listwise"
    """A row of the table of lenses (`ridge`, `linear`, `mlp`, `listwise`, `listwise-mlp`, `ensemble`), or `auto`: the one with
    the best cross-validated Brier score on the training questions."""
    base: BaseRule = "token"
    """Score whose softmax is the base probability: `sum`, `token` (mean per token) or `char`."""
    style: Style = Style()  # noqa: RUF009  (frozen)
    """How questions without a template of their own are asked."""
    criterion: str = "brier"
    """The validation metric by which layer and gamma are chosen."""
    layers: tuple[int, ...] | None = None
    """Layers to try; None tries all."""
    validation: float = 0.2
    """Share of the questions, by whole groups, that choose setting, layer and gamma."""
    folds: int = 1
    """1: one split, as in the paper. More: grouped folds choose, and a lens of closed form is then fitted on everything."""
    inputs: tuple[str, ...] = ()
    """What the authors' code adds to the states and the paper does not: `centred`, `rank`."""
    top_layers: int = 1
    """So many of the best layers are read side by side (the paper tries 3 to 5)."""
    depth: int = 4
    """Hidden layers of the network of `mlp`, 1 to 4."""
    scale_base: bool = False
    """Start from temperature-scaled base probabilities."""
    then_temperature: bool = False
    """Scale the steered probabilities by a temperature fitted on validation."""
    temper: bool | None = None
    """Weaken the correction by the question's shift. None: listwise lenses are tempered, the paper's are not."""
    learning_curve: bool = False
    """Fit the chosen lens on fewer questions too, and say how many would have been enough."""
    seed: int = 0

    def __post_init__(self) -> None:
        from coral_lens.lens.probes.mlp import HIDDEN
        from coral_lens.lens.probes.registry import KINDS

        known = {"lens": (*KINDS, "auto"), "base": tuple(BASE_SCORES), "criterion": tuple(METRICS)}
        for name, values in known.items():
            value = getattr(self, name)
            if value not in values:
                raise CoralError(f"Unknown {name} {value!r}; use one of {', '.join(values)}.{nearest(value, values)}")
        if not 0.0 < self.validation < 1.0:
            raise CoralError(f"The validation share must lie between 0 and 1. Got {self.validation} instead.")
        ranges = (("folds", 1, 20), ("top_layers", 1, 8), ("depth", 1, len(HIDDEN)), ("seed", 0, MOST_SEED))
        for name, low, high in ranges:
            if not low <= getattr(self, name) <= high:
                raise CoralError(f"{name} must lie between {low} and {high}. Got {getattr(self, name)} instead.")
        check_inputs(self.inputs)
        averages = self.lens != "auto" and KINDS[self.lens].average > 1
        if averages and ("rank" in self.inputs or self.top_layers > 1):
            raise CoralError(
                f"{self.lens} averages probes of single layers: it takes neither rank inputs nor top layers."
            )
        if self.then_temperature and self.temper:
            raise CoralError("A tempered lens has its own temperature; leave out then_temperature, or do not temper.")

    def tempers(self, kind: str) -> bool:
        """Return whether a lens of this kind is to be tempered."""
        from coral_lens.lens.probes.registry import KINDS

        if self.temper is not None:
            return self.temper
        return KINDS[kind].rule == "listwise" and not self.then_temperature
