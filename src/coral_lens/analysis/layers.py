"""Which layers know: a probe and its steering at every layer, several layers side by side, and what leaving early costs.

The probe is ridge, or the paper's network (see `network_layers`). Everything is scored out of fold, and what is chosen is
chosen on the other folds (see `folds`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float

from coral_lens.analysis.files import ArrayJournal, kept_arrays
from coral_lens.analysis.folds import Folded, FoldedSteering, combined, described, identity_of
from coral_lens.analysis.network_layers import NetworkLayers, NetworkProbes
from coral_lens.analysis.ridge_layers import RidgeLayers, sizes_that_fit
from coral_lens.analysis.scores import N_BOOT, SHOWN, StrengthRow, r2_scores, scores_of, strength_rows
from coral_lens.analysis.settings import LayerPlan
from coral_lens.errors import CoralError
from coral_lens.lens.rules import GAMMAS
from coral_lens.metrics.comparisons import Difference, paired_difference
from coral_lens.metrics.scores import Score
from coral_lens.records import Scored
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
    exit_here: Scores | None = None
    """A lens on this layer without any base probability: what remains when the pass stops here. Of ridge only."""
    exit_best: Scores | None = None
    """The same on the best layer up to here, as chosen on the other folds."""
    at_one_gain: dict[str, Difference] = field(default_factory=dict)
    """The scores at gamma = 1 less the unsteered ones, paired."""


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
    lens: str = "ridge"
    n_tested: int = 0
    """Questions that are scored."""
    gammas: tuple[StrengthRow, ...] = ()
    """The best layer at every strength, against a strength of 1."""
    single_gain: dict[str, Difference] = field(default_factory=dict)
    """The scores of the best layer less the unsteered ones, paired."""
    left_out: str = ""
    """Why layers are not read side by side, where they are not."""


@dataclass(frozen=True)
class LayerWork:
    """Where an analysis of layers keeps what it has done, what shows how far it is, and where networks are trained."""

    folder: Path | None = None
    """With it, a killed analysis goes on where it was."""
    bar: Bar = silent
    device: str = "cpu"


AT_ONCE = LayerWork()
"""Nothing is kept and nothing is shown."""


def analyse_layers(
    store: Scored,
    data: Folded,
    plan: LayerPlan | None = None,
    *,
    forward: Forward | None = None,
    work: LayerWork = AT_ONCE,
) -> LayerAnalysis:
    """Analyse the layers of a store. Without `forward` the vocabulary head counts nothing."""
    plan = plan or LayerPlan()
    layers = plan.layers or store.layers
    refuse_layers_of(store, layers)
    data = data if plan.tested_folds == data.n_folds else replace(data, tested=tuple(range(plan.tested_folds)))
    sizes, left_out = [m for m in TOP if m <= len(layers) and plan.side_by_side], ""
    if plan.lens == "ridge":
        sizes, left_out = sizes_that_fit(store, sizes, data)
    with kept_arrays(work.folder, identity_of(store, data)) as journal:
        steering = layer_probes(store, data, plan, work, journal)
        steered, exits = steering.by_layer(layers)
        best = best_by_fold(steered, data.scored_folds)
        single = combined(steered, best, data)
        top = [
            top_row(data, chosen, steering.side_by_side(chosen), single)
            for chosen in (best_layers(layers, steered, m, data.scored_folds) for m in sizes)
        ]
    cost = forward or Forward(1, 0, int(store.manifest["model"].get("layers", max(layers))))
    return LayerAnalysis(
        **described(store),
        base_rule=data.base_rule,
        base=scores_of(data.predictions("base", data.p)),
        blind=scores_of(data.predictions("blind", data.blind().p)),
        single=scores_of(data.predictions("single", single.probs(data))),
        single_layers=[layers[i] for i in best.values()],
        rows=layer_rows(layers, data, steered, exits, cost),
        top=tuple(top),
        lens=plan.lens,
        n_tested=int(data.scored.sum()),
        gammas=tuple(strength_rows({g: data.predictions(str(g), single.probs(data, g)) for g in GAMMAS})),
        single_gain=gain_of(data, single.probs(data)),
        left_out=left_out,
    )


def gain_of(data: Folded, probs: Float[np.ndarray, " row"]) -> dict[str, Difference]:
    """Return scores less the unsteered ones, paired: an interval of each by itself says nothing of the change."""
    ours, base = data.predictions("steered", probs), data.predictions("base", data.p)
    return {name: paired_difference(ours, base, name, n_boot=N_BOOT) for name in SHOWN}


def layer_probes(
    store: Scored, data: Folded, plan: LayerPlan, work: LayerWork, journal: ArrayJournal
) -> RidgeLayers | NetworkLayers:
    """Return what fits the probes that were asked for."""
    if plan.lens == "ridge":
        return RidgeLayers(store, data, journal, work.bar)
    settings = plan.settings(plan.layers or store.layers, seed=data.seed)
    searches = work.folder / "search.jsonl" if work.folder else None
    return NetworkLayers(store, data, NetworkProbes(settings, work.device, work.bar), journal, searches)


def refuse_layers_of(store: Scored, layers: Sequence[int]) -> None:
    """Refuse a single layer, and layers that the store does not hold."""
    missing = sorted(set(layers) - set(store.layers))
    if missing:
        raise CoralError(
            f"The store does not hold layer {missing[0]}; it has {', '.join(map(str, store.layers))}: leave it out of --layers."
        )
    if len(layers) < 2:
        raise CoralError(
            f"The store holds layer {layers[0]} only, and layers are to be compared; make one that has all: `coral extract "
            "TASK --out NEW_FOLDER`, without --layers."
        )


def best_by_fold(steered: Sequence[FoldedSteering], folds: Sequence[int]) -> dict[int, int]:
    """Return for each fold the place of the layer with the lowest Brier score on the other folds."""
    best = np.argmin([s.cost for s in steered], axis=0)
    return {k: int(best[k]) for k in folds}


def layer_rows(
    layers: Sequence[int],
    data: Folded,
    steered: Sequence[FoldedSteering],
    exits: Sequence[FoldedSteering],
    cost: Forward,
) -> tuple[LayerRow, ...]:
    """Score every layer."""
    inside, folds = data.table.options.rows(data.scored), list(data.scored_folds)
    r2 = r2_scores(
        data.r[inside],
        np.stack([s.r_hat[inside] for s in steered]),
        data.table.options.take(data.scored),
        data.predictions("", data.p).groups,
    )
    rows = []
    for i, layer in enumerate(layers):
        rows.append(
            LayerRow(
                layer=layer,
                r2=r2[i],
                gamma=float(steered[i].gamma[folds].mean()),
                at_one=scores_of(data.predictions("at one", steered[i].probs(data, 1.0))),
                chosen=scores_of(data.predictions("chosen", steered[i].probs(data))),
                share=cost.share(layer),
                at_one_gain=gain_of(data, steered[i].probs(data, 1.0)),
                **exit_scores(exits[: i + 1], data.blind()),
            )
        )
    return tuple(rows)


def exit_scores(exits: Sequence[FoldedSteering], blind: Folded) -> dict[str, Scores]:
    """Return the scores of the last layer and of the best one so far without a base; nothing where none were fitted."""
    if not exits:
        return {}
    upto = combined(exits, best_by_fold(exits, blind.scored_folds), blind)
    return {
        "exit_here": scores_of(blind.predictions("exit", exits[-1].probs(blind))),
        "exit_best": scores_of(blind.predictions("exit", upto.probs(blind))),
    }


def best_layers(
    layers: Sequence[int], steered: Sequence[FoldedSteering], m: int, folds: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Return the m best layers for each fold, chosen on the other folds."""
    order = np.argsort([s.cost for s in steered], axis=0)[:m]
    return {k: tuple(sorted(layers[i] for i in order[:, k])) for k in folds}


def top_row(
    data: Folded, chosen: Mapping[int, tuple[int, ...]], several: FoldedSteering, single: FoldedSteering
) -> TopRow:
    """Score the layers that were chosen for each fold, side by side."""
    ours, theirs = (data.predictions(name, s.probs(data)) for name, s in (("top", several), ("single", single)))
    differences = {name: paired_difference(ours, theirs, name) for name in SHOWN}
    layers = [list(group) for group in chosen.values()]
    return TopRow(len(layers[0]), layers, scores_of(ours), differences)
