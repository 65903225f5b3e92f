"""The paper's own probe at every layer, in folds: networks are trained and chosen on some folds and scored on another.

For each tested fold the others are divided: three quarters train, a quarter stops the networks and chooses their setting (by
R2) and gamma (by Brier score). With five folds these are the paper's 60, 20 and 20 per cent; to test one fold is its single
split, to test all of them uses every question once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from coral_lens.analysis.files import ArrayJournal
from coral_lens.analysis.folds import Folded, FoldedSteering, fold_parts
from coral_lens.lens.choose import Candidate, Work, search_networks
from coral_lens.lens.settings import FitSettings
from coral_lens.lens.training_data import TrainingData
from coral_lens.records import OptionTable, Scored
from coral_lens.storage.arrays import side_by_side
from coral_lens.storage.progress import Bar, silent

CHOOSING = 0.25
"""Share of the questions outside a fold, by whole groups, that choose."""


@dataclass(frozen=True)
class NetworkProbes:
    """How networks are searched at every layer, and where they are trained."""

    settings: FitSettings
    """The lens (`mlp` or `linear`), its search and its seed."""
    device: str = "cpu"
    bar: Bar = silent


@dataclass(frozen=True)
class NetworkLayers:
    """Networks on the layers of a store, fold by fold; what is done is kept."""

    store: Scored
    data: Folded
    probes: NetworkProbes
    arrays: ArrayJournal
    journal: Path | None = None
    """Where the searches keep what they have done."""

    def by_layer(self, layers: Sequence[int]) -> tuple[list[FoldedSteering], list[FoldedSteering]]:
        """Return the steering by each layer alone; none without a base, which would be as much work once more."""
        parts = {k: self.steered(k, [(layer,) for layer in layers]) for k in self.data.scored_folds}
        return [self.folded(parts, i) for i in range(len(layers))], []

    def side_by_side(self, chosen: Mapping[int, tuple[int, ...]]) -> FoldedSteering:
        """Return the steering by several layers, for each fold those that were chosen for it."""
        return self.folded({k: self.steered(k, [group]) for k, group in chosen.items()}, 0)

    def folded(self, parts: dict[int, dict[str, np.ndarray]], i: int) -> FoldedSteering:
        """Put what each fold was steered by together, by the i-th of its groups of layers."""
        r_hat, gamma = np.zeros(len(self.data.r)), np.zeros(self.data.n_folds)
        cost = np.full(self.data.n_folds, np.inf)
        for k, part in parts.items():
            rows = self.data.row_fold == k
            r_hat[rows], gamma[k], cost[k] = (part[name][i] for name in ("r_hat", "gamma", "cost"))
        return FoldedSteering(r_hat, gamma, cost)

    def steered(self, k: int, groups: Sequence[tuple[int, ...]]) -> dict[str, np.ndarray]:
        """Return what a network on each group of layers predicts of a fold, with its gamma and its cost on other questions."""
        # what was kept before all networks were trained to their end does not stand beside what is
        key = [self.probes.settings.record(), self.probes.device, k, [list(group) for group in groups], "finished"]
        return self.arrays.arrays(key, partial(self.steer, k, groups))

    def steer(self, k: int, groups: Sequence[tuple[int, ...]]) -> dict[str, np.ndarray]:
        """Search networks without a fold and predict it."""
        training, settings = self.training(k), self.probes.settings
        work = Work(self.journal, self.probes.bar)
        candidates = search_networks(training, settings.lens, groups, settings, work)
        best = [c.best(settings.criterion) for c in candidates]
        return {
            "r_hat": np.stack([self.predicted(k, c) for c in candidates]),
            "gamma": np.array([point.gamma for point in best]),
            "cost": np.array([point.scores["brier"] for point in best]),
        }

    def training(self, k: int) -> TrainingData:
        """Return the questions outside a fold, divided into those that train and those that choose."""
        train, choose, _ = fold_parts(self.data, k, share=CHOOSING)
        mask, table = train | choose, self.data.table
        rows = table.options.rows(mask)
        kept = OptionTable(
            logprobs=table.logprobs[rows],
            n_tokens=table.n_tokens[rows],
            n_chars=table.n_chars[rows],
            n_bytes=table.n_bytes[rows],
            offsets=table.options.take(mask).edges,
            answers=table.answers[mask],
        )
        return TrainingData(
            questions=[q for q, inside in zip(self.data.questions, mask, strict=True) if inside],
            table=kept,
            p=self.data.p[rows],
            r=self.data.r[rows],
            layer=lambda layer: self.store.layer(layer)[rows],
            rounds=(choose[mask],),
            device=self.probes.device,
        )

    def predicted(self, k: int, candidate: Candidate) -> np.ndarray:
        """Return what a candidate's probe says of a fold."""
        assert candidate.correction is not None, "a network of one round keeps its fit"
        mask = self.data.fold == k
        rows = self.data.table.options.rows(mask)
        states = side_by_side(self.store.layer, candidate.recipe.layers)[rows]
        return candidate.correction.scores(self.data.p[rows], states, self.data.table.options.take(mask)).scores
