"""What training data does: how many labelled questions are enough, and how far a lens carries from task to task.

A part of each task is only ever tested. Everything else, the choice of layer and strength included, sees the rest alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coral_lens.analysis.files import kept_rows
from coral_lens.analysis.held_out import Seen, parts_of_task, tasks_of
from coral_lens.analysis.scores import SHOWN, row_from, scores_of
from coral_lens.engine.activations import ActivationStore, JoinedStore
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit_store
from coral_lens.lens.rules import base_probs
from coral_lens.lens.settings import FEWEST_QUESTIONS, FitSettings
from coral_lens.metrics.comparisons import Difference, paired_difference
from coral_lens.metrics.scores import Score
from coral_lens.records import predictions_of
from coral_lens.storage.files import digest
from coral_lens.storage.progress import Bar, silent

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
    stores: Sequence[ActivationStore],
    settings: FitSettings,
    *,
    journal: Path | None = None,
    bar: Bar = silent,
    device: str = "cpu",
) -> TransferAnalysis:
    """Fit a lens on every task and test it on every task.

    `journal` is a file in which rows are kept: a killed analysis goes on where it was. `device` is where networks are trained.
    """
    tasks = tasks_of(stores)
    if len(tasks) < 2:
        raise CoralError(
            f"A transfer matrix needs stores of two tasks or more. Got {tasks[0]} only; give another --store."
        )
    rows: list[TransferRow] = []
    with kept_rows(journal) as done, bar("fitting lenses", len(tasks), "tasks") as advance:
        for train in tasks:
            fitted_on = parts_of_task(stores, train, held_out=False)
            seen = Seen(fitted_on.questions)
            tests = {test: seen.unseen(parts_of_task(stores, test, held_out=True)) for test in tasks}
            key = ["transfer", train, key_of(settings, fitted_on, *tests.values()), *elsewhere(device)]
            kept = done.rows(key, partial(transfer_rows, fitted_on, train, tests, settings, device))
            rows += [row_from(TransferRow, row) for row in kept]
            advance(1)
    return TransferAnalysis(
        **described_stores(stores),
        lens=settings.lens,
        base={t: base_scores(parts_of_task(stores, t, held_out=True), settings) for t in tasks},
        rows=tuple(rows),
    )


def described_stores(stores: Sequence[ActivationStore]) -> dict[str, Any]:
    """Return the first fields of every analysis of several stores: their model, their tasks and their questions' number."""
    return {
        "model": stores[0].manifest["model"]["name"],
        "task": ", ".join(tasks_of(stores)),
        "n_questions": sum(len(store.questions) for store in stores),
    }


def key_of(settings: FitSettings, *stores: JoinedStore) -> str:
    """Return what the rows of a lens depend on: how it is fitted, and on which questions it is fitted and tested."""
    return digest([settings.record(), *(store.manifest for store in stores)])


def elsewhere(device: str) -> list[str]:
    """Return what a key has of a device: nothing for the CPU, whose rows were kept before there was a choice."""
    return [] if device == "cpu" else [device]


def transfer_rows(
    fitted_on: JoinedStore, train: str, tests: Mapping[str, JoinedStore], settings: FitSettings, device: str
) -> list[TransferRow]:
    """Fit a lens on one task and test it everywhere."""
    lens = fit_store(fitted_on, settings, device=device)
    return [transfer_row(lens, train, test, tested) for test, tested in tests.items()]


def transfer_row(lens: Lens, train: str, test: str, tested: JoinedStore) -> TransferRow:
    """Test a lens on the held-out questions of a task."""
    probs = lens.apply(tested)
    steered = predictions_of("steered", tested, probs[lens.method])
    base = predictions_of("base", tested, probs["base"])
    return TransferRow(
        train=train,
        test=test,
        n_train=lens.training.n_train,
        n_test=len(tested.questions),
        layers=list(lens.layers),
        gamma=lens.gamma,
        shift=float(np.median(lens.shifts(tested))),
        scores=scores_of(steered),
        gain={name: paired_difference(steered, base, name) for name in SHOWN},
    )


def base_scores(tested: JoinedStore, settings: FitSettings) -> dict[str, Score]:
    """Return the unsteered model's scores on these questions."""
    return scores_of(predictions_of("base", tested, base_probs(tested.table, settings.base)))


def analyse_curves(
    stores: Sequence[ActivationStore],
    settings: FitSettings,
    *,
    draws: int = 3,
    journal: Path | None = None,
    bar: Bar = silent,
    device: str = "cpu",
) -> CurveAnalysis:
    """Fit lenses on more and more questions of each task, chosen anew at every size, and test them on the same others.

    `journal` is a file in which rows are kept: a killed analysis goes on where it was. `device` is where networks are trained.
    """
    tasks, rows = tasks_of(stores), list[CurveRow]()
    pools = {task: parts_of_task(stores, task, held_out=False).questions for task in tasks}
    planned = [(task, n, draw) for task in tasks for n, draw in drawings(task, len(pools[task]), draws)]
    tests = {task: Seen(pools[task]).unseen(parts_of_task(stores, task, held_out=True)) for task in tasks}
    with kept_rows(journal) as done, bar("fitting lenses", len(planned), "lenses") as advance:
        for task, n, draw in planned:
            drawn = parts_of_task(stores, task, held_out=False, limit=n, seed=draw)
            key = ["curve", task, n, draw, key_of(settings, drawn, tests[task]), *elsewhere(device)]
            point = CurveRow(task, n, draw, [], {})
            kept = done.rows(key, partial(curve_rows, drawn, tests[task], point, settings, device))
            rows += [row_from(CurveRow, row) for row in kept]
            advance(1)
    return CurveAnalysis(
        **described_stores(stores),
        lens=settings.lens,
        base={task: base_scores(tested, settings) for task, tested in tests.items()},
        rows=tuple(rows),
    )


def curve_rows(
    drawn: JoinedStore, tested: JoinedStore, point: CurveRow, settings: FitSettings, device: str
) -> list[CurveRow]:
    """Fit a lens on the questions that were drawn for one point of a curve, and test it."""
    lens = fit_store(drawn, settings, device=device)
    steered = predictions_of("steered", tested, lens.apply(tested)[lens.method])
    return [replace(point, layers=list(lens.layers), scores=scores_of(steered))]


def drawings(task: str, whole: int, draws: int) -> list[tuple[int, int]]:
    """Return the numbers of questions to fit on, each as often as it is drawn; all can be drawn in one way only."""
    if whole < FEWEST_QUESTIONS:
        raise CoralError(
            f"{task} has {whole} questions to fit on, and a lens needs {FEWEST_QUESTIONS} at least; extract more of it, "
            "or leave it out."
        )
    sizes = sorted({min(whole, max(FEWEST_QUESTIONS, round(share * whole))) for share in SIZES})
    return [(n, draw) for n in sizes for draw in range(draws if n < whole else 1)]
