"""The activation store: a folder of checked shards that a killed run resumes and ends with the same bytes.

    manifest.json             what the activations are of, and how they were made
    questions.jsonl           the questions, without their prompts
    journal.jsonl             one line per finished shard, with a digest for each of its tensors
    shard-00000.safetensors   one tensor per layer, whatever else was read, and the scores of the options

Nothing is ever changed in place: files are written under a temporary name and renamed. Never pickle.

Few questions need no folder: a `MemoryStore` holds what the shards would, and reads the same to the bit. Several stores, or parts
of them, read as one: a training mixture is put together without computing a state twice.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coral_lens.data.assets import cache_dir
from coral_lens.engine.fingerprints import identity_difference
from coral_lens.engine.readers import heads_name, layer_name
from coral_lens.engine.settings import STATE_PLACES, StatePlace
from coral_lens.errors import CoralError
from coral_lens.ragged import Options
from coral_lens.records import UNNAMED, OptionTable, Question, counts_of, question_from, question_record, targets_of
from coral_lens.storage.arrays import allocate, release, row_chunks
from coral_lens.storage.files import digest, disk_errors
from coral_lens.storage.places import reading_place
from coral_lens.storage.resumable import read_manifest
from coral_lens.storage.shards import Journal, bring_column, read_tensor, shard_path

FORMAT = 1
NEEDED = ("model", "questions", "style", "layers", "n_questions")
"""Keys of a manifest without which a store cannot be read."""


def places_of(manifest: Mapping[str, Any]) -> tuple[StatePlace, ...]:
    """Return the places whose states a store holds, by its manifest."""
    named = str(manifest.get("read", "answer")).split()
    return tuple(place for place in STATE_PLACES if place in named)


# --------------------------------------------------------------------------------------------------------- reading


class UnscoredError(CoralError):
    """Not one of the questions has scores."""


class ScoredShards(ABC):
    """The scores and states of questions, read from shards. Everything it returns is in the order of its questions."""

    manifest: dict[str, Any]
    name: str
    """What errors call it."""
    _shards: Mapping[int, Mapping[str, object]]
    """By number, and in each the names of its tensors."""

    @property
    @abstractmethod
    def _asked(self) -> Sequence[Question]:
        """All questions, those without scores too."""

    @abstractmethod
    def _column(self, name: str, shard: int) -> np.ndarray:
        """Return a tensor of a shard."""

    @cached_property
    def n_questions(self) -> int:
        """How many questions have scores: counted in the shards, and no question is read."""
        return sum(len(self._column("question", i)) for i in self._shards)

    def _refuse_unscored(self, elsewhere: str = "") -> None:
        """Refuse scores of no question at all; `elsewhere` ends the remedy."""
        if not self.n_questions:
            raise UnscoredError(
                f"The model {self.manifest['model']['name']!r} gives scores or states that are not finite for every question, "
                f"first {self.broken[0]!r}: its weights or dtype are broken; try --dtype float32{elsewhere}."
            )

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that can be read."""
        return tuple(self.manifest["layers"])

    @property
    def places(self) -> tuple[StatePlace, ...]:
        """The places whose states can be read."""
        return places_of(self.manifest)

    @cached_property
    def questions(self) -> list[Question]:
        """The questions that have scores."""
        return [q for i, q in enumerate(self._asked) if i not in self._broken]

    @property
    def broken(self) -> list[str]:
        """Ids of the questions that were left out because their scores or states are not finite."""
        return [self._asked[i].id for i in sorted(self._broken)]

    @cached_property
    def _broken(self) -> set[int]:
        shards = [i for i, names in self._shards.items() if "broken" in names]
        return {int(q) for i in shards for q in self._column("broken", i)}

    @cached_property
    def table(self) -> OptionTable:
        columns = {name: self._gather(name) for name in ("logprob", "n_tokens", "n_chars", "n_bytes")}
        answers = np.array([q.answer for q in self.questions], dtype=np.int64)
        return OptionTable(
            logprobs=columns["logprob"],
            n_tokens=columns["n_tokens"],
            n_chars=columns["n_chars"],
            n_bytes=columns["n_bytes"],
            offsets=self._options.edges,
            answers=answers,
            targets=targets_of(self.questions),
            neutral=self._gather("neutral") if "neutral" in self.manifest else None,
            counts=counts_of(self.questions),
        )

    def layer(self, layer: int, place: str = "answer") -> Float[np.ndarray, "row width"]:
        """Return one layer's pooled states in float32, reading and checking that layer only, a shard at a time."""
        if place not in self.places:
            raise CoralError(
                f"{self.name} holds states read at {' and '.join(self.places)}, not at {place}; make a store that does: "
                f"`coral extract TASK --out NEW_FOLDER --read {','.join((*self.places, place))}`."
            )
        if layer not in self.layers:
            raise CoralError(
                f"{self.name} holds layers {list(self.layers)}, not {layer}; extract again with --layers {layer}."
            )
        out = None
        for shard, rows in self._places.items():
            states = self._column(layer_name(layer, place), shard)
            out = allocate(self._options.n_rows, states.shape[1]) if out is None else out
            out[rows] = states
            release(out)
        assert out is not None, "a store that can be opened has a shard"
        return out

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The blocks whose heads can be read, whoever had them kept."""
        names = {name for names in self._shards.values() for name in names}
        return tuple(b for b in range(1, self.manifest["model"]["layers"] + 1) if heads_name(b) in names)

    def heads(self, block: int) -> Float[np.ndarray, "row head head_dim"]:
        """Return what each head of a block puts out at the options' last tokens, in float32."""
        if block not in self.blocks:
            held = f"the heads of blocks {list(self.blocks)}" if self.blocks else "no heads"
            raise CoralError(
                f"{self.name} holds {held}, not those of block {block}; make a store that does: "
                "`coral extract TASK --out NEW_FOLDER --heads all`."
            )
        return self._gather(heads_name(block)).astype(np.float32)

    def reading(self, name: str) -> Float[np.ndarray, "row ..."]:
        """Return what a reader took of each option, as it was kept."""
        return self._gather(name)

    @cached_property
    def _options(self) -> Options:
        return Options.of_sizes([len(q.options) for q in self.questions])

    @cached_property
    def _places(self) -> dict[int, Int[np.ndarray, " row"]]:
        """Where the rows of each shard belong in the order of the questions; a shard of which nothing is left has none."""
        broken, places = sorted(self._broken), {}
        for shard in self._shards:
            order = self._column("question", shard)
            order = order - np.searchsorted(broken, order)  # numbers among the questions that have scores
            if len(order):
                places[shard] = self._options.rows_of(order)
        return places

    def _gather(self, name: str) -> np.ndarray:
        """Concatenate a column over the shards and put its rows into the order of the questions."""
        values = np.concatenate([self._column(name, shard) for shard in self._places])
        out = np.empty_like(values)
        out[np.concatenate(list(self._places.values()))] = values
        return out


