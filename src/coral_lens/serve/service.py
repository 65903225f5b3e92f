"""Between the routes and the model: it checks the questions of a request, queues them, waits, and keeps the books."""

from __future__ import annotations

import asyncio
import math
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from coral_lens.errors import CoralError
from coral_lens.lens.answers import Answer
from coral_lens.lens.open_answers import OpenAnswer
from coral_lens.records import Kind, Question
from coral_lens.report.reach import UNCHECKED, UNCHECKED_OPEN, unchecked, unchecked_sentence
from coral_lens.serve.complaints import FAILED, Complaint
from coral_lens.serve.content import is_torn
from coral_lens.serve.lenses import ServedLens, ServedLenses
from coral_lens.serve.log import AnswerLog, Logged
from coral_lens.serve.metrics import ServeMetrics
from coral_lens.serve.queue import FullError, Job, JobQueue, Outcome, Refusal, Scored
from coral_lens.serve.worker import ModelThread

if TYPE_CHECKING:
    from coral_lens.engine.model import Model
    from coral_lens.serve.settings import ServeSettings

LONGEST_RETRY = 60
"""Seconds after which a client is asked to come again, at most."""
Gone = Callable[[], Awaitable[None]]
"""Returns when the client of a request has gone."""
Result = TypeVar("Result")
OutcomeOrOpen = TypeVar("OutcomeOrOpen", Outcome, OpenAnswer)


class Reply(NamedTuple):
    """What a route makes its answer of."""

    lens: ServedLens
    questions: tuple[Question, ...]
    scored: tuple[Scored, ...]
    """In the order of the questions."""

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """What became of each question."""
        return tuple(one.outcome for one in self.scored)

    @property
    def n_tokens(self) -> int:
        """Tokens of all questions, each with its input and options."""
        return sum(one.n_tokens for one in self.scored)

    @property
    def n_cached(self) -> int:
        """How many of them had been computed for an earlier request."""
        return sum(one.n_cached for one in self.scored)


class Asked(NamedTuple):
    """A request, whatever its format."""

    route: str
    lens: str | None
    questions: Sequence[Question]
    layers: bool = False
    """Whether it is to be said what each layer would do."""


