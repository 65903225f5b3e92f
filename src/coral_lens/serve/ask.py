"""Open questions, `POST /v1/ask`: texts in, what the model wrote and how likely each of it is right out.

Writing takes long, so requests are answered one after the other, in a thread beside the one that scores options: both take
turns with the model, whose lock they share. A few may wait; who comes then is asked to come again. The work of a client that has
gone, or whose time is over, ends with the candidates that are being written at that moment.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import Field

from coral_lens.data.open_questions import OpenQuestion
from coral_lens.engine.candidates import SilentError, open_prompts, worked_examples
from coral_lens.engine.packing import tree_size
from coral_lens.engine.prompts import encode, prepare_any
from coral_lens.engine.self_check import packing_of
from coral_lens.engine.trees import build_tree
from coral_lens.errors import CoralError
from coral_lens.lens.asking import scored_open
from coral_lens.lens.open_answers import OpenAnswer, open_answers
from coral_lens.records import Question
from coral_lens.serve.complaints import Complaint
from coral_lens.serve.content import Given, Strict, is_torn
from coral_lens.serve.log import Logged
from coral_lens.serve.queue import Refusal
from coral_lens.serve.service import away_note
from coral_lens.storage.progress import Progress

if TYPE_CHECKING:
    from coral_lens.serve.lenses import ServedLens
    from coral_lens.serve.service import Gone, Service

MOST_WAITING = 8
"""Requests that wait for their turn."""
RETRY = 5
"""Seconds after which a client is asked to come again."""


class AskedQuestion(Strict):
    """An open question."""

    question: str
    id: str | int | None = None
    """By default its place in the request, from 1."""
    context: str | None = None
    """Text to read before the question."""

    def asked(self, place: int) -> OpenQuestion:
        """Return the question at a place of the request."""
        identity = str(place) if self.id in (None, "") else str(self.id)
        passage = self.context or ""
        if any(map(is_torn, (self.question, passage, identity))):
            raise Complaint(422, f"Question {identity!a} holds half of a surrogate pair, which is not text.")
        try:
            return OpenQuestion(identity, self.question, passage=passage)
        except CoralError as error:
            raise Complaint(422, str(error)) from None


class AskRequest(Strict):
    """Open questions for a lens; one alone may stand there without a list, and as a plain text."""

    lens: str | None = None
    """May be left out where one lens is served."""
    questions: Annotated[list[AskedQuestion | str], Field(min_length=1, fail_fast=True)] | AskedQuestion | str

    @property
    def _listed(self) -> list[AskedQuestion | str]:
        return self.questions if isinstance(self.questions, list) else [self.questions]

    @property
    def n_questions(self) -> int:
        """How many questions there are."""
        return len(self._listed)

    def asked(self) -> list[OpenQuestion]:
        """Return the questions; ids must differ."""
        given = [AskedQuestion(question=q) if isinstance(q, str) else q for q in self._listed]
        questions = [question.asked(place) for place, question in enumerate(given, start=1)]
        if len({q.id for q in questions}) < len(questions):
            raise Complaint(422, "Two questions have the same id; give each its own, or none.")
        return questions


class WrittenCandidate(Given):
    """Something that the model wrote."""

    text: str
    probability: float
    """How likely it is right."""
    count: int
    """How often the model wrote it."""


class AskAnswer(Given):
    """What a lens says to an open question; of a refusal, the id and the reason alone."""

    id: str
    answer: str | None = None
    confidence: float | None = None
    """How likely the answer is right."""
    abstain: bool | None = None
    """Whether it is too uncertain for the stated risk, if the lens was calibrated for one."""
    none: float | None = None
    """How likely no candidate is right."""
    written: int | None = None
    """How many answers the model wrote, those too that are no candidate: empty ones, and those that do not end."""
    candidates: list[WrittenCandidate] | None = None
    """All that the model wrote, the most frequent first."""
    shift: float | None = None
    """How far the question lies from those that the lens was fitted on: 1 is typical of them, 1.5 and beyond is far."""
    trust: float | None = None
    """The weight of the lens in the answer: 1 on a task that it was fitted on."""
    refusal: str | None = None
    """Why there is no answer."""


class AskReply(Given):
    """The answers of a request, in the order of its questions."""

    lens: str
    digest: str
    """Of the lens."""
    answers: list[AskAnswer]
    tokens: int
    """Tokens of all questions, each with its context and its candidates."""
    note: str | None = None
    """What nobody has checked, where the lens is away from home."""


def ask_answer(found: OpenAnswer) -> AskAnswer:
    """Return the answer to one question."""
    written = zip(found.candidates, found.probs, found.counts, strict=True)
    return AskAnswer(
        id=found.id,
        answer=found.answer,
        confidence=found.confidence,
        abstain=found.abstain,
        none=found.p_none,
        written=found.n_written,
        candidates=[WrittenCandidate(text=text, probability=p, count=n) for text, p, n in written],
        shift=found.shift,
        trust=found.trust,
    )


class DroppedError(Exception):
    """Nobody waits for this any more."""


class Written(NamedTuple):
    """What became of the questions of a request."""

    outcomes: tuple[OpenAnswer | Refusal, ...]
    """In the order of the questions."""
    n_tokens: int


class OpenAsker:
    """Answers open questions, one request after the other."""

    def __init__(self, service: Service) -> None:
        self._service, self._waiting = service, 0
        self._turns = ThreadPoolExecutor(1, thread_name_prefix="coral writer")

    def close(self) -> None:
        """End with what is being written."""
        self._turns.shutdown(cancel_futures=True)

    async def answer(self, body: AskRequest, *, gone: Gone) -> AskReply:
        """Answer the questions of one request; what `gone` returns ends when its client does."""
        served, questions = self._refused(body), body.asked()
        dropped = Event()
        self._waiting += 1
        try:
            written = await self._service.wait(self._turns.submit(self._written, served, questions, dropped), gone)
        finally:
            dropped.set()
            self._waiting -= 1
        self._service.keep_books(Logged("/v1/ask", served, tuple(questions), written.outcomes))
        pairs = zip(questions, written.outcomes, strict=True)
        return AskReply(
            lens=served.name,
            digest=served.digest,
            answers=[
                ask_answer(o) if isinstance(o, OpenAnswer) else AskAnswer(id=q.id, refusal=o.reason) for q, o in pairs
            ],
            tokens=written.n_tokens,
            note=away_note(served, written.outcomes),
        )

    def _refused(self, body: AskRequest) -> ServedLens:
        """Return the lens of a request; refuse what it is not for, what is too much, and what comes too early."""
        served, most = self._service.lenses.find(body.lens), self._service.settings.limits.max_questions
        try:
            served.lens.check_kind(is_open=True)
        except CoralError as error:
            raise Complaint(422, str(error)) from None
        if body.n_questions > most:
            raise Complaint(413, f"The request has {body.n_questions} questions, and {most} are allowed at a time.")
        if not self._service.is_ready:
            raise Complaint(503, "The self-check has not passed yet.", retry_after=1)
        if self._waiting >= MOST_WAITING:
            raise Complaint(429, f"Too many questions wait; come again in {RETRY} seconds.", retry_after=RETRY)
        return served

    def _written(self, served: ServedLens, questions: Sequence[OpenQuestion], dropped: Event) -> Written:
        """Have the model write and the lens weigh; what nobody waits for any more ends where a bar would move."""

        @contextmanager
        def bar(_: str, __: int, ___: str) -> Iterator[Progress]:
            def advance(_: int) -> None:
                if dropped.is_set():
                    raise DroppedError

            advance(0)
            yield advance

        start, n_tokens = time.perf_counter(), 0
        outcomes: dict[str, OpenAnswer | Refusal] = dict(self._too_long(served, questions))
        asked = [q for q in questions if q.id not in outcomes]
        try:
            with scored_open(served.lens, self._service.model, asked, bar=bar) as store:
                outcomes |= {a.id: self._service.unless_abstained(a) for a in open_answers(served.lens, store)}
                n_tokens = self._tokens(served, store.questions)
        except SilentError:  # its sentence is about one question, and each has one of its own below
            n_tokens = 0
        except CoralError as error:
            outcomes |= {q.id: Refusal(str(error)) for q in asked}
        if n_tokens:
            seconds = time.perf_counter() - start
            self._service.metrics.batch(n_questions=len(questions), n_tokens=n_tokens, seconds=seconds)
        return Written(tuple(outcomes.get(q.id) or silence(q.id) for q in questions), n_tokens)

    def _too_long(self, served: ServedLens, questions: Sequence[OpenQuestion]) -> dict[str, Refusal]:
        """Return the refusals of questions of which the model would read only the end, or that are longer than is allowed."""
        model, lens, longest = self._service.model, served.lens, self._service.settings.limits.max_tokens
        assert lens.open is not None, "it was checked"
        room = model.max_length - lens.open.sampling.max_tokens
        prompts = open_prompts(model, questions, lens.open.sampling, lens.style)
        ids = encode(list(dict.fromkeys(prompts)), model)
        refused = {}
        for question, prompt in zip(questions, prompts, strict=True):
            n, most = len(ids[prompt]), min(room, longest)
            if n > most:
                why = f"Question {question.id!r} has {n} tokens, and {most} are allowed; shorten it."
                refused[question.id] = Refusal(why)
        return refused

    def _tokens(self, served: ServedLens, questions: Sequence[Question]) -> int:
        """Return the tokens of questions with their candidates."""
        model, lens = self._service.model, served.lens
        assert lens.open is not None, "it was checked"
        shots = worked_examples(lens.open.sampling.examples)  # which are not kept with scores
        prompts = prepare_any([replace(q, shots=shots) for q in questions], lens.style, model).prompts
        return sum(tree_size(build_tree(prompt), packing_of(model)) for prompt in prompts)


def silence(name: str) -> Refusal:
    """Return the refusal of a question to which the model wrote no candidate."""
    return Refusal(f"Question {name!r}: the model wrote no answer that ends in time; ask in other words.")
