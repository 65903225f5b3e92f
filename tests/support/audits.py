"""Probabilities of someone else's system with labels beside them, as rows of a table; the truth behind them is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from coral_lens.audit.reading import read_audited
from coral_lens.audit.systems import AuditedSet

Row = dict[str, Any]
CLASSES = ("ham", "spam", "news", "bill")


def drawn(
    n: int, *, sharpness: float = 1.0, seed: int = 0, spread: float = 1.5
) -> tuple[Float[np.ndarray, "question option"], Int[np.ndarray, " question"]]:
    """Probabilities of four options, and answers that are drawn from them: calibrated at 1, too sure above, by that power."""
    rng = np.random.default_rng(seed)
    logits = spread * rng.normal(size=(n, len(CLASSES)))
    true, said = np.exp(logits), np.exp(sharpness * logits)
    true, said = true / true.sum(axis=1, keepdims=True), said / said.sum(axis=1, keepdims=True)
    answers = (true.cumsum(axis=1) < rng.random((n, 1))).sum(axis=1)
    return said, np.minimum(answers, len(CLASSES) - 1)


def rows(n: int, *, sharpness: float = 1.0, seed: int = 0) -> list[Row]:
    """Rows with a list of probabilities, a label by its text, and a column to divide by."""
    probs, answers = drawn(n, sharpness=sharpness, seed=seed)
    return [
        {
            "id": f"q{i}",
            "question": f"Mail {i}?",
            "options": list(CLASSES),
            "probs": p.tolist(),
            "label": CLASSES[a],
            "topic": "even" if i % 2 == 0 else "odd",
        }
        for i, (p, a) in enumerate(zip(probs, answers, strict=True))
    ]


def audited(n: int, *, sharpness: float = 1.0, seed: int = 0) -> AuditedSet:
    """The same, as it is read."""
    return read_audited([rows(n, sharpness=sharpness, seed=seed)])


def lines(path: Path, made: Sequence[Row]) -> Path:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in made), "utf-8")
    return path
