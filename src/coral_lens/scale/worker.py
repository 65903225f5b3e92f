"""A worker of a cluster: it loads the model once, and computes shards of a store that it writes to the shared folder itself."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coral_lens.engine.extract import StorePlan, plan_shards
from coral_lens.engine.fingerprints import identity_difference
from coral_lens.engine.loading import load_model
from coral_lens.engine.packing import Plan, PlannedBatch
from coral_lens.engine.parts import planned_together
from coral_lens.engine.planned import Extraction, PlannedQuestions
from coral_lens.engine.prompts import Prepared
from coral_lens.engine.shard_work import compute_shard
from coral_lens.engine.wanted import Wanted
from coral_lens.errors import CoralError
from coral_lens.records import Prompt, Question, Rendered
from coral_lens.storage.files import versions
from coral_lens.storage.places import MANIFEST, Place, working_place
from coral_lens.storage.shards import write_shard

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


@dataclass(frozen=True)
class ModelSource:
    """How a model is loaded, wherever that is done."""

    name: str
    place: str = ""
    """Its folder or file, where it is one: a worker stands in another folder."""
    device: str | None = None
    dtype: str | None = None
    device_map: str | None = None
    adapter: str | None = None

    def load(self) -> Model:
        """Load it here; it is called as on the command line, wherever its files are."""
        model = load_model(
            self.place or self.name,
            device=self.device,
            dtype=self.dtype,
            device_map=self.device_map,
            adapter=self.adapter,
        )
        return replace(model, name=self.name)


@dataclass(frozen=True)
class ShardTask:
    """All that a worker needs of the questions to compute one shard of them."""

    number: int
    questions: tuple[int, ...]
    """Their numbers in the store; the plan has them as 0, 1, 2 in this order."""
    prompts: tuple[Prompt, ...]
    rendered: tuple[Rendered, ...]
    """The texts of the options, whose length is kept; all of the strings where a neutral context is made of them."""
    plan: Plan

    @property
    def prepared(self) -> Prepared:
        """The questions, as far as they are needed."""
        return Prepared((), self.rendered, self.prompts, {})


def cut_task(plan: StorePlan, number: int) -> ShardTask:
    """Cut the questions of one shard out of a plan."""
    shard = plan.shards[number]
    questions = tuple(sorted({q for batch in shard.batches for q in batch.questions}))
    own = {question: i for i, question in enumerate(questions)}
    batches = tuple(
        PlannedBatch(tuple(tuple(own[q] for q in row) for row in batch.rows), batch.prefixes, batch.plain)
        for batch in shard.batches
    )
    prompts = tuple(plan.prepared.prompts[q] for q in questions)
    rendered = tuple(plan.prepared.rendered[q] for q in questions)
    if not plan.extraction.neutral:
        rendered = tuple(Rendered((), (), r.choices) for r in rendered)
    return ShardTask(number, questions, prompts, rendered, Plan(batches, shard.packing))


def compute_task(model: Model, task: ShardTask, extraction: Extraction, where: Path | Place) -> dict[str, str]:
    """Compute a shard, write it, and return the digests of its tensors."""
    planned = PlannedQuestions(model, task.prepared, extraction)
    tensors = compute_shard(planned, task.plan, lambda _: None)
    numbers = torch.tensor(task.questions, dtype=torch.int64)
    for name in ("question", "broken"):
        if name in tensors:
            tensors[name] = numbers[tensors[name]]
    return write_shard(where, task.number, tensors)


class ShardWorker:
    """The worker itself; Ray makes an actor of it."""

    def __init__(self, source: ModelSource, threads: int) -> None:
        self.source, self._places, self._open = source, dict[str, Place](), ExitStack()
        torch.set_num_threads(threads)

    def _place(self, where: str | Path) -> Place:
        """Return a place that stays open while the worker lives: connecting to a URL takes longer than a small shard."""
        if str(where) not in self._places:
            self._places[str(where)] = self._open.enter_context(working_place(where))
        return self._places[str(where)]

    @cached_property
    def model(self) -> Model:
        """The model, loaded when it is first asked for: what is wrong with it is then said in a sentence."""
        return self.source.load()

    def there(self) -> None:
        """Say that the cluster had room."""

    def load(self) -> None:
        """Load the model."""
        assert self.model is not None

    def plan(self, questions: Sequence[Question], where: str | Path, wanted: Wanted, shard_bytes: int) -> StorePlan:
        """Plan a store: the worker has the model and the device that states depend on, and the driver need not."""
        place = self._place(where)
        with warnings.catch_warnings(), place.named():
            warnings.simplefilter("ignore")  # the driver says what is left out
            planned = planned_together(self.model, questions, place, wanted.of(self.model))
        return plan_shards(planned, shard_bytes)

    def check(self, manifest: Mapping[str, Any], installed: Mapping[str, str], *, mixed: bool) -> None:
        """Refuse to work on a store that this worker would compute in another way."""
        refuse_other(about(self.model), manifest, installed, mixed=mixed)

    def compute(self, task: ShardTask, extraction: Extraction, where: str | Path) -> dict[str, str]:
        """Compute a shard, write it, and return the digests of its tensors."""
        place = self._place(where)
        with place.named():
            place.fetch(MANIFEST)
            return compute_task(self.model, task, extraction, place)


def about(model: Model) -> dict[str, Any]:
    """Return what results of this worker depend on."""
    return {
        "model": {**model.identity, "dtype": model.precision_record},
        "device": model.device_kind,
        "versions": versions(),
    }


def refuse_software(here: Mapping[str, str], installed: Mapping[str, str]) -> None:
    """Refuse a worker with other packages than the driver has."""
    others = [name for name in installed if here.get(name) != installed[name]]
    if others:
        name = others[0]
        raise CoralError(
            f"A worker has {name} {here.get(name)}, and this process has {installed[name]}; install the same versions on all "
            "machines."
        )


def refuse_other(
    here: Mapping[str, Any], manifest: Mapping[str, Any], installed: Mapping[str, str], *, mixed: bool
) -> None:
    """Refuse a worker whose software, model or kind of device is not that of the driver and of the store."""
    refuse_software(here["versions"], installed)
    if difference := identity_difference(manifest["model"], here["model"]):
        raise CoralError(
            f"A worker has another model under the same name ({difference}); have all machines load the same files."
        )
    if not mixed and here["device"] != manifest.get("device", here["device"]):
        raise CoralError(
            f"A worker has another kind of device than the store was begun on ({here['device']}, not {manifest['device']}), and "
            "each rounds in its own way; keep to one kind, or add --mixed if that does not matter."
        )