class Service:
    """Answers the questions of requests with the lenses of one model."""

    def __init__(self, model: Model, lenses: ServedLenses, settings: ServeSettings) -> None:
        self.model, self.lenses, self.settings = model, lenses, settings
        self._queue = JobQueue(settings.batching.queue)
        self.metrics = ServeMetrics(lambda: self._queue.waiting)
        self._worker = ModelThread(model, lenses, self._queue, settings, self.metrics)
        self._log = AnswerLog(settings.answering.log) if settings.answering.log else None

    def start(self) -> None:
        """Begin with the self-check, in the thread that owns the model."""
        self._worker.start()

    def stop(self) -> None:
        """Take no further work, and return when what was taken is done."""
        self._queue.close()
        self._worker.join()
        if self._log:
            self._log.close()

    @property
    def is_ready(self) -> bool:
        """Whether the self-check has passed."""
        return self._worker.ready.is_set()

    @property
    def failure(self) -> Exception | None:
        """What the thread that owns the model ended with before its time: mostly the self-check."""
        return self._worker.failure

    async def answer(self, asked: Asked, *, gone: Gone) -> Reply:
        """Answer the questions of one request; what `gone` returns ends when its client does."""
        lens, questions = self.lenses.find(asked.lens), asked.questions
        try:
            lens.lens.check_kind(is_open=False)
        except CoralError as error:
            raise Complaint(422, str(error)) from None
        for question in questions:
            self._refuse(question)
        job = Job(lens, questions, seconds=self.settings.batching.deadline, layers=asked.layers)
        try:
            self._queue.put(job)
        except FullError:
            seconds = min(LONGEST_RETRY, max(1, math.ceil(self._queue.waiting * self._worker.pace)))
            message = f"Too many questions wait; come again in {seconds} seconds."
            raise Complaint(429, message, retry_after=seconds) from None
        answered = await self.wait(job.done, gone)
        scored = tuple(one._replace(outcome=self.unless_abstained(one.outcome)) for one in answered)
        self.keep_books(Logged(asked.route, lens, job.questions, tuple(one.outcome for one in scored)))
        return Reply(lens, job.questions, scored)

    def keep_books(self, answered: Logged) -> None:
        """Count what became of the questions of a request, and log it where that is asked for."""
        for outcome in answered.outcomes:
            self.metrics.outcome(answered.lens.name, outcome)
        if self._log:
            self._log.write(answered)

    def _refuse(self, question: Question) -> None:
        """Refuse a question that no model could be asked, or that has too many options."""
        most = self.settings.limits.max_options
        if len(question.options) > most:
            raise Complaint(
                413, f"Question {question.id!r} has {len(question.options)} options, and {most} are allowed."
            )
        parts = (question.id, question.text, question.passage, question.instructions, *question.options)
        if any(map(is_torn, (*parts, *question.descriptions))):
            raise Complaint(422, f"Question {question.id!a} holds half of a surrogate pair, which is not text.")

    async def wait(self, work: Future[Result], gone: Gone) -> Result:
        """Wait for work to be done; it is dropped when it is too late, or when its client has gone."""
        done = asyncio.wrap_future(work)
        left = asyncio.ensure_future(gone())
        try:
            waited: set[asyncio.Future[Any]] = {done, left}
            await asyncio.wait(waited, timeout=self.settings.batching.deadline, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
            if not done.done():
                done.cancel()
                work.cancel()  # unless it runs
                self.metrics.dropped()
        if done.cancelled():
            seconds = f"{self.settings.batching.deadline:g}"
            raise Complaint(503, f"There was no answer within {seconds} seconds; come again later.", retry_after=1)
        if (error := done.exception()) is not None:
            report(error)
            self.metrics.failure()
            raise Complaint(500, FAILED)
        return done.result()

    def unless_abstained(self, outcome: OutcomeOrOpen) -> OutcomeOrOpen | Refusal:
        """Return an answer, or its refusal if the lens abstains and the server was started so."""
        if self.settings.answering.refuse_abstained and not isinstance(outcome, Refusal) and outcome.abstain:
            return Refusal(f"Question {outcome.id!r}: the answer is too uncertain for the stated risk.")
        return outcome


def away_note(served: ServedLens, outcomes: Iterable[Answer | OpenAnswer | Refusal]) -> str | None:
    """Return what nobody has checked of answers in which a lens is away from home; None where it is not."""
    answers = [outcome for outcome in outcomes if not isinstance(outcome, Refusal)]
    return None if served.lens.adaptation is not None else unchecked(answers) or None


def lens_note(served: ServedLens) -> str | None:
    """Return what nobody has checked of a lens's answers, whatever is asked: a request names no task."""
    lens = served.lens
    if lens.adaptation is not None or lens.everywhere or (lens.trust is not None and lens.trust.everywhere):
        return None
    return unchecked_sentence(UNCHECKED_OPEN if lens.open else UNCHECKED, everywhere=lens.trust is None)


def ask(
    identity: str, text: str, options: Mapping[str, str] | Sequence[str], *, passage: str = "", instructions: str = "",
    kind: Kind = "choice",
) -> Question:  # fmt: skip
    """Return a question of a request, with options or with options and their descriptions; nonsense is the client's mistake."""
    if not text.strip():
        raise Complaint(422, f"Question {identity!r} is empty.", field="question")
    described = tuple(options.values()) if isinstance(options, Mapping) else ()
    try:
        return Question(
            identity,
            identity,
            text,
            tuple(options),
            passage=passage,
            instructions=instructions,
            descriptions=described if any(text.strip() for text in described) else (),
            kind=kind,
        )
    except CoralError as error:
        raise Complaint(422, str(error), field="options") from None


def unique(questions: Sequence[Question]) -> list[Question]:
    """Return questions whose ids differ: one that came before gets its place."""
    seen: set[str] = set()
    found = []
    for place, question in enumerate(questions, start=1):
        identity = question.id
        while identity in seen:
            identity = f"{identity} ({place})"
        seen.add(identity)
        found.append(question if identity == question.id else replace(question, id=identity))
    return found


def report(error: BaseException) -> None:
    """Say on standard error what failed and where, but not its message, which may repeat a question."""
    places = "".join(traceback.format_tb(error.__traceback__))
    print(f"coral: a request failed with {type(error).__name__}:\n{places}", file=sys.stderr, flush=True)
