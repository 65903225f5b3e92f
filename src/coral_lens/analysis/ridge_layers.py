"""Ridge at every layer of a store, out of fold (see `folds`), and on several layers side by side as far as memory reaches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from coral_lens.analysis.files import ArrayJournal
from coral_lens.analysis.folds import (
    Folded,
    FoldedSteering,
    choose_steering,
    combined,
    fit_steering,
    nested_ridge,
    refuse_too_wide,
    too_wide,
)
from coral_lens.records import Scored
from coral_lens.storage.arrays import side_by_side
from coral_lens.storage.progress import Bar


def sizes_that_fit(store: Scored, wanted: Sequence[int], data: Folded) -> tuple[list[int], str]:
    """Return which numbers of layers ridge can read side by side, and why not more; a single layer must fit into memory."""
    rows, width = store.layer(store.layers[0]).shape
    refuse_too_wide(rows, width, data.n_folds)
    sizes = [m for m in wanted if not too_wide(rows, width * m, data.n_folds)]
    if sizes == list(wanted):
        return sizes, ""
    refused = next(m for m in wanted if m not in sizes)
    return sizes, f"{refused} layers are not read side by side: {too_wide(rows, width * refused, data.n_folds)}."


@dataclass(frozen=True)
class RidgeLayers:
    """Ridge probes of the layers of a store, kept as they are fitted."""

    store: Scored
    data: Folded
    journal: ArrayJournal
    bar: Bar

    def by_layer(self, layers: Sequence[int]) -> tuple[list[FoldedSteering], list[FoldedSteering]]:
        """Return the steering by every layer, of the base probabilities and of equal ones."""
        steered, exits, blind = [], [], self.data.blind()
        with self.bar("analysing layers", len(layers), "layers") as advance:
            for layer in layers:
                steered.append(self.kept([layer, False], partial(layer_steering, self.store, layer, self.data)))
                exits.append(self.kept([layer, True], partial(layer_steering, self.store, layer, blind)))
                advance(1)
        return steered, exits

    def side_by_side(self, chosen: Mapping[int, tuple[int, ...]]) -> FoldedSteering:
        """Return the steering by several layers, for each fold those that were chosen for it."""
        by_fold: dict[int, FoldedSteering] = {}
        groups = sorted(set(chosen.values()))
        with self.bar(f"{len(groups[0])} layers side by side", len(groups), "fits") as advance:
            for layers in groups:
                folds = [k for k, others in chosen.items() if others == layers]
                make = partial(top_steering, self.store, layers, self.data, folds)
                by_fold |= dict.fromkeys(folds, self.kept([list(layers), folds], make))
                advance(1)
        return combined([by_fold[k] for k in sorted(chosen)], {k: k for k in chosen}, self.data)

    def kept(self, key: Any, make: Callable[[], FoldedSteering]) -> FoldedSteering:
        """Return a steering that the journal keeps."""
        return FoldedSteering(**self.journal.arrays(key, lambda: vars(make())))


def layer_steering(store: Scored, layer: int, data: Folded) -> FoldedSteering:
    """Return the steering by one layer."""
    return fit_steering(store.layer(layer), data)


def top_steering(store: Scored, layers: Sequence[int], data: Folded, folds: Sequence[int]) -> FoldedSteering:
    """Return the steering by layers side by side, for the folds for which these were chosen."""
    x = side_by_side(store.layer, layers)
    return choose_steering(nested_ridge(x, data, folds), data, folds)
