"""Open questions, `POST /v1/ask`: texts in, what the model wrote and how likely each of it is right out.

Writing takes long, so requests are answered one after the other, beside the thread that scores options: both take turns with the
model, whose lock they share. A few may wait; who comes then is asked to come again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, Field

from coral_lens.data.open_questions import OpenQuestion
from coral_lens.errors import CoralError
from coral_lens.lens.asking import ask
from coral_lens.lens.open_answers import OpenAnswer
from coral_lens.serve.complaints import Complaint
from coral_lens.serve.content import Strict
from coral_lens.serve.service import report

if TYPE_CHECKING:
    from coral_lens.serve.lenses import ServedLens
    from coral_lens.serve.service import Service

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
        if any("\ud800" <= character <= "\udfff" for character in self.question + passage + identity):
            raise Complaint(422, f"Question {identity!a} holds half of a surrogate pair, which is not text.")
        try:
            return OpenQuestion(identity, self.question, passage=passage)
        except CoralError as error:
            raise Complaint(422, str(error)) from None


class AskRequest(Strict):
    """Open questions for a lens; one alone may stand there without a list, and as a plain text."""

    lens: str | None = None
    """May be left out where one lens is served."""
    questions: Annotated[list[AskedQuestion | str], Field(min_length=1)] | AskedQuestion | str

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


class WrittenCandidate(BaseModel):
    """Something that the model wrote."""

    text: str
    probability: float
    """How likely it is right."""
    count: int
    """How often the model wrote it."""


class AskAnswer(BaseModel):
    """What a lens says to an open question; of a refusal, the id and the reason alone."""

    id: str
    answer: str | None = None
    confidence: float | None = None
    """How likely the answer is right."""
    abstain: bool | None = None
    """Whether it is too uncertain for the stated risk, if the lens was calibrated for one."""
    none: float | None = None
    """How likely no candidate is right."""
    candidates: list[WrittenCandidate] | None = None
    """All that the model wrote, the most frequent first."""
    shift: float | None = None
    """How far the question lies from those that the lens was fitted on: 1 is typical of them, 1.5 and beyond is far."""
    trust: float | None = None
    """The weight of the lens in the answer: 1 on a task that it was fitted on."""
    refusal: str | None = None
    """Why there is no answer."""


class AskReply(BaseModel):
    """The answers of a request, in the order of its questions."""

    lens: str
    digest: str
    """Of the lens."""
    answers: list[AskAnswer]


def ask_answer(found: OpenAnswer) -> AskAnswer:
    """Return the answer to one question."""
    written = zip(found.candidates, found.probs, found.counts, strict=True)
    return AskAnswer(
        id=found.id,
        answer=found.answer,
        confidence=found.confidence,
        abstain=found.abstain,
        none=found.p_none,
        candidates=[WrittenCandidate(text=text, probability=p, count=n) for text, p, n in written],
        shift=found.shift,
        trust=found.trust,
    )


class OpenAsker:
    """Answers open questions, one request after the other."""

    def __init__(self, service: Service) -> None:
        self._service, self._turn, self._waiting = service, asyncio.Lock(), 0

    async def answer(self, body: AskRequest) -> AskReply:
        """Answer the questions of one request; a failure of ours is in the log, and no more than a sentence to the client."""
        served, questions = self._refused(body), body.asked()
        self._waiting += 1
        try:
            async with self._turn:
                found = await asyncio.to_thread(self._written, served, questions)
        except Exception as error:
            report(error)
            self._service.metrics.failure()
            raise Complaint(500, "The server failed on this request; its log says where.") from None
        finally:
            self._waiting -= 1
        answers = [found.get(q.id) or AskAnswer(id=q.id, refusal=NOTHING.format(q.id)) for q in questions]
        return AskReply(lens=served.name, digest=served.digest, answers=answers)

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

    def _written(self, served: ServedLens, questions: Sequence[OpenQuestion]) -> dict[str, AskAnswer]:
        """Return the answers by the ids of the questions; those to which nothing was written are missing."""
        try:
            return {a.id: ask_answer(a) for a in ask(served.lens, self._service.model, questions)}
        except CoralError as error:
            return {q.id: AskAnswer(id=q.id, refusal=str(error)) for q in questions}


NOTHING = "Question {0!r}: the model wrote no answer that ends in time; ask in other words."
