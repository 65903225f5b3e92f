"""What analyses vary, as settings. Light: they are also options of `coral analyse`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from coral_lens.errors import CoralError
from coral_lens.lens.settings import FitSettings, NetworkSearch
from coral_lens.storage.settings import NO_OPTION, Count, Layers, NotEmpty, Range, Settings

ProbeDepth = Annotated[int, Range(0, 4)]
"""Hidden layers of a probe, the paper's first ones; 0 is a linear probe."""


@dataclass(frozen=True)
class LayerPlan(Settings):
    """Which probe is fitted at every layer."""

    lens: Literal["ridge", "linear", "mlp"] = "ridge"
    """`ridge` has a closed form and takes seconds. `mlp` is the paper's own probe, `linear` its network without hidden layers:
    both are searched and trained at every layer, as `coral fit` does it."""
    layers: Layers = None
    """Layers to analyse, such as `12-20`; by default all."""
    side_by_side: bool = True
    """Read the best 3, 4 and 5 layers side by side too, as the paper tries."""
    tested_folds: Annotated[int, Range(1, 5)] = 5
    """Networks only: test this many of five folds. 5 tests every question once; 1 trains on 60, chooses on 20 and tests on 20 per
    cent of the questions, as the paper does."""
    network: NetworkSearch = NetworkSearch()  # noqa: RUF009  (frozen)
    """How networks are searched and trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        searched = (self.network, self.tested_folds) != (NetworkSearch(), 5)
        if self.lens == "ridge" and searched:
            raise CoralError(
                "Ridge has a closed form: it is not searched and tests every fold; take --lens mlp, or leave search, grid, "
                "tested-folds and what else is of networks out."
            )

    def settings(self, layers: tuple[int, ...], *, seed: int) -> FitSettings:
        """Return how a network is fitted."""
        return FitSettings(lens=self.lens, layers=layers, network=self.network, seed=seed)


@dataclass(frozen=True)
class DimensionSettings(Settings):
    """How states are decomposed."""

    most: Annotated[int, Range(2)] = 100
    """Principal components to go up to."""
    standardise: bool = False
    """Give every column the same variance before the decomposition; the paper does not say so."""
    embedding: bool = True
    """Count the embedding as layer 0. Without it the outputs of the blocks are grouped and called from 0, so that 30 blocks are
    the paper's six groups, 0 to 4 up to 25 to 29."""


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
