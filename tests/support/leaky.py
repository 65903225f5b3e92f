"""Training and test questions of which some are the same, read the same article, or read an edited copy of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coral_lens.data.leaks import ARTICLE, COPY, REPEATED
from support.questions import toy_questions

BOAT = "On a cold morning in May the old man took his boat out to sea and came back with a smile."
HILL = "A young woman who had never seen the hills went up there by train one day in June and stayed."
LEAKING = {"again", "boat", "hill"}
"""Ids of the test questions that leak from training questions."""
DROPPED = {REPEATED: 1, ARTICLE: 2, COPY: 2}
"""Training questions that leak into the test, by reason."""
LEFT_OUT = {REPEATED: 1, ARTICLE: 1, COPY: 1}
"""Test questions that leak from training, by reason."""


def ordinary(n: int, *, seed: int) -> list[dict[str, Any]]:
    """Questions that read nothing."""
    questions = toy_questions(n, seed=seed)
    return [
        {"id": f"{seed}-{q.id}", "question": f"{q.text} ({seed})", "options": q.options, "answer": q.answer}
        for q in questions
    ]


def reading(identity: str, group: str, article: str) -> dict[str, Any]:
    """A question on an article."""
    return {
        "id": identity,
        "group": group,
        "context": article,
        "question": f"What of {identity}?",
        "options": ["yes", "no"],
        "answer": 0,
    }


def training_rows(n: int = 60) -> list[dict[str, Any]]:
    """Ordinary questions, and two on each of two articles."""
    readers = [reading(f"{name}-{i}", name, text) for name, text in (("boats", BOAT), ("hills", HILL)) for i in (1, 2)]
    return ordinary(n, seed=1) + readers


def leaky_rows(n: int = 12) -> list[dict[str, Any]]:
    """Fresh questions, then one of the training questions in other letters, one on the same article, one on an edited copy."""
    first = training_rows(1)[0]
    again = first | {
        "id": "again",
        "question": first["question"].upper(),
        "options": [o.upper() for o in first["options"]],
    }
    edited = HILL.replace("A young", "One young").replace("June", "July")
    return [*ordinary(n, seed=2), again, reading("boat", "boats", BOAT), reading("hill", "hills, edited", edited)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write questions as a file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path
