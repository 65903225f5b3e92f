"""What training data does: how many labelled questions are enough, and how far a lens carries from task to task.

A part of each task is only ever tested. Everything else, the choice of layer and strength included, sees the rest alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coral_lens.analysis.held_out import parts_of_task, tasks_of
from coral_lens.analysis.scores import SHOWN, scores_of
from coral_lens.analysis.seen import Seen
from coral_lens.errors import CoralError
from coral_lens.fitting import FEWEST, FitSettings, fit_store
from coral_lens.joined import JoinedStore, predictions_of
from coral_lens.lens import Lens
from coral_lens.metrics import Score
from coral_lens.progress import Bar, silent
from coral_lens.stats import Difference, paired_difference
from coral_lens.steering import base_probs
from coral_lens.store import ActivationStore

SIZES = (0.1, 0.2, 0.4, 0.7, 1.0)
"""Shares of the questions that may be fitted on."""


@dataclass(frozen=True)
class TransferRow:
    """A lens of one task on another."""

    train: str
    test: str
    n_train: int
    n_test: int
    layers: list[int]
    gamma: float
    shift: float
    """Median distance of the test questions from the training ones, over what is typical there: 1 is no shift."""
    scores: dict[str, Score]
    gain: dict[str, Difference]
    """The scores less those of the unsteered model on the same questions."""


@dataclass(frozen=True)
class TransferAnalysis:
    """Every task to every task."""

    model: str
    task: str
    n_questions: int
    lens: str
    base: dict[str, dict[str, Score]]
    """The unsteered model, by test task."""
    rows: tuple[TransferRow, ...]


@dataclass(frozen=True)
class CurveRow:
    """A lens fitted on so many questions."""

    task: str
    n_train: int
    draw: int
    """Which drawing of the questions."""
    layers: list[int]
    scores: dict[str, Score]


@dataclass(frozen=True)
class CurveAnalysis:
    """Learning curves."""

    model: str
    task: str
    n_questions: int
    lens: str
    base: dict[str, dict[str, Score]]
    rows: tuple[CurveRow, ...]


def analyse_transfer(
    stores: Sequence[ActivationStore], settings: FitSettings, *, bar: Bar = silent
) -> TransferAnalysis:
    """Fit a lens on every task and test it on every task."""
    tasks = tasks_of(stores)
    if len(tasks) < 2:
        raise CoralError(
            f"A transfer matrix needs stores of two tasks or more. Got {tasks[0]} only; give another --store."
        )
    rows = []
    with bar("fitting lenses", len(tasks), "tasks") as advance:
        for train in tasks:
            fitted_on = parts_of_task(stores, train, held_out=False)
            lens, seen = fit_store(fitted_on, settings), Seen(fitted_on.questions)
            for test in tasks:
                tested = seen.unseen(parts_of_task(stores, test, held_out=True))
                rows.append(transfer_row(lens, train, test, tested))
            advance(1)
    return TransferAnalysis(
        model=stores[0].manifest["model"]["name"],
        task=", ".join(tasks),
        n_questions=sum(len(store.questions) for store in stores),
        lens=settings.lens,
        base={t: base_scores(parts_of_task(stores, t, held_out=True), settings) for t in tasks},
        rows=tuple(rows),
    )


def transfer_row(lens: Lens, train: str, test: str, tested: JoinedStore) -> TransferRow:
    """Test a lens on the held-out questions of a task."""
    found = lens.apply(tested)
    steered = predictions_of("steered", tested, found[lens.method])
    base = predictions_of("base", tested, found["base"])
    return TransferRow(
        train=train,
        test=test,
        n_train=lens.training["n_train"],
        n_test=len(tested.questions),
        layers=list(lens.layers),
        gamma=lens.gamma,
        shift=float(np.median(lens.shifts(tested))),
        scores=scores_of(steered),
        gain={name: paired_difference(steered, base, name) for name in SHOWN},
    )


def base_scores(tested: JoinedStore, settings: FitSettings) -> dict[str, Score]:
    """Return the unsteered model's scores on some questions."""
    return scores_of(predictions_of("base", tested, base_probs(tested.table, settings.base)))


def analyse_curves(
    stores: Sequence[ActivationStore], settings: FitSettings, *, draws: int = 3, bar: Bar = silent
) -> CurveAnalysis:
    """Fit lenses on more and more questions of each task, chosen anew at every size, and test them on the same others."""
    tasks, rows = tasks_of(stores), []
    pools = {task: parts_of_task(stores, task, held_out=False).questions for task in tasks}
    planned = [(task, n, draw) for task in tasks for n, draw in drawings(task, len(pools[task]), draws)]
    tests = {task: Seen(pools[task]).unseen(parts_of_task(stores, task, held_out=True)) for task in tasks}
    with bar("fitting lenses", len(planned), "lenses") as advance:
        for task, n, draw in planned:
            lens = fit_store(parts_of_task(stores, task, held_out=False, limit=n, seed=draw), settings)
            steered = predictions_of("steered", tests[task], lens.apply(tests[task])[lens.method])
            rows.append(CurveRow(task, n, draw, list(lens.layers), scores_of(steered)))
            advance(1)
    return CurveAnalysis(
        model=stores[0].manifest["model"]["name"],
        task=", ".join(tasks),
        n_questions=sum(len(store.questions) for store in stores),
        lens=settings.lens,
        base={task: base_scores(tested, settings) for task, tested in tests.items()},
        rows=tuple(rows),
    )


def drawings(task: str, whole: int, draws: int) -> list[tuple[int, int]]:
    """Return the numbers of questions to fit on, each as often as it is drawn; all can be drawn in one way only."""
    if whole < FEWEST:
        raise CoralError(
            f"{task} has {whole} questions to fit on, and a lens needs {FEWEST} at least; extract more of it, or leave it out."
        )
    sizes = sorted({min(whole, max(FEWEST, round(share * whole))) for share in SIZES})
    return [(n, draw) for n in sizes for draw in range(draws if n < whole else 1)]
