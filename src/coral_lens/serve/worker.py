"""The thread that owns the model: it takes batches, has them scored by the engine, and lets every lens answer its own questions.

It ends when the queue is closed and empty. An error of one question is that of its own request: a batch that fails is scored
again, question by question.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from threading import Event, Thread
from typing import TYPE_CHECKING

import numpy as np
import torch

from coral_lens.engine.activations import JoinedStore, Subset, UnscoredError
from coral_lens.engine.budget import choose_budget
from coral_lens.engine.extract import score_planned
from coral_lens.engine.packing import Packing
from coral_lens.engine.planned import Extraction, PlannedQuestions
from coral_lens.engine.prompts import Prepared
from coral_lens.engine.self_check import packing_of
from coral_lens.records import Question
from coral_lens.serve.batching import BatchCutter, BatchRule, Item, batch_tokens
from coral_lens.serve.lenses import ServedLenses
from coral_lens.serve.prefixes import RecurringPrefixes
from coral_lens.serve.queue import JobQueue, LayerChange, Refusal, Scored

if TYPE_CHECKING:
    from coral_lens.engine.model import Model
    from coral_lens.lens.artefact import Lens
    from coral_lens.serve.metrics import ServeMetrics
    from coral_lens.serve.settings import ServeSettings

ROUNDS = 2
"""A batch has so many of the engine's batches for each thread: fewer leave threads idle at its end, more make others wait."""
MEMORY = 0.9
"""How much of the known pace stays when a new batch is measured."""
CHECKED = Question("check", "check", "Which of these is a colour?", ("red", "a wooden table", "seven"))
"""Asked of every lens before the first request is."""


class ModelThread:
    """Answers what is in a queue."""

    def __init__(
        self, model: Model, lenses: ServedLenses, queue: JobQueue, settings: ServeSettings, metrics: ServeMetrics
    ) -> None:
        self._model, self._lenses, self._queue, self._metrics = model, lenses, queue, metrics
        self._settings = settings
        megabytes = 0 if settings.batching.one_by_one else settings.batching.cache_mb
        self._prefixes = RecurringPrefixes(megabytes * 2**20) if megabytes else None
        self._thread = Thread(target=self._run, name="coral model", daemon=True)
        self.ready = Event()
        """Set once the self-check has passed."""
        self.failure: Exception | None = None
        """What ended the thread before its time: mostly the self-check."""
        self.pace = 0.0
        """Seconds that a question takes, of late."""

    def start(self) -> None:
        """Begin with the self-check; then answer."""
        self._thread.start()

    def join(self) -> None:
        """Wait until everything in the queue is answered; it must be closed."""
        self._thread.join()

    def _run(self) -> None:
        try:
            for served in self._lenses:
                if served.lens.open:
                    served.lens.check(self._model)
                else:
                    served.lens.predict(self._model, [CHECKED])
            self._extraction = Extraction(
                self._lenses.layers,
                packing=packing_of(self._model),
                token_budget=choose_budget(self._model, 0),
                read=self._lenses.places,
                neutral=any(served.lens.base == "pmi" for served in self._lenses.for_options),
                exits=self._lenses.exits,
            )
        except Exception as error:
            self.failure = error
            return
        cutter = BatchCutter(self._model, self._queue, self._packing, self._rule())
        self.ready.set()
        try:
            while (batch := cutter.next_batch()) is not None:
                self._time(batch)
        except Exception as error:  # a bug: nothing would ever be answered again, so the server ends
            self.failure = error
            self.ready.clear()

    @property
    def _packing(self) -> Packing:
        assert self._extraction.packing is not None, "it is filled in"
        return self._extraction.packing

    def _rule(self) -> BatchRule:
        batching, budget = self._settings.batching, self._extraction.token_budget
        assert budget is not None, "it is filled in"
        threads = torch.get_num_threads() if self._model.device.type == "cpu" else 1
        return BatchRule(
            tokens=batching.batch_tokens or budget * threads * ROUNDS,
            wait=batching.max_wait_ms / 1000,
            longest=self._settings.limits.max_tokens,
            alone=batching.one_by_one,
        )

    def _time(self, batch: Sequence[Item]) -> None:
        start = time.perf_counter()
        self._answer(batch)
        seconds = time.perf_counter() - start
        each = seconds / len(batch)
        self.pace = MEMORY * self.pace + (1 - MEMORY) * each if self.pace else each
        self._metrics.batch(n_questions=len(batch), n_tokens=batch_tokens(batch), seconds=seconds)
        self._queue.finished(len(batch))

    def _answer(self, batch: Sequence[Item]) -> None:
        try:
            scored = self._scored(batch)
        except Exception as error:
            if len(batch) > 1:
                for item in batch:
                    self._answer([item])
            elif isinstance(error, UnscoredError):
                batch[0].job.settle(batch[0].number, Scored(not_finite(batch[0])))
            else:
                batch[0].job.fail(error)
            return
        for item, one in zip(batch, scored, strict=True):
            item.job.settle(item.number, one)

    def _scored(self, batch: Sequence[Item]) -> list[Scored]:
        """Return what becomes of each question: one pass for all of them, then each by its lens.

        A lens is given one question at a time: what it makes of a set, such as that all have the same options, must not depend on
        who shares a batch.
        """
        wanted = {layer for item in batch if item.job.layers for layer in item.job.lens.view_layers}
        extraction = replace(self._extraction, layers=tuple(sorted({*self._extraction.layers, *wanted})))
        prepared = numbered([item.prepared for item in batch])
        # what is kept of a text ends at the layer after which passes usually end, and is of no use to a deeper one
        prefixes = self._prefixes if extraction.last == self._extraction.last else None
        kept, known = prefixes.kept(prepared.prompts) if prefixes else (None, (0,) * len(batch))
        store = score_planned(PlannedQuestions(self._model, prepared, extraction, kept))
        scored = [Scored(not_finite(item)) for item in batch]
        for place, question in enumerate(store.questions):
            item = batch[int(question.id)]
            own = JoinedStore([Subset(store, np.arange(len(store.questions)) == place)])
            (answer,) = item.job.lens.lens.answers(own)
            layers = layer_changes(item.job.lens.lens, own) if item.job.layers else None
            answer = replace(answer, id=item.prompt.id)
            scored[int(question.id)] = Scored(answer, item.n_tokens, known[int(question.id)], layers)
        self._metrics.cached(n_tokens=sum(known), n_bytes=self._prefixes.n_bytes if self._prefixes else 0)
        return scored


def layer_changes(lens: Lens, store: JoinedStore) -> tuple[LayerChange, ...] | None:
    """Return what each layer would do to the options of one question; None where the lens keeps no view of them."""
    if lens.view is None:
        return None
    changes = lens.view.changes(store, lens.base_probs(store.table))
    return tuple(
        LayerChange(layer, tuple(map(float, row))) for layer, row in zip(lens.view.layers, changes, strict=True)
    )


def numbered(parts: Sequence[Prepared]) -> Prepared:
    """Return the questions of several requests as those of one; their ids, which may be the same, become their places."""
    questions = [q for part in parts for q in part.questions]
    return Prepared(
        tuple(replace(q, id=str(i)) for i, q in enumerate(questions)),
        tuple(r for part in parts for r in part.rendered),
        tuple(p for part in parts for p in part.prompts),
        {},
    )


def not_finite(item: Item) -> Refusal:
    """Return the refusal of a question that the model cannot score."""
    return Refusal(f"Question {item.prompt.id!r}: the model gives scores or states that are not finite.")
