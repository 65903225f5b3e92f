"""Toy questions, ragged and labelled."""

from __future__ import annotations

import torch

from coral_lens.records import Question


def toy_questions(n: int, *, seed: int = 0, labelled: bool = True) -> list[Question]:
    """Ragged questions of two to five options of different lengths, some of which begin alike."""
    rng = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=rng))

    words = ("red", "redwood", "a blue whale", "green", "seven", "no")
    questions = []
    for i in range(n):
        options = tuple(words[(draw(0, 6) + j) % 6] for j in range(draw(2, 6)))
        options = tuple(f"{option} {j}" for j, option in enumerate(options))
        text = f"Toy question {i}: " + "which one? " * draw(1, 5)
        answer = draw(0, len(options)) if labelled else -1
        questions.append(Question(str(i), str(i // 2), text, options, answer))
    return questions
