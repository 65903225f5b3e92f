"""The settings of the paper's network that a search tries. The paper names no values; the authors' code does."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from coral_lens.lens.probes.mlp import MlpSettings
from coral_lens.lens.settings import HIDDEN, NetworkSearch


@dataclass(frozen=True)
class GridAxes:
    """What a grid varies, every value with every other, and how long its networks wait for a better loss."""

    weight_decay: tuple[float, ...]
    output_penalty: tuple[float, ...]
    learning_rate: tuple[float, ...]
    patience: int


GRIDS = {
    "coarse": GridAxes((0.1, 1.0, 10.0, 45.0), (0.0, 0.1, 0.5), (3e-4, 1e-3), 10),
    "paper": GridAxes((0.0, 0.1, 1.0, 5.0, 10.0, 25.0, 30.0, 45.0), (0.0, 0.01, 0.1, 0.25, 0.5), (3e-4, 1e-3), 30),
}
"""`paper`: the weight decays, output penalties and patience of the paper's authors, at their learning rate and a smaller one.
`coarse`: 24 points over the same range. AdamW's decay multiplies the learning rate: 45 at 1e-3 is 4.5 % a step."""


def grid_of(network: NetworkSearch, hidden: tuple[int, ...] = HIDDEN) -> tuple[MlpSettings, ...]:
    """Return the points that a search tries, each once: those of the grid, with other values where some were asked for."""
    axes = GRIDS[network.grid]
    points = (
        MlpSettings(
            weight_decay=decay,
            output_penalty=penalty,
            learning_rate=rate,
            dropout=network.dropout,
            hidden=hidden,
            max_epochs=network.epochs,
            patience=axes.patience,
        )
        for decay, penalty, rate in product(
            network.weight_decay or axes.weight_decay,
            network.output_penalty or axes.output_penalty,
            network.learning_rate or axes.learning_rate,
        )
    )
    return tuple(dict.fromkeys(points))


GRID, PAPER_GRID = (grid_of(NetworkSearch(grid=name)) for name in ("coarse", "paper"))


def decay_of_step(settings: MlpSettings) -> float:
    """Return the share of every weight that one step of AdamW takes away."""
    return settings.learning_rate * settings.weight_decay
