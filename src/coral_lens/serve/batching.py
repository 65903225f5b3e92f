"""Cut batches from the requests that wait: questions become prompts, and as many share a batch as its tokens allow.

Tokens that a question shares with the one before it in its request, such as those of a common input, count once: the engine
computes them once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coral_lens.data.settings import Style
from coral_lens.engine.packing import Packing, tree_size
from coral_lens.engine.prompts import Prepared, encode, prepare_any, render
from coral_lens.engine.trees import SHORTEST, build_tree, common_length, shareable_context
from coral_lens.errors import CoralError
from coral_lens.records import Prompt, Question
from coral_lens.serve.queue import Job, JobQueue, Refusal, Scored

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


SLACK = 64
"""Tokens that texts may have fewer of where they stand together than by themselves."""
COMPANY = 10.0
"""Seconds after which requests that shared a batch say nothing of the next one."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question of a request, ready to be scored."""

    job: Job
    number: int
    """Its place in the request."""
    prepared: Prepared
    """It alone."""
    n_tokens: int

    @property
    def prompt(self) -> Prompt:
        return self.prepared.prompts[0]


@dataclass(frozen=True)
class BatchRule:
    """When a batch is full."""

    tokens: int
    """It holds no more tokens, unless a single question does."""
    wait: float
    """Seconds that its first question waits for others, where others are to be expected."""
    longest: int
    """Tokens of a question at most; a longer one is refused."""
    alone: bool = False
    """Whether every question is a batch of its own."""


class BatchCutter:
    """Takes requests from a queue and gives out batches; used by the one thread that owns the model."""

    def __init__(self, model: Model, queue: JobQueue, packing: Packing, rule: BatchRule) -> None:
        self._model, self._queue, self._packing, self._rule = model, queue, packing, rule
        self._ready: deque[Item] = deque()
        self._company_until = 0.0
        """Until when others are to be expected beside a request: some were there at the last batch, not long ago."""

    def next_batch(self) -> list[Item] | None:
        """Return the questions of the next batch, waiting for them; None once the queue is closed and empty."""
        first = self._next_item(None)
        if first is None:
            return None
        batch, tokens = [first], first.n_tokens
        # one who asks alone does not wait for nobody
        expects = time.monotonic() < self._company_until or self._queue.has_company(first.job)
        until = first.job.arrived + (self._rule.wait if expects else 0.0)
        while not self._rule.alone and tokens < self._rule.tokens:
            item = self._next_item(max(0.0, until - time.monotonic()))
            if item is None:
                break
            cost = item.n_tokens - shared_tokens(batch[-1], item)
            if tokens + cost > self._rule.tokens:
                self._ready.appendleft(item)
                break
            batch.append(item)
            tokens += cost
        if len({id(item.job) for item in batch}) > 1:
            self._company_until = time.monotonic() + COMPANY
        return batch

    def _next_item(self, timeout: float | None) -> Item | None:
        """Return the next question that somebody waits for; those of dropped requests are passed over."""
        while True:
            while self._ready:
                item = self._ready.popleft()
                if not item.job.is_dropped:
                    return item
                self._queue.finished(1)
            job = self._queue.take(timeout)
            if job is None:
                return None
            self._open(job)

    def _open(self, job: Job) -> None:
        """Make prompts of a request's questions, and refuse those that cannot be asked."""
        if job.is_dropped:
            self._queue.finished(len(job.questions))
            return
        try:
            items = self._items(job)
        except Exception as error:
            job.fail(error)
            items = []
        self._queue.finished(len(job.questions) - len(items))
        self._ready.extend(items)

    def _items(self, job: Job) -> list[Item]:
        lens = job.lens.lens
        refused = self._far_too_long(job.questions, lens.style)
        asked = [q for q in job.questions if q.id not in refused]
        prepared = prepare_any(asked, lens.style, self._model, listed="listed" in lens.places)
        number_of = {q.id: i for i, q in enumerate(job.questions)}
        for name, reason in (refused | prepared.left_out).items():
            job.settle(number_of[name], Scored(Refusal(reason)))
        items = []
        for question, rendered, prompt in zip(prepared.questions, prepared.rendered, prepared.prompts, strict=True):
            n_tokens = tree_size(build_tree(prompt), self._packing)
            alone = Prepared((question,), (rendered,), (prompt,), {})
            item = Item(job, number_of[question.id], alone, n_tokens)
            if reason := self._too_long(prompt.id, n_tokens, is_cut=prompt.truncated):
                job.settle(item.number, Scored(Refusal(reason)))
            else:
                items.append(item)
        return items

    def _far_too_long(self, questions: Sequence[Question], style: Style) -> dict[str, str]:
        """Return which questions are too long by their texts alone, and what is said of each.

        What the questions of a request share is looked at once. Whole prompts have it once for each question and option: a small
        request would stand for gigabytes.
        """
        texts = {q.id: {q.passage.strip(), q.instructions.strip(), q.text.strip()} - {""} for q in questions}
        long = [q for q in questions if sum(map(len, texts[q.id])) > 2 * self._rule.longest]
        if not long:
            return {}
        ids = encode(list(dict.fromkeys(text for q in long for text in texts[q.id])), self._model, special=False)
        refused = {}
        for question in long:
            try:
                context = render(question, style, self._model).contexts[0]
            except CoralError:
                continue  # it is refused for another reason
            n_tokens = sum(len(ids[text]) for text in texts[question.id] if text in context) - SLACK
            if reason := self._too_long(question.id, n_tokens, is_cut=n_tokens > self._model.max_length):
                refused[question.id] = reason
        return refused

    def _too_long(self, name: str, n_tokens: int, *, is_cut: bool) -> str:
        longest = self._rule.longest
        if is_cut:
            return f"Question {name!r} is longer than the {self._model.max_length} tokens that the model reads; shorten it."
        if n_tokens > longest:
            return f"Question {name!r} has {n_tokens} tokens with its options, and {longest} are allowed; shorten it."
        return ""


def batch_tokens(batch: Sequence[Item]) -> int:
    """Return the tokens of a batch; what questions of one request share counts once."""
    return sum(item.n_tokens for item in batch) - sum(map(shared_tokens, batch, batch[1:]))


def shared_tokens(before: Item, item: Item) -> int:
    """Return how many tokens of a question the one before it in the same request has computed already."""
    one, other = shareable_context(before.prompt), shareable_context(item.prompt)
    if before.job is not item.job or one is None or other is None:
        return 0
    length = common_length(one, other)
    return length if length >= SHORTEST else 0
