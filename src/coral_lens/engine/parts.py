"""Fill one store from many processes: each computes a share of its shards, and whoever ends last leaves it as one process does.

Nothing is agreed upon between them but the manifest, which the first one writes: the plan is a pure function of it and of the
questions. So it makes no difference whether they run at once or one after another, on one machine or on many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.extract import plan_shards, plan_store, store_work
from coral_lens.engine.planned import Extraction, PlannedQuestions
from coral_lens.engine.shard_work import count_questions
from coral_lens.errors import CoralError
from coral_lens.records import Question
from coral_lens.storage.parts import Part
from coral_lens.storage.places import Place, as_place, working_place
from coral_lens.storage.progress import Bar, silent
from coral_lens.storage.resumable import begin_manifest, hold_lock, read_manifest
from coral_lens.storage.shards import Journal, part_journals

if TYPE_CHECKING:
    from coral_lens.engine.model import Model

NAMED = 8
"""So many of the missing shards are named."""


@dataclass(frozen=True)
class PartDone:
    """What is known of a store when one of its parts is finished."""

    part: Part
    n_shards: int
    missing: tuple[int, ...]
    """Shards that other parts have yet to compute, when it was looked at."""

    @property
    def words(self) -> str:
        """What to tell a person."""
        own = len(self.part.share(self.n_shards))
        rest = f"{len(self.missing)} of all {self.n_shards} are missing" if self.missing else "the store is finished"
        return f"part {self.part} is finished, {own} shard(s); {rest}"


def extract_part(
    model: Model,
    questions: Sequence[Question],
    folder: str | Path,
    part: Part,
    *,
    extraction: Extraction,
    bar: Bar = silent,
    strict: bool = True,
) -> PartDone:
    """Compute the shards of one part of a store, as `extract` computes all; the last part to end finishes the store.

    `strict`: more parts than shards are refused.
    """
    with working_place(folder) as place:
        planned = planned_together(model, questions, place, extraction)
        plan = plan_shards(planned)
        shards = plan.shards
        if strict:
            part.refuse_empty(len(shards))
        n_questions = sum(count_questions(shards[number]) for number in part.share(len(shards)))
        with bar(f"part {part}", n_questions, "questions") as progress:
            store_work(planned, plan, place, part=part).run(progress)
        return PartDone(part, len(shards), missing_shards(place, len(shards)))


def planned_together(
    model: Model, questions: Sequence[Question], where: Path | Place, extraction: Extraction
) -> PlannedQuestions:
    """Plan as the process does that was first to write the manifest: what is timed on a machine may differ on another."""
    place = as_place(where)
    place.refresh()
    planned = plan_store(model, questions, place.folder, extraction)
    place.folder.mkdir(parents=True, exist_ok=True)
    if begin_manifest(place.folder / "manifest.json", planned.manifest) and place.begin():
        return planned
    return plan_store(model, questions, place.folder, extraction)


def missing_shards(place: Place, n_shards: int) -> tuple[int, ...]:
    """Return the shards that no journal has."""
    known = Journal(place).entries
    return tuple(shard for shard in range(n_shards) if shard not in known)


def finish_store(folder: str | Path) -> ActivationStore:
    """Check every shard of a store that was computed in parts, leave it as one process does, and return it.

    What is missing or damaged is named. No model is needed.
    """
    with working_place(folder) as place:
        place.refresh()
        read_manifest(place.folder / "manifest.json", needs=("format", "n_questions"))
        with hold_lock(place.folder / ".lock", place.folder):
            finish_journal(Journal(place))
    return ActivationStore(folder)


def finish_journal(journal: Journal) -> None:
    """Check every shard that a journal has, and leave it as one process does; refuse where one is missing."""
    n_shards = journal.announced or 1 + max(journal.entries, default=-1)
    intact = journal.intact()
    if missing := [shard for shard in range(n_shards) if shard not in intact]:
        raise CoralError(
            f"{journal.folder} is not finished: of {n_shards} shards these are missing or damaged: {named(missing)}"
            f"{whose(journal.folder, missing)}; compute them with --part, or the rest in one process without it."
        )
    if n_shards:
        journal.finish(n_shards)


def whose(folder: Path, shards: Sequence[int]) -> str:
    """Return in words which parts have these shards, where all processes have divided the work in the same way."""
    divisions = {int(path.name.split("-")[3]) for path in part_journals(folder)} - {1}
    if len(divisions) != 1:
        return ""
    (of,) = divisions
    parts = sorted({shard % of + 1 for shard in shards})
    return f" (of part {named([f'{number}/{of}' for number in parts])})"


def named(shards: Sequence[int | str]) -> str:
    """Return numbers in words, the first ones if there are many."""
    more = f" and {len(shards) - NAMED} more" if len(shards) > NAMED else ""
    return ", ".join(map(str, shards[:NAMED])) + more
