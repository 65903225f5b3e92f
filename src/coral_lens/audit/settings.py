"""What an audit measures and fits, as settings. Light: they are also options of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from coral_lens.errors import CoralError
from coral_lens.storage.settings import Option, Range, Seed, Settings

Share = Annotated[float, Range(above=0, below=1)]
MapName = Literal["temperature", "isotonic", "none"]
"""How probabilities are changed before sets and the threshold are fitted on them."""


@dataclass(frozen=True)
class AuditSettings(Settings):
    """What is measured, and what is fitted on one part and measured on another."""

    by: tuple[str, ...] = ()
    """A column whose values divide the questions into subgroups; may be given several times."""
    precision: Share | None = None
    """Find the confidence above which at least this share of answers is right, with its guarantee."""
    risk: Share | None = None
    """The same, said the other way: at most this share of the answers above it is wrong."""
    certainty: Share = 0.9
    """How certain the guarantee of the threshold is to hold, over draws of the questions that it was fitted on."""
    coverage: Share = 0.9
    """Share of questions whose prediction set holds the right option."""
    map: Annotated[MapName, Option("--map")] = "temperature"
    """What sets and the threshold stand on, and what --apply uses: `temperature`, `isotonic`, or `none`."""
    fit_share: Share = 0.5
    """Share of the questions that maps, sets and the threshold are fitted on; the others measure them."""
    seed: Seed = 0
    """Seed of that division, and of all resamples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision is not None and self.risk is not None:
            raise CoralError(
                "--precision and --risk are two ways to say one thing (0.95 is a risk of 0.05); give one of them."
            )

    @property
    def stated_risk(self) -> float | None:
        """The error rate that the threshold must keep; None where none was stated."""
        return self.risk if self.precision is None else round(1.0 - self.precision, 12)