class ActivationStore(ScoredShards):
    """A finished store in a folder, or at a URL such as s3://bucket/states. Everything it returns is checked against its digests.

    `layers` hides others that it holds: what is made of them is what a store of these layers alone would give.
    """

    def __init__(self, folder: str | Path, *, layers: Sequence[int] | None = None) -> None:
        self.place = reading_place(folder, cache_dir() / "stores")
        self.folder, self.name, self._brought = self.place.folder, self.place.name, set[str]()
        with self.place.named():
            self._open(self.folder)
        if layers is not None:
            self.manifest |= {"layers": list(layers)}

    def _open(self, folder: Path) -> None:
        self.manifest = read_manifest(folder / "manifest.json", needs=("format",))
        if self.manifest.get("format") != FORMAT:
            raise CoralError(f"{folder} has format {self.manifest.get('format')!r}, but this version reads {FORMAT}.")
        read_manifest(folder / "manifest.json", needs=NEEDED)
        self._digests = Journal(self.place).entries
        self._shards = self._digests
        if self.n_questions + len(self._broken) != self.manifest["n_questions"]:
            raise CoralError(
                f"{folder} is not finished; run the same `coral` command again and it goes on where it was."
            )
        self._refuse_unscored(f" and another folder than {folder}")

    @cached_property
    def _asked(self) -> list[Question]:
        path = self.folder / "questions.jsonl"
        self.place.fetch(path.name)
        try:
            # bytes, because str.splitlines would also cut at U+2028 and its like, which a question may hold
            records = [json.loads(line) for line in path.read_bytes().splitlines()]
            questions = [question_from(record) for record in records]
            intact = digest([question_record(q) for q in questions]) == self.manifest["questions"]
        except (OSError, ValueError, KeyError, TypeError, CoralError):
            intact = False
        if not intact:
            raise CoralError(
                f"{self.name}/{path.name} is missing or was changed after it was written; run the `coral` command that made it "
                "again."
            )
        return questions

    def _column(self, name: str, shard: int) -> np.ndarray:
        if name not in self._brought:
            bring_column(self.place, name, self._digests)
            self._brought.add(name)
        path = shard_path(self.folder, shard)
        tensor = read_tensor(path, name, self._digests[shard].get(name, ""))
        if tensor is None:
            raise CoralError(
                f"{self.name}/{path.name} is damaged ({name} does not match its digest); run the `coral` "
                "command that made it again and only this shard is computed anew."
            )
        return np.asarray(tensor.numpy())


def is_store(folder: Path) -> bool:
    """Return whether a folder is a store of ours, finished or not."""
    return (folder / "manifest.json").is_file()


def remove_store(folder: Path) -> None:
    """Remove the files of a store, and its folder unless somebody has put something else there."""
    with disk_errors(folder):
        for pattern in ("shard-*.safetensors", "journal*.jsonl", "questions.jsonl", "manifest.json"):
            for path in folder.glob(pattern):
                path.unlink()
        with suppress(OSError):
            folder.rmdir()


