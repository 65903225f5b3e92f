"""Generated texts, kept piece by piece: a killed run goes on where it was and ends with the same bytes.

about.json            what was asked and how; the number of threads, which changes rounding
texts-00000.jsonl     one line per prompt of a piece, after a line with the digest of the others
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from coral_lens.engine.generation import Generated, generate_answers
from coral_lens.engine.settings import GenerationSettings
from coral_lens.errors import CoralError
from coral_lens.methods.interface import FitContext
from coral_lens.storage.files import canonical, digest, digest_bytes, read_json, versions, write_atomic, write_json
from coral_lens.storage.resumable import locked, thread_count

PIECE = 64
"""Prompts in a piece: what is lost when a run is killed, and the most that are answered at a time."""


def written(
    context: FitContext, prompts: Sequence[str], name: str, *, settings: GenerationSettings
) -> list[list[Generated]]:
    """Return the model's answers to prompts, from the disk as far as they were written before."""
    model = context.model()
    about = {
        "prompts": list(prompts),
        "settings": asdict(settings),
        "weights": model.fingerprint["weights"],
        "piece": PIECE,
    }
    folder = context.folder / "texts" / f"{name}-{digest(about)[:8]}"
    answers: list[list[Generated]] = []
    with (
        locked(folder),
        thread_count(threads_of(folder, about)),
        context.bar(name, len(prompts), "questions") as advance,
    ):
        for start in range(0, len(prompts), PIECE):
            path = folder / f"texts-{start // PIECE:05d}.jsonl"
            some = prompts[start : start + PIECE]
            found = read_piece(path)
            if found is None or len(found) != len(some):
                found = generate_answers(model, some, settings=settings)
                write_piece(path, found)
            answers += found
            advance(len(found))
    return answers


def threads_of(folder: Path, about: dict[str, Any]) -> int:
    """Return the number of threads that the texts of a folder are written with, and keep it."""
    path = folder / "about.json"
    if not path.exists():
        small = {k: v for k, v in about.items() if k != "prompts"} | {"n_prompts": len(about["prompts"])}
        write_json(path, {**small, "threads": torch.get_num_threads(), "versions": versions()})
    return int(read_json(path)["threads"])


def write_piece(path: Path, answers: Sequence[Sequence[Generated]]) -> None:
    """Write the answers to some prompts."""
    lines = "".join(canonical([asdict(a) for a in some]) + "\n" for some in answers).encode()
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
            [Generated(a["text"], tuple(a["tokens"]), a["finished"]) for a in json.loads(line)]
            for line in lines.splitlines()
        ]
    except (ValueError, KeyError, TypeError, CoralError):
        return None
