"""Several stores, or parts of them, read as one: a training mixture is put together without computing a state twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float

from coral_lens.errors import CoralError
from coral_lens.manifest import digest
from coral_lens.records import OptionTable, Predictions, Question, groups_of, offsets_of
from coral_lens.scratch import chunks, let_go, room
from coral_lens.splits import rows_of
from coral_lens.store import ActivationStore

SAME = ("weights", "tokenizer", "dtype")


@runtime_checkable
class Scored(Protocol):
    """Questions that a model has scored, with their states: a store, or several joined."""

    @property
    def manifest(self) -> dict[str, Any]:
        """Model, digest of the questions, and whatever else says where the states come from."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that can be read."""

    @property
    def questions(self) -> Sequence[Question]:
        """The questions in order."""

    @property
    def table(self) -> OptionTable:
        """Their scores."""

    def layer(self, layer: int) -> Float[np.ndarray, "row width"]:
        """Return one layer's pooled states."""


def predictions_of(method: str, scored: Scored, probs: Float[np.ndarray, " row"]) -> Predictions:
    """Return probabilities of the options of scored questions as Predictions."""
    questions, table = scored.questions, scored.table
    return Predictions(
        method=method,
        model=scored.manifest["model"]["name"],
        task=questions[0].task,
        split=questions[0].split,
        ids=tuple(q.id for q in questions),
        answers=table.answers,
        offsets=table.offsets,
        probs=probs,
        groups=groups_of(questions),
    )


@dataclass(frozen=True)
class Part:
    """Some questions of a store."""

    store: ActivationStore
    keep: Bool[np.ndarray, " question"]


def first_questions(store: ActivationStore, n: int | None) -> Part:
    """Return the first n questions of a store, or all of them."""
    return Part(store, np.arange(len(store.questions)) < (len(store.questions) if n is None else n))


class JoinedStore:
    """The kept questions of each part, one part after the other."""

    def __init__(self, parts: Sequence[Part]) -> None:
        first = parts[0].store
        for part in parts[1:]:
            for what in SAME:
                ours, theirs = (s.manifest["model"][what] for s in (first, part.store))
                if ours != theirs:
                    raise CoralError(
                        f"{first.folder} and {part.store.folder} cannot be joined: their model's {what} are {ours[:12]} and "
                        f"{theirs[:12]}; extract both with one model."
                    )
            if part.store.manifest["style"] != first.manifest["style"]:
                raise CoralError(
                    f"{first.folder} and {part.store.folder} cannot be joined: their prompt styles differ."
                )
        self.parts = tuple(parts)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers that every part has."""
        return tuple(sorted(set.intersection(*(set(p.store.layers) for p in self.parts))))

    @cached_property
    def questions(self) -> list[Question]:
        return [q for p in self.parts for q, kept in zip(p.store.questions, p.keep, strict=True) if kept]

    @cached_property
    def table(self) -> OptionTable:
        tables = [(p.store.table, rows_of(p.store.table.offsets, p.keep)) for p in self.parts]

        def column(name: str) -> np.ndarray:
            return np.concatenate([getattr(table, name)[rows] for table, rows in tables])

        return OptionTable(
            logprobs=column("logprobs"),
            n_tokens=column("n_tokens"),
            n_chars=column("n_chars"),
            n_bytes=column("n_bytes"),
            offsets=offsets_of([len(q.options) for q in self.questions]),
            answers=np.array([q.answer for q in self.questions], dtype=np.int64),
        )

    def layer(self, layer: int) -> Float[np.ndarray, "row width"]:
        """Return one layer's pooled states of all parts."""
        out, done = None, 0
        for part in self.parts:
            states = part.store.layer(layer)
            rows = np.flatnonzero(rows_of(part.store.table.offsets, part.keep))
            out = room(int(self.table.offsets[-1]), states.shape[1]) if out is None else out
            for some in chunks(len(rows), states.shape[1]):
                out[done + some.start : done + some.stop] = states[rows[some]]
                let_go(states, out)
            done += len(rows)
        assert out is not None, "a joined store has parts"
        return out

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The blocks whose heads every part has."""
        return tuple(sorted(set.intersection(*(set(p.store.blocks) for p in self.parts))))

    def heads(self, block: int) -> Float[np.ndarray, "row head head_dim"]:
        """Return what each head of a block puts out, of all parts."""
        return np.concatenate([p.store.heads(block)[rows_of(p.store.table.offsets, p.keep)] for p in self.parts])

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Return what a lens keeps of where its states come from."""
        parts = [
            {"store": digest(p.store.manifest), "kept": digest(np.flatnonzero(p.keep).tolist())} for p in self.parts
        ]
        return {
            "model": self.parts[0].store.manifest["model"],
            "style": self.parts[0].store.manifest["style"],
            "questions": digest([p.store.manifest["questions"] for p in self.parts] + parts),
            "parts": parts,
        }
