"""What analyses vary, as settings. Light: they are also options of `coral analyse`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from coral_lens.storage.settings import NO_OPTION, Count, NotEmpty, Range, Settings

ProbeDepth = Annotated[int, Range(0, 4)]
"""Hidden layers of a probe, the paper's first ones; 0 is a linear probe."""


@dataclass(frozen=True)
class DimensionSettings(Settings):
    """How states are decomposed."""

    most: Annotated[int, Range(2)] = 100
    """Principal components to go up to."""
    standardise: bool = False
    """Give every column the same variance before the decomposition; the paper does not say so."""


@dataclass(frozen=True)
class ProbePlan(Settings):
    """Which probes are compared."""

    depths: Annotated[tuple[ProbeDepth, ...], NotEmpty(), NO_OPTION] = (0, 1, 2, 3, 4)
    """Hidden layers that are tried at the usual regularisation."""
    seeds: Count = 3
    """Networks of each kind."""
    grid_depth: ProbeDepth = 4
    """Hidden layers of the network whose regularisation is varied."""
    epochs: Annotated[Count | None, NO_OPTION] = None
    """Epochs of a network, at most; by default as many as those of a lens."""
