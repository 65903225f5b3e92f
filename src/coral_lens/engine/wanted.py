"""What is wanted of a model that is not loaded yet, or not here: `all layers`, which each model has its own of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coral_lens.data.settings import Style
from coral_lens.engine.planned import Extraction, all_blocks, all_layers, head_outputs, refuse_layers
from coral_lens.engine.settings import StatePlace

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


@dataclass(frozen=True)
class Wanted:
    """What to extract of a model, before it is known how many layers it has."""

    layers: tuple[int, ...] | None = None
    """None: all of them."""
    heads: tuple[int, ...] | None = ()
    """The blocks whose heads are kept; None: all blocks."""
    read: tuple[StatePlace, ...] = ("answer",)
    """As in `Extraction`."""
    neutral: bool = False
    """As in `Extraction`."""
    style: Style = Style()  # noqa: RUF009  (frozen)
    mixed: bool = False
    """As in `Extraction`."""

    def of(self, model: Model) -> Extraction:
        """Return what that is for a model."""
        layers = all_layers(model) if self.layers is None else self.layers
        refuse_layers(model, layers)
        blocks = all_blocks(model) if self.heads is None else self.heads
        readings = head_outputs(model, blocks) if blocks else None
        return Extraction(layers, self.style, readings=readings, read=self.read, neutral=self.neutral, mixed=self.mixed)
