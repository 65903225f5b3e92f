"""The log of answers, if one is asked for: one JSON line each, with the question, whole on the disk before the next."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from coral_lens.errors import CoralError
from coral_lens.storage.outputs import has_word

if TYPE_CHECKING:
    from coral_lens.records import Question
    from coral_lens.serve.lenses import ServedLens
    from coral_lens.serve.queue import Outcome


class AnswerLog:
    """A file that lines are added to. It holds what people asked, so only its owner may read it."""

    def __init__(self, path: Path) -> None:
        try:
            if path.is_file() and path.stat().st_size and not has_word(path, '"lens_digest"'):
                raise CoralError(f"--log {path} is no log of answers, and nothing is added to it; choose another file.")
            number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is no name of a file"
            raise CoralError(f"--log {path} cannot be written: {reason}; choose another file.") from None
        self._file = os.fdopen(number, "ab", buffering=0)

    def write(self, route: str, lens: ServedLens, question: Question, outcome: Outcome) -> None:
        """Add the line of a question."""
        asked = {"question": question.text, "context": question.passage, "options": question.options}
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "route": route,
            "lens": lens.name,
            "lens_digest": lens.digest,
            "id": question.id,
            **asked,
            **asdict(outcome),
        }
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
