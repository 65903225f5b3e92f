"""Search layers and settings of the paper's MLP by successive halving: a little training for all, the whole for a few.

It knows nothing of where states come from and sees no test question. Trials are trained side by side, each by one thread:
its bytes then depend neither on the number of cores nor on the other trials, so a trial whose weights were dropped,
or lost with a killed run, can be trained again to the same bit. Stacking the weights of trials into one batched product was
measured instead: no faster for the paper's probe, and three times for a linear one, whose whole search takes seconds.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from coral_lens.errors import CoralError
from coral_lens.lens.probes.mlp import LayerData, MlpSettings, MlpTraining, NetworkProbe
from coral_lens.storage.files import append_line, canonical, digest, digest_bytes, lines_of, versions, write_atomic
from coral_lens.storage.resumable import locked_file, thread_count

__all__ = ["GRID", "PAPER_GRID", "LayerData", "SearchBudget", "SearchOutcome", "Trial", "planned_epochs", "search_mlp"]

PAPER_GRID = tuple(
    MlpSettings(weight_decay=decay, output_penalty=penalty, learning_rate=rate, patience=30)
    for decay, penalty, rate in product(
        (0.0, 0.1, 1.0, 5.0, 10.0, 25.0, 30.0, 45.0), (0.0, 0.01, 0.1, 0.25, 0.5), (3e-4, 1e-3)
    )
)
"""The weight decays, output penalties and patience of the paper's authors, at their learning rate and a smaller one."""
GRID = tuple(
    MlpSettings(weight_decay=decay, output_penalty=penalty, learning_rate=rate)
    for decay, penalty, rate in product((0.1, 1.0, 10.0, 45.0), (0.0, 0.1, 0.5), (3e-4, 1e-3))
)
"""The default: 24 points over the same range. AdamW's decay multiplies the learning rate: 45 at 1e-3 is 4.5 % a step."""
MOST_SIDE_BY_SIDE = 8
"""Trials that are trained at the same time at most: at 4,096 columns each needs 100 MB."""


@dataclass(frozen=True)
class SearchBudget:
    """How much training a search spends, and on how many."""

    rungs: tuple[int, ...] = (1, 3, 8)
    """Epochs that trials have had, in all, when the worse of them are dropped. The finalists then train until they stop."""
    keep: float = 0.2
    """Share of the trials that go on after each rung; at all but the last, the best of every learning rate in turns: after
    few epochs a slow one is behind and not yet worse."""
    finalists: int = 4
    """At least so many go on."""
    memory: int = 512 * 2**20
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
        """Return how many of n trials go on."""
        return min(n, max(self.finalists, math.ceil(self.keep * n)))


@dataclass(frozen=True)
class Trial:
    """One setting at one layer, as far as it was trained."""

    layer: int
    settings: MlpSettings
    epochs: int
    """Epochs it was trained before it stopped or was dropped."""
    r2: float
    """Validation R2 of its best state."""


@dataclass(frozen=True)
class SearchOutcome:
    """The outcome of a search."""

    best: Trial
    probe: NetworkProbe
    trials: tuple[Trial, ...]
    """All of them: the finalists best first, then those that were dropped last, best first, and so on."""


@dataclass(frozen=True)
class Standing:
    """What a trial had reached at the end of a rung."""

    epochs: int
    r2: float
    probe: str = ""
    """Digest of its saved probe, if it was the best finalist so far."""


