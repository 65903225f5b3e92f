"""Open questions with planted candidates: how often each was written and what its states are tell how likely it is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from coral_lens.engine.activations import ActivationStore
from coral_lens.ragged import Options
from coral_lens.records import NONE, OptionTable, Question, counts_of, targets_of
from support.planted import COLUMN, IDENTITY, LAYERS, WIDTH

WRITTEN = 8


class OpenPlantedStore(ActivationStore):
    """One to four candidates each, of which one is right or none; some layers know it in one column, others know nothing."""

    def __init__(self, n: int, *, signal: float = 2.0, seed: int = 0, labelled: bool = True) -> None:
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1, 5, n)
        answers = np.where(rng.random(n) < 0.5, sizes, rng.integers(0, sizes))  # every second has no right candidate
        self.folder, self.name = Path("in memory"), "in memory"
        self.questions = []
        for i, (size, answer) in enumerate(zip(sizes, answers, strict=True)):
            # what is right is written more often
            odds = np.ones(size + 1) + 3.0 * (np.arange(size + 1) == answer) * (np.arange(size + 1) < size)
            extra = rng.multinomial(WRITTEN - size, odds[:-1] / odds[:-1].sum())
            counts = (*(int(c) + 1 for c in extra), 0)
            texts = (*(f"answer {i} {j}" for j in range(size)), NONE)
            known = int(answer) if labelled else -1
            self.questions.append(
                Question(f"{seed}-{i}", f"{seed}-{i}", f"Planted {seed}/{i}?", texts, known, counts=counts)
            )
        options = Options.of_sizes(sizes + 1)
        y = options.one_hot(answers)
        is_none = options.option == options.spread(sizes)
        rows, ones = options.n_rows, np.ones(options.n_rows, dtype=np.int64)
        self.table = OptionTable(
            -8.0 + rng.normal(size=rows) + 0.5 * y, 2 * ones, ones, ones, options.edges,
            np.array([q.answer for q in self.questions]), targets_of(self.questions), counts=counts_of(self.questions),
        )  # fmt: skip
        # far from 0, as real states are; the text of `none of these` has states of its own, which mean nothing
        self.states = {layer: (rng.normal(size=(rows, WIDTH)) + 5.0).astype(np.float32) for layer in LAYERS}
        for layer in LAYERS[1:]:
            self.states[layer][:, COLUMN] += (signal * (y - 0.5) * ~is_none + 30.0 * is_none).astype(np.float32)
        self.manifest: dict[str, Any] = {"model": IDENTITY, "layers": list(LAYERS), "questions": "q" * 64, "seed": seed}

    def layer(self, layer: int, place: str = "answer") -> np.ndarray:
        return self.states[layer]
