"""Search layers and settings of the paper's network: the whole grid, or a little training for all and the whole for a few.

It knows nothing of where states come from and sees no test question. Trials are trained side by side, each by one thread:
its bytes then depend neither on the number of cores nor on the other trials, so a trial whose weights were dropped,
or lost with a killed run, can be trained again to the same bit. Stacking the weights of trials into one batched product was
measured instead: no faster for the paper's probe, and three times for a linear one, whose whole search takes seconds.

Successive halving compares trials that have had equally many epochs, which is unfair to what starts slowly. Small learning
rates are behind at first, and under a strong weight decay a network may stand still for ten epochs and then pass all others.
So trials of every learning rate and decay go on in turns, and of the strongest decay one at each promising layer is trained
to its end, however far behind it is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coral_lens.errors import CoralError
from coral_lens.lens.probes._search_state import PausedTrials, SearchJournal, Standing, in_turns
from coral_lens.lens.probes.grid import GRID, decay_of_step
from coral_lens.lens.probes.mlp import LayerData, MlpSettings, MlpTraining, NetworkProbe
from coral_lens.storage.files import digest_bytes, versions
from coral_lens.storage.resumable import locked_file, thread_count

MOST_SIDE_BY_SIDE = 8
"""Trials that are trained at the same time at most: at 4,096 columns each needs 100 MB."""
STRONG_DECAY = 0.01
"""From this share of every weight a step on, a decay counts as strong."""


@dataclass(frozen=True)
class SearchBudget:
    """How much training a search spends, and on how many."""

    rungs: tuple[int, ...] = (1, 2)
    """Epochs that trials have had, in all, when the worse of them are dropped. The finalists then train until they stop."""
    keep: float = 0.08
    """Share of the trials that go on after each rung: at all but the last, the best of every learning rate and weight decay in
    turns. The best of every layer goes on too, up to the last rung."""
    finalists: int = 2
    """At least so many go on."""
    slow_layers: float = 0.6
    """Share of the layers, the best ones, at which a trial of the strongest weight decay is trained to its end."""
    every_layer: bool = False
    """Whether the best trial of every layer is trained to its end too: one more training per layer. Where layers are compared or
    shown, one of two epochs must not stand beside one of fifty."""
    memory: int = 2**30
    """Bytes for the weights of paused trials. A survivor that finds no place there is trained again from its seed."""

    def __post_init__(self) -> None:
        if list(self.rungs) != sorted(set(self.rungs)) or min(self.rungs, default=1) < 1:
            raise CoralError(
                f"The rungs of a search must be rising numbers of epochs from 1. Got {self.rungs} instead."
            )
        if not 0.0 < self.keep <= 1.0 or self.finalists < 1:
            raise CoralError(
                f"A search must keep a share of 0 to 1 and one finalist or more. Got {self.keep} and {self.finalists}."
            )

    def survivors(self, n: int) -> int:
        """Return how many of n trials go on for what they have reached."""
        return min(n, max(self.finalists, math.ceil(self.keep * n)))

    def slow(self, n_layers: int, *, last: bool) -> int:
        """Return at how many layers a trial of the strongest decay goes on: at all of them up to the last rung."""
        return math.ceil(self.slow_layers * n_layers) if last else n_layers


BUDGETS = {"halving": SearchBudget(), "grid": SearchBudget(rungs=())}
"""How each kind of search spends its training; without rungs every trial is trained to its end."""


@dataclass(frozen=True)
class Trial:
    """One setting at one layer, as far as it was trained."""

    layer: int
    settings: MlpSettings
    epochs: int
    """Epochs it was trained before it stopped or was dropped."""
    r2: float
    """Validation R2 of its best state."""
    finished: bool
    """Whether it was trained to its end."""


@dataclass(frozen=True)
class SearchOutcome:
    """The outcome of a search."""

    layers: dict[int, tuple[Trial, NetworkProbe]]
    """The best trial of each layer, with its probe."""
    trials: tuple[Trial, ...]
    """All of them: the finalists best first, then those that were dropped last, best first, and so on."""

    @property
    def best(self) -> Trial:
        """The trial with the best validation R2."""
        return max((trial for trial, _ in self.layers.values()), key=lambda trial: trial.r2)

    @property
    def probe(self) -> NetworkProbe:
        """The probe of the best trial."""
        return self.layers[self.best.layer][1]


def search_mlp(
    data: Callable[[int], LayerData],
    layers: Sequence[int],
    grid: Sequence[MlpSettings] = GRID,
    *,
    seed: int,
    budget: SearchBudget = BUDGETS["halving"],
    journal: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> SearchOutcome:
    """Find for each layer the setting with the best validation R2, and return the trained probes.

    `data` loads a layer and is called once per rung and layer. With `journal`, a file, a killed search goes on where it was
    and ends with the same bytes. `progress` is told of epochs; they come to `planned_epochs` in all.
    """
    if not layers or not grid or len(set(layers)) < len(layers):
        raise CoralError(
            f"A search needs layers, each once, and settings. Got {list(layers)} and {len(grid)} setting(s)."
        )
    search = Search(data, tuple(layers), tuple(grid), seed, budget, progress or (lambda n: None))
    with (
        locked_file(journal) if journal else nullcontext(),
        thread_count(1),
        ThreadPoolExecutor(search.workers) as pool,
    ):
        search.journal = SearchJournal(journal, search.identity()) if journal else None
        alive = list(range(len(layers) * len(grid)))
        for rung in range(len(budget.rungs)):
            search.climb(alive, rung, pool)
            alive = search.going_on({trial: search.standings[rung][trial].r2 for trial in alive}, rung, len(alive))
        search.climb(alive, len(budget.rungs), pool)
        if budget.rungs and budget.every_layer:
            search.finish_layers(pool)
        return search.outcome()


def planned_epochs(n_layers: int, grid: Sequence[MlpSettings], budget: SearchBudget = BUDGETS["halving"]) -> int:
    """Return how many epochs a search trains at most: the total of its progress.

    All settings are taken to have the same `max_epochs`.
    """
    finishing = n_layers * longest(grid) if budget.rungs and budget.every_layer else 0
    return finishing + sum(n * epochs for n, epochs in planned_rungs(n_layers, grid, budget))


def longest(grid: Sequence[MlpSettings]) -> int:
    """Return how many epochs a trial may have."""
    return max(point.max_epochs for point in grid)


def planned_rungs(n_layers: int, grid: Sequence[MlpSettings], budget: SearchBudget) -> list[tuple[int, int]]:
    """Return for each rung, and for what comes after them, how many trials there are at most, and epochs of each."""
    n, trained, rungs = n_layers * len(grid), 0, []
    most = longest(grid)
    for i, epochs in enumerate((*budget.rungs, most)):
        rungs.append((n, max(0, min(epochs, most) - trained)))
        last = i + 1 >= len(budget.rungs)
        every_layer = 0 if last else n_layers
        slow = budget.slow(n_layers, last=last) if strongest_decay(grid) else 0
        n, trained = min(n, budget.survivors(n) + every_layer + slow), min(epochs, most)
    return rungs


def strongest_decay(grid: Sequence[MlpSettings]) -> float | None:
    """Return the strongest decay of a step among different ones; None where none is strong enough to start slowly."""
    decays = {decay_of_step(point) for point in grid}
    return max(decays) if len(decays) > 1 and max(decays) >= STRONG_DECAY else None


@dataclass
class Search:
    """The state of a running search. A trial's number is that of its layer's place times the grid's size, plus the place of its
    setting in the grid."""

    data: Callable[[int], LayerData]
    layers: tuple[int, ...]
    grid: tuple[MlpSettings, ...]
    seed: int
    budget: SearchBudget
    progress: Callable[[int], None] = lambda _: None
    workers: int = field(default_factory=lambda: min(torch.get_num_threads(), MOST_SIDE_BY_SIDE))
    journal: SearchJournal | None = None
    standings: list[dict[int, Standing]] = field(default_factory=list)
    """Per rung, what its trials had reached."""
    paused: PausedTrials | None = None
    probes: dict[int, tuple[int, int, NetworkProbe]] = field(default_factory=dict)
    """By the place of a layer: its best trial so far, the rung and the probe, where no journal keeps it."""

    def identity(self) -> dict[str, Any]:
        """Return all that the outcome depends on; a sample stands for the states."""
        first = self.data(self.layers[0])
        sample = b"".join(
            np.ascontiguousarray(a).tobytes() for a in (first.r, first.r_val, first.z[:64], first.z_val[:64])
        )
        return {
            "layers": list(self.layers),
            "grid": [asdict(point) for point in self.grid],
            "seed": self.seed,
            "budget": {k: v for k, v in asdict(self.budget).items() if k != "memory"},
            "states": digest_bytes(sample),
            "torch": versions()["torch"],
            "device": torch.device(first.device).type,
        }

    # ----------------------------------------------------------------------------------------------------- training

    def climb(self, alive: Sequence[int], rung: int, pool: ThreadPoolExecutor) -> None:
        """Bring the trials that are left to the end of a rung, layer by layer."""
        done = self.journal.entries.get(rung, {}) if self.journal else {}
        self.standings.append({trial: done[trial] for trial in alive if trial in done})
        most, epochs = planned_rungs(len(self.layers), self.grid, self.budget)[rung]
        self.progress(epochs * (most - len(alive) + len(self.standings[rung])))
        left = [trial for trial in sorted(alive) if trial not in done]
        before, self.paused = self.paused, self.empty_pause(rung, len(alive))
        for place in range(len(self.layers)):
            self.refuse_diverged(place)
        self.go_through(left, rung, epochs, before, pool)

    def finish_layers(self, pool: ThreadPoolExecutor) -> None:
        """Train the best trial of every layer to its end, where it is not there yet."""
        last, most = len(self.budget.rungs), longest(self.grid)
        best = [self.best_trial(place) for place in range(len(self.layers))]
        behind = [trial for trial, rung in best if not self.trial(trial, rung).finished]
        done = self.journal.entries.get(last, {}) if self.journal else {}
        self.standings[last] |= {trial: done[trial] for trial in behind if trial in done}
        left = [trial for trial in behind if trial not in done]
        self.progress(most * (len(best) - len(left)))
        self.go_through(left, last, most, None, pool)

    def go_through(
        self, trials: Sequence[int], rung: int, epochs: int, before: PausedTrials | None, pool: ThreadPoolExecutor
    ) -> None:
        """Bring trials to the end of a rung and note each; it counts as so many epochs."""
        with closing(self.train(trials, rung, before, pool)) as trained:
            for trial, training in trained:
                self.note(trial, rung, training)
                self.progress(epochs)
                self.refuse_diverged(self.place(trial))

    def train(
        self, trials: Sequence[int], rung: int, before: PausedTrials | None, pool: ThreadPoolExecutor
    ) -> Generator[tuple[int, MlpTraining], None, None]:
        """Yield trials when they have reached the end of the rung, in order; a few layers are in memory at a time."""

        def run(trial: int, data: LayerData) -> MlpTraining:
            training = (before.pop(trial) if before else None) or self.begin(trial, data)
            training.advance(data, self.goal(trial, rung))
            return training

        waiting: deque[tuple[int, Future[MlpTraining]]] = deque()
        try:
            for place, of_layer in groupby(trials, key=self.place):
                data = self.data(self.layers[place])
                refuse_equal(data, self.layers[place])
                for trial in of_layer:
                    waiting.append((trial, pool.submit(run, trial, data)))
                    if len(waiting) > 2 * self.workers:
                        yield done(waiting.popleft())
                del data
            while waiting:
                yield done(waiting.popleft())
        finally:
            for _, future in waiting:
                future.cancel()

    def refuse_diverged(self, place: int) -> None:
        """Refuse a layer all of whose trials diverged in their first epoch: it has no probe."""
        n = len(self.grid)
        own = [self.standings[0].get(trial) for trial in range(place * n, (place + 1) * n)]
        if all(standing is not None and standing.r2 == -math.inf for standing in own):
            raise CoralError(
                "Every network of a layer diverged in its first epoch, at learning rates from "
                f"{min(point.learning_rate for point in self.grid):g} and weight decays from "
                f"{min(point.weight_decay for point in self.grid):g}; make either smaller."
            )

    def begin(self, trial: int, data: LayerData) -> MlpTraining:
        """Return a trial that has not been trained yet."""
        return MlpTraining(data.z.shape[1], self.setting(trial), seed=self.seed, device=data.device)

    def note(self, trial: int, rung: int, training: MlpTraining) -> None:
        """Record what a trial has reached, and keep its weights if it may go on, and its probe if it is the layer's best."""
        assert self.paused is not None
        if rung < len(self.budget.rungs):
            self.paused.put(trial, training)
        # the best of a layer nearly always goes on after the first of several rungs: its probe is not worth a file yet
        worth_it = rung > 0 or len(self.budget.rungs) < 2
        others = [s.r2 for other, (_, s) in self.reached(self.place(trial)).items() if other != trial]
        best = worth_it and training.r2 > max(others, default=-math.inf)
        name = self.keep_probe(trial, rung, training.probe()) if best else ""
        standing = Standing(training.epochs, training.r2, name)
        self.standings[rung][trial] = standing
        if self.journal:
            self.journal.add(rung, trial, standing)

    def keep_probe(self, trial: int, rung: int, probe: NetworkProbe) -> str:
        """Keep the probe of the layer's best trial in the journal, or in memory where there is none; return its digest."""
        if self.journal:
            return self.journal.save_probe(self.place(trial), probe)
        self.probes[self.place(trial)] = trial, rung, probe
        return ""

    # --------------------------------------------------------------------------------------------------- numbers

    def place(self, trial: int) -> int:
        """Return the place of a trial's layer."""
        return trial // len(self.grid)

    def setting(self, trial: int) -> MlpSettings:
        """Return the setting of a trial."""
        return self.grid[trial % len(self.grid)]

    def goal(self, trial: int, rung: int) -> int:
        """Return how many epochs a trial may have had at the end of a rung."""
        most = self.setting(trial).max_epochs
        return min(most, self.budget.rungs[rung]) if rung < len(self.budget.rungs) else most

    def reached(self, place: int) -> dict[int, tuple[int, Standing]]:
        """Return the last rung and standing of every trial of a layer."""
        return {
            trial: (rung, standing)
            for rung, standings in enumerate(self.standings)
            for trial, standing in standings.items()
            if self.place(trial) == place
        }

    # ---------------------------------------------------------------------------------------------------- choosing

    def going_on(self, r2: Mapping[int, float], rung: int, n: int) -> list[int]:
        """Return those of n trials that go on after a rung, the most promising first; none that diverged.

        Of some of them it returns all that may go on, whatever the others reach: which layers are best is not known yet.
        """
        sound = [trial for trial in r2 if r2[trial] > -math.inf]
        ranked, last = sorted(sound, key=lambda trial: (-r2[trial], trial)), rung + 1 == len(self.budget.rungs)
        chosen = in_turns(ranked, nothing if last else self.speed)[: self.budget.survivors(n)]
        if not last:
            chosen += first_of_each(ranked, self.place)
        return list(dict.fromkeys(chosen + self.slow_ones(ranked, last=last and len(r2) == n)))

    def speed(self, trial: int) -> Hashable:
        """Return what makes a trial start fast or slowly."""
        return self.setting(trial).learning_rate, self.setting(trial).weight_decay

    def slow_ones(self, ranked: Sequence[int], *, last: bool) -> list[int]:
        """Return the best trial of the strongest decay at each of the best layers, or of all."""
        n_layers, strongest = self.budget.slow(len(self.layers), last=last), strongest_decay(self.grid)
        best_layers = [self.place(trial) for trial in first_of_each(ranked, self.place)][:n_layers]
        slow = [trial for trial in ranked if decay_of_step(self.setting(trial)) == strongest]
        return [trial for trial in first_of_each(slow, self.place) if self.place(trial) in best_layers]

    def empty_pause(self, rung: int, n_alive: int) -> PausedTrials:
        """Return an empty place for the trials that may go on after a rung."""
        return PausedTrials(self.budget.memory, lambda r2: self.going_on(r2, rung, n_alive))

    # ----------------------------------------------------------------------------------------------------- outcome

    def outcome(self) -> SearchOutcome:
        """Return the outcome, with probes from memory, from the journal or, if they were lost there, trained again."""
        order: dict[int, Trial] = {}
        for rung in range(len(self.standings) - 1, -1, -1):
            standings = self.standings[rung]
            for trial in sorted(standings, key=lambda trial: (-standings[trial].r2, trial)):
                order.setdefault(trial, self.trial(trial, rung))
        layers = {layer: self.best_of(place) for place, layer in enumerate(self.layers)}
        return SearchOutcome(layers, tuple(order.values()))

    def best_of(self, place: int) -> tuple[Trial, NetworkProbe]:
        """Return the best trial of a layer and its probe: of those trained to their end, if every layer has one."""
        trial, rung = self.best_trial(place, finished=self.budget.every_layer)
        probe = self.kept_probe(trial, rung, self.standings[rung][trial])
        if probe is None:
            data = self.data(self.layers[place])
            training = self.begin(trial, data)
            training.advance(data, self.goal(trial, rung))
            probe = training.probe()
        return self.trial(trial, rung), probe

    def best_trial(self, place: int, *, finished: bool = False) -> tuple[int, int]:
        """Return the best trial of a layer, or of its finished ones, and its last rung; of equal ones the first in the grid."""
        reached = self.reached(place)
        among = [trial for trial, (rung, _) in reached.items() if not finished or self.trial(trial, rung).finished]
        trial = min(among, key=lambda trial: (-reached[trial][1].r2, trial))
        return trial, reached[trial][0]

    def kept_probe(self, trial: int, rung: int, standing: Standing) -> NetworkProbe | None:
        """Return the probe of a trial at a rung; None if it was not kept, or lost."""
        if self.journal:
            return self.journal.load_probe(self.place(trial), standing.probe)
        *known, probe = self.probes.get(self.place(trial), (None, None, None))
        return probe if known == [trial, rung] else None

    def trial(self, trial: int, rung: int) -> Trial:
        """Return the record of a trial as it was at the end of a rung."""
        standing = self.standings[rung][trial]
        ended = rung == len(self.budget.rungs) or standing.epochs < self.goal(trial, rung)
        return Trial(self.layers[self.place(trial)], self.setting(trial), standing.epochs, standing.r2, ended)


def done(waiting: tuple[int, Future[MlpTraining]]) -> tuple[int, MlpTraining]:
    """Return a trial once it is trained."""
    return waiting[0], waiting[1].result()


def nothing(_: int) -> Hashable:
    """Return what all trials have in common."""
    return None


def first_of_each(ranked: Sequence[int], group: Callable[[int], int]) -> list[int]:
    """Return the first of each group, in their order."""
    first: dict[int, int] = {}
    for trial in ranked:
        first.setdefault(group(trial), trial)
    return list(first.values())


def refuse_equal(data: LayerData, layer: int) -> None:
    """Refuse residuals that leave nothing to learn or to judge by."""
    for name, r in (("training", data.r), ("validation", data.r_val)):
        if len(r) == 0 or np.ptp(r) == 0.0:
            raise CoralError(
                f"The {len(r)} residuals of the {name} rows at layer {layer} are all equal, so probes cannot be told "
                "apart; give more questions."
            )