class MemoryStore(ScoredShards):
    """What a store holds, without a folder."""

    def __init__(
        self, manifest: dict[str, Any], questions: Sequence[Question], shards: Sequence[Mapping[str, Tensor]]
    ) -> None:
        self.manifest, self.name, self._tensors = manifest, "The store in memory", dict(enumerate(shards))
        self._shards = self._tensors
        # as they would come back from a folder, which keeps no prompts
        self._questions = [replace(q, rendered=None, shots=(), table=None) for q in questions]
        self._refuse_unscored()

    @property
    def _asked(self) -> Sequence[Question]:
        return self._questions

    def _column(self, name: str, shard: int) -> np.ndarray:
        return np.asarray(self._tensors[shard][name].numpy())


# ---------------------------------------------------------------------------------------------------- joined


@dataclass(frozen=True)
class Subset:
    """Some questions of a store."""

    store: ScoredShards
    keep: Bool[np.ndarray, " question"]
    task: str = ""
    """What the task of those is called that name none; empty: they stay unnamed."""

    @property
    def questions(self) -> list[Question]:
        """The kept questions."""
        kept = [q for q, is_kept in zip(self.store.questions, self.keep, strict=True) if is_kept]
        return [replace(q, task=self.task) if self.task and q.task == UNNAMED else q for q in kept]


def first_questions(store: ActivationStore, n: int | None) -> Subset:
    """Return the first n questions of a store, or all of them."""
    return Subset(store, np.arange(len(store.questions)) < (len(store.questions) if n is None else n))


class JoinedStore:
    """The kept questions of each part, one part after the other."""

    def __init__(self, parts: Sequence[Subset]) -> None:
        first = parts[0].store
        for part in parts[1:]:
            if difference := identity_difference(first.manifest["model"], part.store.manifest["model"]):
                raise CoralError(
                    f"{first.name} and {part.store.name} cannot be joined, because they are of different models: "
                    f"{difference}; extract both with one model."
                )
            if part.store.manifest["style"] != first.manifest["style"]:
                raise CoralError(f"{first.name} and {part.store.name} cannot be joined: their prompt styles differ.")
        self.parts = tuple(parts)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers that every part has."""
        return tuple(sorted(set.intersection(*(set(p.store.layers) for p in self.parts))))

    @cached_property
    def places(self) -> tuple[StatePlace, ...]:
        """The places that were read in every part."""
        return tuple(place for place in STATE_PLACES if all(place in p.store.places for p in self.parts))

    @cached_property
    def questions(self) -> list[Question]:
        return [q for p in self.parts for q in p.questions]

    @cached_property
    def table(self) -> OptionTable:
        tables = [(p.store.table, p.store.table.options.rows(p.keep)) for p in self.parts]

        def column(name: str) -> np.ndarray:
            return np.concatenate([getattr(table, name)[rows] for table, rows in tables])

        return OptionTable(
            logprobs=column("logprobs"),
            n_tokens=column("n_tokens"),
            n_chars=column("n_chars"),
            n_bytes=column("n_bytes"),
            offsets=Options.of_sizes([len(q.options) for q in self.questions]).edges,
            answers=np.array([q.answer for q in self.questions], dtype=np.int64),
            targets=targets_of(self.questions),
            neutral=None if any(table.neutral is None for table, _ in tables) else column("neutral"),
            counts=counts_of(self.questions),
        )

    def layer(self, layer: int, place: str = "answer") -> Float[np.ndarray, "row width"]:
        """Return one layer's pooled states of all parts."""
        out, done = None, 0
        for part in self.parts:
            states = part.store.layer(layer, place)
            rows = np.flatnonzero(part.store.table.options.rows(part.keep))
            out = allocate(self.table.options.n_rows, states.shape[1]) if out is None else out
            for chunk in row_chunks(len(rows), states.shape[1]):
                out[done + chunk.start : done + chunk.stop] = states[rows[chunk]]
                release(states, out)
            done += len(rows)
        assert out is not None, "a joined store has parts"
        return out

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The blocks whose heads every part has."""
        return tuple(sorted(set.intersection(*(set(p.store.blocks) for p in self.parts))))

    def heads(self, block: int) -> Float[np.ndarray, "row head head_dim"]:
        """Return what each head of a block puts out, of all parts."""
        return np.concatenate([p.store.heads(block)[p.store.table.options.rows(p.keep)] for p in self.parts])

    def take(self, mask: Bool[np.ndarray, " question"]) -> JoinedStore:
        """Return the questions of a mask alone, as parts of the same stores."""
        parts, start = [], 0
        for part in self.parts:
            keep, at = part.keep.copy(), np.flatnonzero(part.keep)
            keep[at[~mask[start : start + len(at)]]] = False
            start += len(at)
            parts.append(replace(part, keep=keep))
        return JoinedStore([part for part in parts if part.keep.any()])

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Return what a lens keeps of where its states come from."""
        parts = [
            {
                "store": digest(p.store.manifest),
                "kept": digest(np.flatnonzero(p.keep).tolist()),
                **({"task": p.task} if p.task else {}),
            }
            for p in self.parts
        ]
        return {
            "model": self.parts[0].store.manifest["model"],
            "style": self.parts[0].store.manifest["style"],
            "questions": digest([p.store.manifest["questions"] for p in self.parts] + parts),
            "parts": parts,
        }
