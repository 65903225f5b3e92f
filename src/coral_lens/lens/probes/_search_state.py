"""What a running search keeps: paused trials in memory, and in a journal what is done, so that a killed search goes on."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from coral_lens.errors import CoralError
from coral_lens.lens.probes.mlp import MlpTraining, NetworkProbe
from coral_lens.storage.files import append_line, canonical, digest, digest_bytes, lines_of, write_atomic


@dataclass(frozen=True)
class Standing:
    """What a trial had reached at the end of a rung."""

    epochs: int
    r2: float
    probe: str = ""
    """Digest of its saved probe, if it was the best of its layer so far."""


def in_turns(ranked: Sequence[int], group: Callable[[int], Hashable]) -> list[int]:
    """Return the first of each group, then the second of each, and so on; within a turn the order stays."""
    counts: Counter[Hashable] = Counter()
    turns: dict[int, int] = {}
    for trial in ranked:
        turns[trial] = counts[group(trial)]
        counts[group(trial)] += 1
    return sorted(ranked, key=turns.__getitem__)


class PausedTrials:
    """The trials of a rung that may go on, with weights and optimiser, as many as find room in memory."""

    def __init__(self, memory: int, going_on: Callable[[Mapping[int, float]], list[int]]) -> None:
        """`going_on` gives those of some trials that would go on by their R2, the most promising first."""
        self.memory, self.going_on = memory, going_on
        self._trainings: dict[int, MlpTraining] = {}

    def put(self, trial: int, training: MlpTraining) -> None:
        """Keep a trial if it may go on; where there is no room, at the cost of the least promising."""
        self._trainings[trial] = training
        promising = self.going_on({trial: training.r2 for trial, training in self._trainings.items()})
        sizes = accumulate(self._trainings[trial].n_bytes for trial in promising)
        self._trainings = {
            t: self._trainings[t] for t, size in zip(promising, sizes, strict=True) if size <= self.memory
        }

    def pop(self, trial: int) -> MlpTraining | None:
        """Return a trial to go on with; None if it was not kept."""
        return self._trainings.pop(trial, None)


class SearchJournal:
    """A file with a line per trial and rung, and beside it the probe of the best trial so far of each layer."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
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
            reached = -math.inf if r2 is None else float(r2)
            self.entries.setdefault(int(rung), {})[int(trial)] = Standing(int(epochs), reached, str(probe))
        except (ValueError, TypeError):
            return False
        return True

    def add(self, rung: int, trial: int, standing: Standing) -> None:
        """Write a line."""
        # JSON has no -inf, which is the R2 of a trial that diverged
        r2 = standing.r2 if math.isfinite(standing.r2) else None
        entry = [rung, trial, standing.epochs, r2, standing.probe]
        append_line(self.path, (canonical([*entry, digest(entry)]) + "\n").encode())

    def probe_path(self, place: int) -> Path:
        """Return where the probe of a layer is, by the layer's place among those that are searched."""
        return self.path.with_suffix(f".{place}.safetensors")

    def save_probe(self, place: int, probe: NetworkProbe) -> str:
        """Write the probe of a layer and return its digest."""
        data = save(probe.tensors())
        write_atomic(self.probe_path(place), data)
        return digest_bytes(data)

    def load_probe(self, place: int, wanted: str) -> NetworkProbe | None:
        """Return the saved probe of a layer, or None if it is not the wanted one."""
        try:
            data = self.probe_path(place).read_bytes()
            return NetworkProbe.from_tensors(load(data)) if digest_bytes(data) == wanted else None
        except (OSError, SafetensorError):
            return None
