"""Questions of which many share a passage, and the extraction that tests of stores make of them."""

from __future__ import annotations

from dataclasses import replace

from coral_lens.engine.planned import Extraction
from coral_lens.records import Question
from support.questions import toy_questions

WHAT = Extraction(layers=(0, 1, 2, 3), token_budget=200, packing="tree")
N = 24
PASSAGES = (
    "The tide comes in twice a day and covers the lower steps of the pier.",
    "A reef grows where light and warm water meet." * 2,
)


def store_questions(*, seed: int = 0) -> list[Question]:
    """Two thirds of the questions are about one of two passages, which are long enough to be computed once."""
    passages = [*PASSAGES, ""]
    return [replace(q, passage=passages[i % 3]) for i, q in enumerate(toy_questions(N, seed=seed))]
