"""What a probe must be: how deep, how regularised, how strong; in distribution and on tasks it has never seen.

All probes read one layer, the best under ridge on validation questions. A part of every task is only ever tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from coral_lens.analysis.data import elsewhere
from coral_lens.analysis.files import kept_rows
from coral_lens.analysis.held_out import Seen, parts_of_task, tasks_of
from coral_lens.analysis.scores import N_BOOT, SHOWN, row_from, scores_of, strength_rows
from coral_lens.analysis.settings import ProbePlan
from coral_lens.data.splits import split_mask
from coral_lens.engine.activations import ActivationStore, JoinedStore
from coral_lens.lens.choose import Candidate, Recipe, choose_candidate, predict_rounds, try_layers
from coral_lens.lens.fit import training_data, with_layers
from coral_lens.lens.probes.mlp import MlpSettings
from coral_lens.lens.rules import GAMMAS, base_probs
from coral_lens.lens.settings import HIDDEN, FitSettings
from coral_lens.lens.training_data import TrainingData
from coral_lens.metrics.comparisons import Difference, paired_difference
from coral_lens.metrics.scores import Score, score
from coral_lens.records import Predictions, Scored, predictions_of
from coral_lens.storage.files import digest
from coral_lens.storage.progress import Bar, silent

DECAYS = (0.0, 0.1, 1.0, 10.0, 45.0)
PENALTIES = (0.0, 0.1, 0.5)
DROPOUTS = (0.0, 0.2)


@dataclass(frozen=True)
class ProbeRow:
    """One probe on one test set."""

    probe: str
    seed: int
    test: str
    transfer: bool
    """Whether the task is another than that of the training questions."""
    n_test: int
    """Held-out questions of the task that are not among the training ones in some other form."""
    weight_decay: float | None
    output_penalty: float | None
    dropout: float | None
    layer: int
    gamma: float
    validation_r2: float
    validation_brier: float
    scores: dict[str, Score]
    gain: dict[str, Difference]
    """The scores less those of ridge with layer and gamma chosen in distribution, on the same questions."""


@dataclass(frozen=True)
class GammaRow:
    """Ridge at one strength on one test set."""

    test: str
    gamma: float
    scores: dict[str, Score]
    over_one: dict[str, Difference]
    """The scores less those at gamma = 1, on the same questions."""


@dataclass(frozen=True)
class ProbeAnalysis:
    """Probes compared."""

    model: str
    task: str
    n_questions: int
    layer: int
    base: dict[str, dict[str, Score]]
    rows: tuple[ProbeRow, ...]
    gammas: tuple[GammaRow, ...]


def analyse_probes(
    stores: Sequence[ActivationStore],
    train: str,
    settings: FitSettings,
    *,
    plan: ProbePlan | None = None,
    journal: Path | None = None,
    bar: Bar = silent,
    device: str = "cpu",
) -> ProbeAnalysis:
    """Compare probes fitted on one task, on its held-out questions and on those of the other tasks.

    `journal` is a file in which the rows of networks are kept: a killed comparison goes on where it was. `device` is where
    networks are trained; another one rounds in another way, so its rows are others.
    """
    plan = plan or ProbePlan()
    fitted_on = parts_of_task(stores, train, held_out=False)
    seen = Seen(fitted_on.questions)
    tests = {task: seen.unseen(parts_of_task(stores, task, held_out=True)) for task in tasks_of(stores)}
    identity = [digest([s.manifest for s in (fitted_on, *tests.values())]), train, settings.record()]
    identity += elsewhere(device)
    data = replace(training_data(fitted_on, settings)[0], device=device)
    plain = replace(with_layers(settings, fitted_on), inputs=(), top_layers=1)
    ridge, singles = choose_candidate(data, "ridge", plain)
    comparison = ProbeComparison(data, plain, ridge, tests, train)
    listwise = try_layers(data, "listwise", ridge.recipe.layers, plain)
    rows = comparison.rows(ridge, "ridge") + comparison.rows(listwise, "listwise")
    networks = planned_networks(plan)
    with kept_rows(journal) as done, bar("fitting probes", len(networks) * plan.seeds, "networks") as advance:
        for (name, setting), seed in product(networks, range(plan.seeds)):
            recipe = Recipe("mlp", ridge.recipe.layers, (), (setting,), seed)
            kept = done.rows([*identity, name, asdict(recipe)], comparison.later(recipe, name))
            rows += [row_from(ProbeRow, row) for row in kept]
            advance(1)
    for task, tested in tests.items():
        if task != train:
            rows.append(comparison.rechosen(singles, task, tested))
    return ProbeAnalysis(
        model=stores[0].manifest["model"]["name"],
        task=", ".join([train, *(t for t in tests if t != train)]),
        n_questions=len(data.questions),
        layer=ridge.recipe.layers[0],
        base={t: scores_of(comparison.base(s)) for t, s in tests.items()},
        rows=tuple(rows),
        gammas=tuple(row for task, tested in tests.items() for row in comparison.by_gamma(task, tested)),
    )


def planned_networks(plan: ProbePlan) -> list[tuple[str, dict[str, Any]]]:
    """Return the networks to be trained: every depth at the default regularisation, then the grid at one depth."""
    usual = MlpSettings()
    fixed = {"learning_rate": usual.learning_rate, "max_epochs": plan.epochs or usual.max_epochs}

    def setting(depth: int, decay: float, penalty: float, dropout: float) -> dict[str, Any]:
        varied = {"weight_decay": decay, "output_penalty": penalty, "dropout": dropout}
        return {**fixed, **varied, "hidden": list(HIDDEN[:depth])}

    depths = [(f"depth {d}", setting(d, usual.weight_decay, usual.output_penalty, usual.dropout)) for d in plan.depths]
    grid = [("grid", setting(plan.grid_depth, *point)) for point in product(DECAYS, PENALTIES, DROPOUTS)]
    return depths + grid


@dataclass(frozen=True)
class ProbeComparison:
    """What every probe of one analysis is measured on and against."""

    data: TrainingData
    settings: FitSettings
    ridge: Candidate
    tests: dict[str, JoinedStore]
    train: str

    def base(self, tested: Scored) -> Predictions:
        """Return the unsteered model's predictions."""
        return predictions_of("base", tested, base_probs(tested.table, self.settings.base))

    def steered(self, candidate: Candidate, tested: Scored, gamma: float) -> Predictions:
        """Return the predictions of a fitted candidate at a strength."""
        correction = candidate.correction
        assert correction is not None, "a candidate of one round keeps its fit"
        p, states = base_probs(tested.table, self.settings.base), correction.states(tested)
        return predictions_of("steered", tested, correction.apply(p, states, tested.table.options, gamma=gamma))

    def rows(self, candidate: Candidate, name: str) -> list[ProbeRow]:
        """Test a probe everywhere, at the strength chosen on its own validation questions."""
        gamma = candidate.best(self.settings.criterion).gamma
        return [self.row(candidate, gamma, name, task, tested) for task, tested in self.tests.items()]

    def later(self, recipe: Recipe, name: str) -> Callable[[], list[ProbeRow]]:
        """Return what trains a network and tests it everywhere, when it is called."""
        return lambda: self.rows(predict_rounds(self.data, recipe, self.settings.criterion), name)

    def row(self, candidate: Candidate, gamma: float, name: str, task: str, tested: JoinedStore) -> ProbeRow:
        """Test a probe on one task."""
        setting = candidate.recipe.settings[0] if candidate.recipe.kind == "mlp" else {}
        ours = self.steered(candidate, tested, gamma)
        theirs = self.steered(self.ridge, tested, self.ridge.best(self.settings.criterion).gamma)
        return ProbeRow(
            probe=name,
            seed=candidate.recipe.seed,
            test=task,
            transfer=task != self.train,
            n_test=len(tested.questions),
            weight_decay=setting.get("weight_decay"),
            output_penalty=setting.get("output_penalty"),
            dropout=setting.get("dropout"),
            layer=candidate.recipe.layers[0],
            gamma=gamma,
            validation_r2=candidate.r2,
            validation_brier=candidate.best(self.settings.criterion).scores["brier"],
            scores=scores_of(ours),
            gain={metric: paired_difference(ours, theirs, metric, n_boot=N_BOOT) for metric in SHOWN},
        )

    def rechosen(self, singles: Sequence[Candidate], task: str, tested: JoinedStore) -> ProbeRow:
        """Choose layer and gamma anew on half of the target's questions, as the paper's appendix does, and test on the rest."""
        half = split_mask(tested.questions, fraction=0.5, seed=0)
        choosing, rest = tested.take(half), tested.take(~half)
        tried = [(c, g) for c in singles for g in GAMMAS]
        costs = [score(self.steered(c, choosing, g), "brier") for c, g in tried]
        best, gamma = tried[int(np.argmin(costs))]
        row = self.row(best, gamma, "ridge, layer and gamma re-chosen on the target", task, rest)
        return replace(row, validation_brier=min(costs))

    def by_gamma(self, task: str, tested: JoinedStore) -> list[GammaRow]:
        """Score ridge at every strength, and against a strength of 1."""
        strengths = strength_rows({gamma: self.steered(self.ridge, tested, gamma) for gamma in GAMMAS})
        return [GammaRow(task, row.gamma, row.scores, row.over_one) for row in strengths]
