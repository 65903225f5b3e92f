"""The questions of `answering.py` and what a model makes of them: drawn once, extracted piece by piece, read from what is there.

A piece is a store of some hundred questions, so that tables can be made while the rest is still to come. The first pieces are the
most valuable ones. Within a piece, questions about one article stay together: its tokens are computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import TaskOptions
from coral_lens.engine.activations import ActivationStore, JoinedStore, Subset, is_store
from coral_lens.engine.extract import extract
from coral_lens.engine.loading import load_model
from coral_lens.engine.planned import Extraction, all_layers
from coral_lens.engine.settings import STATE_PLACES
from coral_lens.errors import CoralError
from coral_lens.records import Question
from coral_lens.storage.files import file_name
from coral_lens.storage.progress import questions_bar

PIECE = 100
"""Questions of a piece; sizes are rounded up to whole pieces, so that a larger size later adds pieces and changes none."""
SEED = 0


@dataclass(frozen=True)
class Part:
    """Some questions of a split."""

    task: str
    split: str
    n: int
    shots: int = 0
    each: int | None = None
    """So many of each task of a group, in one piece; None: n questions drawn from all."""

    @property
    def name(self) -> str:
        """Task and split."""
        return f"{self.task}:{self.split}"

    def questions(self, data: Path | None) -> list[Question]:
        """Return its questions in an order drawn once: fewer are the first of more. Those of one article stay together."""
        options = TaskOptions(split=self.split, num_fewshot=self.shots, data_dir=data)
        rng = np.random.default_rng(SEED)
        groups: dict[str, list[Question]] = {}
        for question in load_questions(self.task, options):
            groups.setdefault(question.group, []).append(question)
        names = sorted(groups)
        drawn = [q for i in rng.permutation(len(names)) for q in groups[names[i]]]
        if self.each is None:
            return drawn[: PIECE * -(-self.n // PIECE)]
        tasks = sorted({q.task for q in drawn})
        return [q for task in tasks for q in [q for q in drawn if q.task == task][: self.each]]

    def pieces(self, data: Path | None) -> Iterator[tuple[str, list[Question]]]:
        """Yield the name of each piece with its questions."""
        questions = self.questions(data)
        size = PIECE if self.each is None else len(questions)
        for start in range(0, len(questions), size):
            yield file_name(f"{self.name}-{start:05d}"), questions[start : start + size]


def parts_of(sizes: dict[str, int]) -> list[Part]:
    """Return what is extracted, the most valuable first; articles are long, and come last. A size of 0 leaves a part out."""
    home, more = sizes["train"], sizes["curve"]
    parts = [
        Part("commonsense_qa", "validation", sizes["test"]),
        Part("commonsense_qa", "train", home),
        Part("commonsense_qa", "validation", sizes["home"]),
        Part("arc_challenge", "test", sizes["test"]),
        Part("openbookqa", "test", sizes["test"]),
        Part("hellaswag", "validation", sizes["test"]),
        Part("mathqa", "test", sizes["test"]),
        *([Part("commonsense_qa", "train", more)] if more > home else []),
        Part("mmlu", "test", 0, shots=5, each=sizes["each"]),
        Part("race_question", "test", sizes["test"]),
        Part("race_question", "train", sizes["race"]),
    ]
    return [part for part in parts if part.n or part.each]


def extract_all(parts: Sequence[Part], model: str, folder: Path, *, dtype: str, data: Path | None) -> None:
    """Extract every piece that is not there yet."""
    opened = load_model(model, dtype=dtype)
    extraction = Extraction(layers=all_layers(opened), read=STATE_PLACES, neutral=True)
    for part in parts:
        for name, questions in part.pieces(data):
            with questions_bar(name, len(questions)) as advance:
                extract(opened, questions, folder / name, extraction=extraction, progress=advance)


def stored(part: Part, folder: Path) -> JoinedStore:
    """Return what is there of a part, in its order: the first pieces, as far as they are finished."""
    found = []
    for path in sorted(folder.glob(f"{file_name(part.name)}-*")):
        try:
            found.append(ActivationStore(path) if is_store(path) else None)
        except CoralError:  # it is still being extracted
            break
    pieces = [store for store in found if store is not None]
    if not pieces:
        raise CoralError(f"Nothing of {part.name} is in {folder} yet; run `answering.py extract`.")
    return first(JoinedStore([Subset(s, np.ones(len(s.questions), dtype=bool)) for s in pieces]), part.n or None)


def joined(stores: Sequence[JoinedStore]) -> JoinedStore:
    """Return the questions of several stores, one after the other."""
    if not stores:
        raise CoralError("Nothing to fit on was extracted yet; run `answering.py extract`.")
    return JoinedStore([part for store in stores for part in store.parts])


def first(store: JoinedStore, n: int | None) -> JoinedStore:
    """Return the first n questions of a store, or all."""
    return store if n is None else store.take(np.arange(len(store.questions)) < n)


def counted(parts: Sequence[Part], data: Path | None) -> list[tuple[Part, int]]:
    """Return how many questions each part has, those of an earlier part of the same split counted once."""
    seen: dict[str, int] = {}
    found = []
    for part in parts:
        n = len(part.questions(data))
        found.append((replace(part, n=n), n - seen.get(part.name, 0)))
        seen[part.name] = max(n, seen.get(part.name, 0))
    return found
