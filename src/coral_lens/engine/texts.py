"""Generated texts, kept piece by piece: a killed run goes on where it was and ends with the same bytes.

about.json            what was asked and how; the number of threads, which changes rounding
texts-00000.jsonl     one line per prompt of a piece, after a line with the digest of the others
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coral_lens.engine.generation import Generated, generate_answers
from coral_lens.engine.settings import GenerationSettings
from coral_lens.errors import CoralError
from coral_lens.storage.files import canonical, digest, digest_bytes, disk_errors, versions, write_atomic
from coral_lens.storage.progress import Progress
from coral_lens.storage.resumable import Resumable, each

if TYPE_CHECKING:
    from coral_lens.engine.model import Model

MANIFEST = "about.json"
PIECE = 64
"""Prompts in a piece: what is lost when a run is killed, and the most that are answered at a time."""


def kept_answers(
    model: Model,
    prompts: Sequence[str],
    place: Path,
    *,
    settings: GenerationSettings,
    stop: Sequence[str] = (),
    progress: Progress | None = None,
) -> list[list[Generated]]:
    """Return the model's answers to prompts: from the disk as far as they were written before, the others generated now.

    They are kept in a folder whose name is that of `place` and a digest of all that they depend on: the same place may hold
    texts of several kinds.
    """
    about: dict[str, Any] = {
        "settings": settings.record(),
        "weights": model.fingerprint["weights"],
        "piece": PIECE,
        **({"stop": list(stop)} if stop else {}),
        # the fingerprint of weights is the same in all; texts of earlier versions, which did not say, are taken for float32
        **({"precision": model.precision} if model.precision != "float32" else {}),
    }
    folder = place.with_name(f"{place.name}-{digest(about | {'prompts': list(prompts)})[:8]}")
    pieces = [prompts[start : start + PIECE] for start in range(0, len(prompts), PIECE)]
    Resumable(
        folder,
        about | {"n_prompts": len(prompts), "threads": torch.get_num_threads(), "versions": versions()},
        pieces,
        each(lambda piece, advance: generate_answers(model, piece, settings=settings, stop=stop, progress=advance)),
        size=len,
        form=lambda path: TextFiles(path, [len(piece) for piece in pieces]),
        manifest=MANIFEST,
    ).run(progress)
    return [answers for number in range(len(pieces)) for answers in read_piece(piece_path(folder, number)) or ()]


class TextFiles:
    """A file for each piece; a damaged one, or one of another number of prompts than its piece has, counts as missing."""

    def __init__(self, folder: Path, sizes: Sequence[int]) -> None:
        self.folder, self.sizes = folder, sizes

    def intact(self, among: Collection[int] | None = None) -> set[int]:
        """Return the pieces that are there, of these or of all."""
        wanted = range(len(self.sizes)) if among is None else among
        pieces = {number: read_piece(piece_path(self.folder, number)) for number in wanted}
        return {i for i, answers in pieces.items() if answers is not None and len(answers) == self.sizes[i]}

    def add(self, number: int, result: Sequence[Sequence[Generated]]) -> None:
        """Write the answers to the prompts of a piece."""
        write_piece(piece_path(self.folder, number), result)

    def finish(self, n_pieces: int) -> None:
        """Do nothing: there is no list of pieces to be put in order."""


def piece_path(folder: Path, number: int) -> Path:
    """Return the file of a piece."""
    return folder / f"texts-{number:05d}.jsonl"


def write_piece(path: Path, answers: Sequence[Sequence[Generated]]) -> None:
    """Write the answers to the prompts of a piece, after their digest."""
    lines = "".join(canonical([asdict(sample) for sample in samples]) + "\n" for samples in answers).encode()
    write_atomic(path, (canonical({"sha256": digest_bytes(lines)}) + "\n").encode() + lines)


def read_piece(path: Path) -> list[list[Generated]] | None:
    """Return the answers of a piece; None where there are none, or where they were damaged."""
    if not path.exists():
        return None
    head, _, lines = path.read_bytes().partition(b"\n")
    try:
        if json.loads(head)["sha256"] != digest_bytes(lines):
            return None
        # bytes, because str.splitlines would also cut at U+2028 and its like
        return [
            [Generated(sample["text"], tuple(sample["tokens"]), sample["finished"]) for sample in json.loads(line)]
            for line in lines.splitlines()
        ]
    except (ValueError, KeyError, TypeError, CoralError):
        return None


def remove_texts(folder: Path) -> None:
    """Remove the texts of a folder, and the folder unless somebody has put something else there."""
    with disk_errors(folder):
        for pattern in ("texts-*.jsonl", MANIFEST):
            for path in folder.glob(pattern):
                path.unlink()
        with suppress(OSError):
            folder.rmdir()
