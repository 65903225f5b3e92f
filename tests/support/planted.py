"""Stores in memory whose signal is known: which layer knows the answers, in which tasks, and where each task lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.model_selection import GroupKFold

from coral_lens.engine.activations import ActivationStore
from coral_lens.lens.fit import training_data
from coral_lens.lens.labelled import Labelled
from coral_lens.lens.settings import FitSettings, NetworkSearch
from coral_lens.lens.training_data import TrainingData
from coral_lens.ragged import Options
from coral_lens.records import OptionTable, Question

WIDTH, LAYERS, COLUMN = 8, (0, 1, 2), 3
IDENTITY = {"name": "planted", "weights": "w" * 64, "tokenizer": "t" * 64, "dtype": "torch.float32"}


class PlantedStore(ActivationStore):
    """Base scores are noise that leans to the answer; some layers know the answers in one column as well as `signal` says."""

    def __init__(
        self,
        n: int,
        *,
        signal: Mapping[int, float] | None = None,
        tasks: Mapping[str, float] | None = None,
        apart: float = 0.0,
        seed: int = 0,
    ) -> None:
        """`tasks` maps names to what the signal is multiplied by there; n questions each, `apart` from each other."""
        tasks = tasks or {"questions": 1.0}
        rng = np.random.default_rng(seed)
        sizes = rng.integers(2, 6, n * len(tasks))
        answers = rng.integers(0, sizes)
        options = Options.of_sizes(sizes)
        rows = options.n_rows
        y = np.zeros(rows)
        y[options.row(answers)] = 1.0
        names = [name for name in tasks for _ in range(n)]
        self.folder, self.name = Path("in memory"), "in memory"
        self.questions = [
            # options of its own: such as all questions have would take a lens out
            Question(str(i), str(i), f"Planted {seed}/{i}?", own_options(i, size), int(answer), task=name)
            for i, (size, answer, name) in enumerate(zip(sizes, answers, names, strict=True))
        ]
        ones = np.ones(rows, dtype=np.int64)
        self.table = OptionTable(rng.normal(size=rows) + 0.5 * y, ones, ones, ones, options.edges, answers)
        # the place of a task never depends on the seed: fresh questions of a task lie where the old ones did
        where = np.random.default_rng(77).normal(size=(len(tasks), WIDTH)) * apart
        places = np.repeat(np.repeat(where, n, axis=0), sizes, axis=0)
        turned = np.repeat([tasks[name] for name in names], sizes)
        self.states = {layer: (rng.normal(size=(rows, WIDTH)) + places).astype(np.float32) for layer in LAYERS}
        for layer, strength in (signal or {}).items():
            self.states[layer][:, COLUMN] += (strength * turned * y).astype(np.float32)
        self.manifest: dict[str, Any] = {"model": IDENTITY, "layers": list(LAYERS), "questions": "q" * 64, "seed": seed}

    def layer(self, layer: int, place: str = "answer") -> np.ndarray:
        assert place == "answer", "planted states are those of the answers"
        return self.states[layer]


def own_options(i: int, n: int) -> tuple[str, ...]:
    """Options that no other question has."""
    return tuple(f"{letter}{i}" for letter in "abcde"[:n])


def one_network(**other: Any) -> NetworkSearch:
    """A search with one small network, trained for three epochs unless told otherwise."""
    usual = {"weight_decay": (1.0,), "output_penalty": (0.0,), "learning_rate": (1e-3,), "hidden": (8, 4), "epochs": 3}
    return NetworkSearch(**{**usual, **other})


def data_of(store: PlantedStore, settings: FitSettings | None = None) -> TrainingData:
    """What a fit with these settings would choose on."""
    return training_data(store, settings or FitSettings())[0]


def brier(store: PlantedStore, probs: np.ndarray, questions: Sequence[int] | np.ndarray | None = None) -> float:
    """The Brier score, the plain way."""
    offsets, answers = store.table.offsets, store.table.answers
    found = []
    for i in range(len(answers)) if questions is None else questions:
        y = np.zeros(offsets[i + 1] - offsets[i])
        y[answers[i]] = 1.0
        found.append(((probs[offsets[i] : offsets[i + 1]] - y) ** 2).sum())
    return float(np.mean(found))


def planted_labels(n: int, *, trust: float, seed: int = 0, states: float | None = None) -> Labelled:
    """Questions whose answers are drawn from base * lens^trust; states, if any, know as much of them in one column."""
    rng, options = np.random.default_rng(seed), Options.of_sizes([4] * n)
    base, own = (np.log(options.softmax(scale * rng.normal(size=4 * n))) for scale in (0.5, 1.5))
    z = None if states is None else options.centre(np.random.default_rng([seed, 1]).normal(size=(4 * n, 8 * WIDTH)))
    more = 0.0 if z is None or states is None else states * z[:, COLUMN]
    truth = options.softmax((1 - trust) * base + trust * own + more).reshape(n, 4)
    answers = np.array([rng.choice(4, p=row) for row in truth])
    return Labelled(base, own, options, options.one_hot(answers), z=z)


def in_articles(data: Labelled, n: int) -> Labelled:
    """The same questions, dealt to so many articles."""
    return data._replace(groups=tuple(f"article {i % n}" for i in range(len(data.options))))


def planted_rows(n: int = 200, width: int = 12, *, seed: int = 0, noise: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """States and residuals that depend on them, by a fixed rule, and on noise."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, width)).astype(np.float32)
    weight = np.linspace(-0.3, 0.3, width)
    return z, np.tanh(z @ weight) + noise * rng.normal(size=n)


def ragged_folds(n: int, *, n_folds: int = 3, seed: int = 0) -> np.ndarray:
    """The fold of each row, by scikit-learn, of questions with two to five options."""
    sizes = np.random.default_rng(seed).integers(2, 6, size=n)
    groups = np.repeat(np.arange(n), sizes)[:n]
    folds = np.empty(n, dtype=np.int64)
    for k, (_, held_out) in enumerate(GroupKFold(n_folds).split(groups, groups=groups)):
        folds[held_out] = k
    return folds
