"""Which layers know: a ridge probe and its steering at every layer, several layers side by side, and what leaving early costs.

Everything is scored out of fold, and what is chosen is chosen on the other folds (see `folds`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coral_lens.analysis.files import ArrayJournal, kept_arrays
from coral_lens.analysis.folds import (
    Folded,
    FoldedSteering,
    choose_steering,
    combined,
    described,
    fit_steering,
    identity_of,
    nested_ridge,
    refuse_too_wide,
)
from coral_lens.analysis.scores import SHOWN, r2_scores, scores_of
from coral_lens.errors import CoralError
from coral_lens.metrics.comparisons import Difference, paired_difference
from coral_lens.metrics.scores import Score
from coral_lens.records import Scored
from coral_lens.storage.arrays import side_by_side
from coral_lens.storage.progress import Bar, silent

TOP = (3, 4, 5)
"""How many of the best layers are read side by side, as the paper tries."""
Scores = dict[str, Score]


@dataclass(frozen=True)
class Forward:
    """What the parts of a forward pass cost, in parameters: each is multiplied once a token. Attention scores are not counted."""

    block: int
    head: int
    n_blocks: int

    def share(self, layer: int) -> float:
        """Return the share of a plain forward pass that the states of a layer need; embeddings are looked up."""
        return layer * self.block / (self.n_blocks * self.block + self.head)


@dataclass(frozen=True)
class LayerRow:
    """One layer."""

    layer: int
    r2: Score
    """How well residuals are predicted, out of fold."""
    gamma: float
    """Mean of the strengths chosen for the folds."""
    at_one: Scores
    """Steered at gamma = 1, as the paper shows it."""
    chosen: Scores
    """Steered at the chosen gamma."""
    share: float
    """The share of the forward pass that the states of this layer need."""
    exit_here: Scores
    """A lens on this layer without any base probability: what remains when the pass stops here."""
    exit_best: Scores
    """The same on the best layer up to here, as chosen on the other folds."""


@dataclass(frozen=True)
class TopRow:
    """The best layers side by side."""

    n_layers: int
    layers: list[list[int]]
    """By fold, because they are chosen without it."""
    scores: Scores
    behind_single: dict[str, Difference]
    """The scores less those of the best single layer, paired."""


@dataclass(frozen=True)
class LayerAnalysis:
    """Every layer of one model on one set of questions."""

    model: str
    task: str
    n_questions: int
    base_rule: str
    base: Scores
    blind: Scores
    """All options equally probable: where a lens without a base begins."""
    single: Scores
    """The best layer, chosen on the other folds."""
    single_layers: list[int]
    rows: tuple[LayerRow, ...]
    top: tuple[TopRow, ...]


def analyse_layers(
    store: Scored,
    data: Folded,
    *,
    forward: Forward | None = None,
    base_rule: str = "token",
    work: Path | None = None,
    bar: Bar = silent,
) -> LayerAnalysis:
    """Analyse all layers of a store; with `work` a killed analysis goes on where it was.

    Without `forward` the vocabulary head counts nothing.
    """
    layers = store.layers
    if len(layers) < 2:
        raise CoralError(
            f"The store holds layer {layers[0]} only, and layers are to be compared; make one that has all: `coral extract "
            "TASK --out NEW_FOLDER`, without --layers."
        )
    sizes = [m for m in TOP if m <= len(layers)]
    rows, width = store.layer(layers[0]).shape
    refuse_too_wide(rows, width * max([1, *sizes]), data.n_folds)
    with (
        kept_arrays(work, identity_of(store, data)) as journal,
        bar("analysing layers", len(layers) + len(sizes), "fits") as advance,
    ):
        steered, exits = steer_by_layers(store, data, journal, advance)
        best = best_by_fold(steered)
        single = combined(steered, best, data)
        top = []
        for m in sizes:
            top.append(top_row(store, data, best_layers(layers, steered, m), single, journal))
            advance(1)
    cost = forward or Forward(1, 0, int(store.manifest["model"].get("layers", max(layers))))
    return LayerAnalysis(
        **described(store),
        base_rule=base_rule,
        base=scores_of(data.predictions("base", data.p)),
        blind=scores_of(data.predictions("blind", data.blind().p)),
        single=scores_of(data.predictions("single", single.probs(data))),
        single_layers=[layers[i] for i in best],
        rows=layer_rows(layers, data, steered, exits, cost),
        top=tuple(top),
    )


def steer_by_layers(
    store: Scored, data: Folded, journal: ArrayJournal, advance: Callable[[int], None]
) -> tuple[list[FoldedSteering], list[FoldedSteering]]:
    """Return the steering by every layer, of the base probabilities and of equal ones."""
    steered, exits, blind = [], [], data.blind()
    for layer in store.layers:
        steered.append(kept_steering(journal, [layer, False], partial(layer_steering, store, layer, data)))
        exits.append(kept_steering(journal, [layer, True], partial(layer_steering, store, layer, blind)))
        advance(1)
    return steered, exits


def best_by_fold(steered: Sequence[FoldedSteering]) -> list[int]:
    """Return for each fold the place of the layer with the lowest Brier score on the other folds."""
    return [int(i) for i in np.argmin([s.cost for s in steered], axis=0)]


def layer_rows(
    layers: Sequence[int],
    data: Folded,
    steered: Sequence[FoldedSteering],
    exits: Sequence[FoldedSteering],
    cost: Forward,
) -> tuple[LayerRow, ...]:
    """Score every layer."""
    blind = data.blind()
    r2 = r2_scores(data.r, np.stack([s.r_hat for s in steered]), data.table.options, data.groups)
    rows = []
    for i, layer in enumerate(layers):
        upto = combined(exits, best_by_fold(exits[: i + 1]), blind)
        rows.append(
            LayerRow(
                layer=layer,
                r2=r2[i],
                gamma=float(steered[i].gamma.mean()),
                at_one=scores_of(data.predictions("at one", steered[i].probs(data, 1.0))),
                chosen=scores_of(data.predictions("chosen", steered[i].probs(data))),
                share=cost.share(layer),
                exit_here=scores_of(data.predictions("exit", exits[i].probs(blind))),
                exit_best=scores_of(data.predictions("exit", upto.probs(blind))),
            )
        )
    return tuple(rows)


def layer_steering(store: Scored, layer: int, data: Folded) -> FoldedSteering:
    """Return the steering by one layer."""
    return fit_steering(store.layer(layer), data)


def kept_steering(journal: ArrayJournal, key: Any, make: Callable[[], FoldedSteering]) -> FoldedSteering:
    """Return a steering that a journal keeps."""
    return FoldedSteering(**journal.arrays(key, lambda: vars(make())))


def best_layers(layers: Sequence[int], steered: Sequence[FoldedSteering], m: int) -> list[list[int]]:
    """Return the m best layers for each fold, chosen on the other folds."""
    order = np.argsort([s.cost for s in steered], axis=0)[:m]
    return [sorted(layers[i] for i in places) for places in order.T]


def top_row(
    store: Scored, data: Folded, chosen: list[list[int]], single: FoldedSteering, journal: ArrayJournal
) -> TopRow:
    """Read the layers that were chosen for each fold side by side."""
    by_fold: dict[int, FoldedSteering] = {}
    for layers in sorted({tuple(layers) for layers in chosen}):
        folds = [k for k, others in enumerate(chosen) if tuple(others) == layers]
        steering = kept_steering(journal, [list(layers), folds], partial(top_steering, store, layers, data, folds))
        by_fold |= dict.fromkeys(folds, steering)
    several = combined([by_fold[k] for k in range(data.n_folds)], range(data.n_folds), data)
    ours, theirs = (data.predictions(name, s.probs(data)) for name, s in (("top", several), ("single", single)))
    differences = {name: paired_difference(ours, theirs, name) for name in SHOWN}
    return TopRow(len(chosen[0]), chosen, scores_of(ours), differences)


def top_steering(store: Scored, layers: Sequence[int], data: Folded, folds: Sequence[int]) -> FoldedSteering:
    """Return the steering by layers side by side, for the folds for which these were chosen."""
    x = side_by_side(store.layer, layers)
    return choose_steering(nested_ridge(x, data, folds), data, folds)
