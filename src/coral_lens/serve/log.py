"""The log of answers, if one is asked for: one JSON line each, with the question, whole on the disk before the next.

What the lens chose stands under `chosen`, never under `answer` or `label`: those are for the person who adds what is right,
and `coral audit` then reads the file as it is. It passes over refusals.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from coral_lens.errors import CoralError
from coral_lens.lens.answers import Answer
from coral_lens.lens.open_answers import OpenAnswer
from coral_lens.records import NONE
from coral_lens.storage.outputs import has_word

if TYPE_CHECKING:
    from coral_lens.data.open_questions import OpenQuestion
    from coral_lens.records import Question
    from coral_lens.serve.lenses import ServedLens
    from coral_lens.serve.queue import Refusal


class Logged(NamedTuple):
    """The questions of one request, and what became of each."""

    route: str
    lens: ServedLens
    questions: tuple[Question | OpenQuestion, ...]
    outcomes: tuple[Answer | OpenAnswer | Refusal, ...]

    def lines(self) -> list[dict[str, Any]]:
        """Return a line for each question; ids of different requests differ, although each may count from 1."""
        request = uuid4().hex[:12]
        shared = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "route": self.route,
            "lens": self.lens.name,
            "lens_digest": self.lens.digest,
        }
        return [
            {**shared, "id": f"{request}.{question.id}", "name": question.id, **asked(question), **answered(outcome)}
            for question, outcome in zip(self.questions, self.outcomes, strict=True)
        ]


def asked(question: Question | OpenQuestion) -> dict[str, Any]:
    """Return what was asked, under the names that a file of questions has."""
    found: dict[str, Any] = {"question": question.text, "context": question.passage}
    for name in ("instructions", "kind", "options", "descriptions"):  # an open question has none of these
        found |= {name: value} if (value := getattr(question, name, "")) else {}
    return found


def answered(outcome: Answer | OpenAnswer | Refusal) -> dict[str, Any]:
    """Return what was answered, or that it was refused, and why."""
    found = {name: value for name, value in asdict(outcome).items() if value is not None and value != ()}
    if isinstance(outcome, Answer):
        return {"chosen": found.pop("answer")} | {name: value for name, value in found.items() if name != "id"}
    if isinstance(outcome, OpenAnswer):
        names = ("confidence", "abstain", "counts", "n_written", "shift", "trust")
        return {
            "chosen": outcome.candidates.index(outcome.answer),
            "option": outcome.answer,
            "options": (*outcome.candidates, NONE),
            "probs": (*outcome.probs, outcome.p_none),
            **{name: found[name] for name in names if name in found},
        }
    return {"type": "refusal", "reason": outcome.reason}


class AnswerLog:
    """A file that lines are added to. It holds what people asked, so only its owner may read it."""

    def __init__(self, path: Path) -> None:
        try:
            if path.is_file() and path.stat().st_size and not has_word(path, '"lens_digest"'):
                raise CoralError(f"--log {path} is no log of answers, and nothing is added to it; choose another file.")
            end_last_line(path)
            number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is no name of a file"
            raise CoralError(f"--log {path} cannot be written: {reason}; choose another file.") from None
        self._file = os.fdopen(number, "ab", buffering=0)

    def write(self, logged: Logged) -> None:
        """Add the lines of a request."""
        for line in logged.lines():
            self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def end_last_line(path: Path) -> None:
    """End the last line of a file, which a kill may have cut short, so that the next is a line of its own. Nothing is removed."""
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