def search_mlp(
    data: Callable[[int], LayerData],
    layers: Sequence[int],
    grid: Sequence[MlpSettings] = GRID,
    *,
    seed: int,
    budget: SearchBudget = SearchBudget(),  # noqa: B008  (frozen)
    journal: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> SearchOutcome:
    """Find the layer and setting with the best validation R2, and return the trained probe.

    `layers` come best first, as ridge ranks them; `data` loads one of them and is called once per rung and layer. With
    `journal`, a file, a killed search goes on where it was and ends with the same bytes. `progress` is told of epochs;
    they come to `planned_epochs` in all.
    """
    if not layers or not grid or len(set(layers)) < len(layers):
        raise CoralError(
            f"A search needs layers, each once, and settings. Got {list(layers)} and {len(grid)} setting(s)."
        )
    search = Search(data, tuple(layers), tuple(grid), seed, budget, progress or (lambda n: None))
    workers = min(torch.get_num_threads(), MOST_SIDE_BY_SIDE)
    with locked_file(journal) if journal else nullcontext(), thread_count(1), ThreadPoolExecutor(workers) as pool:
        search.journal = SearchJournal(journal, search.identity()) if journal else None
        alive = list(range(len(layers) * len(grid)))
        for rung in range(len(budget.rungs)):
            search.climb(alive, rung, pool)
            alive = search.survivors(alive, rung)
        search.climb(alive, len(budget.rungs), pool)
        return search.outcome(alive)


def planned_epochs(n_layers: int, grid: Sequence[MlpSettings], budget: SearchBudget = SearchBudget()) -> int:  # noqa: B008
    """Return how many epochs a search trains if no trial stops early: the total of its progress.

    All settings are taken to have the same `max_epochs`.
    """
    n, trained, total = n_layers * len(grid), 0, 0
    most = max(g.max_epochs for g in grid)
    for epochs in (*budget.rungs, most):
        total += n * max(0, min(epochs, most) - trained)
        n, trained = budget.survivors(n), min(epochs, most)
    return total


@dataclass
class Search:
    """The state of a running search. A trial's number is that of its layer, best first, times the grid's size, plus the
    place of its setting in the grid."""

    data: Callable[[int], LayerData]
    layers: tuple[int, ...]
    grid: tuple[MlpSettings, ...]
    seed: int
    budget: SearchBudget
    progress: Callable[[int], None]
    journal: SearchJournal | None = None
    standings: list[dict[int, Standing]] = field(default_factory=list)
    """Per rung, what its trials had reached."""
    paused: PausedTrials | None = None
    winner: tuple[int, NetworkProbe] | None = None
    """The best finalist so far, if it was trained in this process."""

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
        }

    def climb(self, alive: Sequence[int], rung: int, pool: ThreadPoolExecutor) -> None:
        """Bring the trials that are left to the end of a rung, layer by layer."""
        done = self.journal.entries.get(rung, {}) if self.journal else {}
        self.standings.append({trial: done[trial] for trial in alive if trial in done})
        for trial in self.standings[rung]:
            self.progress(self.planned(trial, rung))
        left = [trial for trial in sorted(alive) if trial not in done]
        before, self.paused = self.paused, self.empty_pause(rung, len(alive))
        for place, trials in groupby(left, key=lambda trial: trial // len(self.grid)):
            data = self.data(self.layers[place])
            refuse_equal(data, self.layers[place])
            for trial, training in self.train(list(trials), rung, data, before, pool):
                self.note(trial, rung, training)

    def train(
        self, trials: Sequence[int], rung: int, data: LayerData, before: PausedTrials | None, pool: ThreadPoolExecutor
    ) -> Iterator[tuple[int, MlpTraining]]:
        """Yield the trials of one layer when they have reached the end of the rung, in order."""

        def run(trial: int) -> MlpTraining:
            settings = self.grid[trial % len(self.grid)]
            training = before.pop(trial) if before else None
            training = training or MlpTraining(data.z.shape[1], settings, seed=self.seed)
            training.advance(data, self.goal(trial, rung))
            return training

        yield from zip(trials, pool.map(run, trials), strict=True)

    def note(self, trial: int, rung: int, training: MlpTraining) -> None:
        """Record what a trial has reached, and keep its weights if it may go on."""
        assert self.paused is not None
        name = ""
        if rung < len(self.budget.rungs):
            self.paused.put(trial, training)
        elif all(training.r2 > standing.r2 for standing in self.standings[rung].values()):
            self.winner = trial, training.probe()
            name = self.journal.save_probe(self.winner[1]) if self.journal else ""
        standing = Standing(training.epochs, training.r2, name)
        self.standings[rung][trial] = standing
        if self.journal:
            self.journal.add(rung, trial, standing)
        self.progress(self.planned(trial, rung))

    def goal(self, trial: int, rung: int) -> int:
        """Return how many epochs a trial may have had at the end of a rung."""
        most = self.grid[trial % len(self.grid)].max_epochs
        return min(most, self.budget.rungs[rung]) if rung < len(self.budget.rungs) else most

    def planned(self, trial: int, rung: int) -> int:
        """Return how many epochs of a rung a trial is planned to train."""
        return self.goal(trial, rung) - (self.goal(trial, rung - 1) if rung else 0)

    def ranked(self, trials: Iterable[int], rung: int) -> list[int]:
        """Return trials by what they had reached at a rung, best first; equal ones keep their order."""
        return sorted(trials, key=lambda trial: (-self.standings[rung][trial].r2, trial))

    def survivors(self, alive: Sequence[int], rung: int) -> list[int]:
        """Return the trials that go on after a rung."""
        return in_turns(self.ranked(alive, rung), self.group(rung))[: self.budget.survivors(len(alive))]

    def group(self, rung: int) -> Callable[[int], float]:
        """Return what trials have in common that are compared at a rung: the learning rate, or at the last rung nothing."""
        last = rung + 1 >= len(self.budget.rungs)
        return lambda trial: 0.0 if last else self.grid[trial % len(self.grid)].learning_rate

    def empty_pause(self, rung: int, n_alive: int) -> PausedTrials:
        """Return an empty place for the trials that may go on after a rung."""
        return PausedTrials(self.budget.memory, self.budget.survivors(n_alive), self.group(rung))

    def outcome(self, finalists: Sequence[int]) -> SearchOutcome:
        """Return the outcome, with the probe from memory, from the journal or, if it was lost there, trained again."""
        last = len(self.standings) - 1
        best = self.ranked(finalists, last)[0]
        probe = self.winner[1] if self.winner and self.winner[0] == best else None
        if probe is None and self.journal:
            probe = self.journal.load_probe(self.standings[last][best].probe)
        if probe is None:
            data = self.data(self.layers[best // len(self.grid)])
            training = MlpTraining(data.z.shape[1], self.grid[best % len(self.grid)], seed=self.seed)
            training.advance(data, self.goal(best, last))
            probe = training.probe()
        order: dict[int, Trial] = {}
        for rung in range(last, -1, -1):
            for trial in self.ranked(self.standings[rung], rung):
                order.setdefault(trial, self.trial(trial, self.standings[rung][trial]))
        return SearchOutcome(order[best], probe, tuple(order.values()))

    def trial(self, trial: int, standing: Standing) -> Trial:
        """Return the record of a trial."""
        layer, settings = self.layers[trial // len(self.grid)], self.grid[trial % len(self.grid)]
        return Trial(layer, settings, standing.epochs, standing.r2)


def refuse_equal(data: LayerData, layer: int) -> None:
    """Refuse residuals that leave nothing to learn or to judge by."""
    for name, r in (("training", data.r), ("validation", data.r_val)):
        if len(r) == 0 or np.ptp(r) == 0.0:
            raise CoralError(
                f"The {len(r)} residuals of the {name} rows at layer {layer} are all equal, so probes cannot be told "
                "apart; give more questions."
            )


def in_turns(ranked: Sequence[int], group: Callable[[int], float]) -> list[int]:
    """Return the first of each group, then the second of each, and so on; within a turn the order stays."""
    counts: Counter[float] = Counter()
    turns: dict[int, int] = {}
    for trial in ranked:
        turns[trial] = counts[group(trial)]
        counts[group(trial)] += 1
    return sorted(ranked, key=turns.__getitem__)


class PausedTrials:
    """The best trials of a rung, with weights and optimiser, as many as may go on and find room in memory."""

    def __init__(self, memory: int, most: int, group: Callable[[int], float]) -> None:
        self.memory, self.most, self.group = memory, most, group
        self._trainings: dict[int, MlpTraining] = {}

    def put(self, trial: int, training: MlpTraining) -> None:
        """Keep a trial, at the cost of the worst if there is no room."""
        self._trainings[trial] = training
        while len(self._trainings) > self.most or sum(t.n_bytes for t in self._trainings.values()) > self.memory:
            ranked = sorted(self._trainings, key=lambda trial: (-self._trainings[trial].r2, trial))
            del self._trainings[in_turns(ranked, self.group)[-1]]

    def pop(self, trial: int) -> MlpTraining | None:
        """Return a trial to go on with; None if it was not kept."""
        return self._trainings.pop(trial, None)


class SearchJournal:
    """A file with a line per trial and rung, and beside it the probe of the best finalist so far."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path, self.probe_path = path, path.with_suffix(".safetensors")
        self.entries: dict[int, dict[int, Standing]] = {}
        head, lines = (canonical({"search": digest(identity)}) + "\n").encode(), lines_of(path)
        if lines and lines[0].endswith(b"\n") and lines[0] != head:
            raise CoralError(
                f"{path} is the journal of another search: other layers, settings, states or versions. Delete it or name "
                "another file."
            )
        complete = [line for line in lines[1:] if self._read(line)]
        write_atomic(path, head + b"".join(complete))  # without the line that was being written when the run was killed

    def _read(self, line: bytes) -> bool:
        try:
            values = json.loads(line if line.endswith(b"\n") else b"")
            *entry, claimed = (
                values if len(values) == 6 else (*values, digest(values))
            )  # earlier versions had no digest
            if claimed != digest(entry):
                return False
            rung, trial, epochs, r2, probe = entry
            self.entries.setdefault(int(rung), {})[int(trial)] = Standing(int(epochs), float(r2), str(probe))
        except (ValueError, TypeError):
            return False
        return True

    def add(self, rung: int, trial: int, standing: Standing) -> None:
        """Write a line."""
        entry = [rung, trial, standing.epochs, standing.r2, standing.probe]
        append_line(self.path, (canonical([*entry, digest(entry)]) + "\n").encode())

    def save_probe(self, probe: NetworkProbe) -> str:
        """Write the probe and return its digest."""
        data = save(probe.tensors())
        write_atomic(self.probe_path, data)
        return digest_bytes(data)

    def load_probe(self, wanted: str) -> NetworkProbe | None:
        """Return the saved probe, or None if it is not the wanted one."""
        try:
            data = self.probe_path.read_bytes()
            return NetworkProbe.from_tensors(load(data)) if digest_bytes(data) == wanted else None
        except (OSError, SafetensorError):
            return None
