"""Our own format, `POST /v1/predict`: the fields of a file of questions in, everything that a lens says out."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from coral_lens.lens.answers import Answer
from coral_lens.records import Question
from coral_lens.serve.content import Strict
from coral_lens.serve.queue import Outcome
from coral_lens.serve.service import Reply, ask, unique


class PredictQuestion(Strict):
    """A question, with the fields that it has in a file."""

    question: str
    options: list[str | int | float] = Field(min_length=2)
    id: str | int | None = None
    """By default its place in the request, from 1."""
    context: str | None = None
    """Text to read before the question."""

    def asked(self, place: int) -> Question:
        """Return the question at a place of the request."""
        identity = str(place) if self.id in (None, "") else str(self.id)
        return ask(identity, self.question, [str(o) for o in self.options], passage=self.context or "")


class PredictRequest(Strict):
    """Questions for a lens; one alone may stand there without a list."""

    lens: str | None = None
    """May be left out where one lens is served."""
    questions: Annotated[list[PredictQuestion], Field(min_length=1)] | PredictQuestion

    @property
    def n_questions(self) -> int:
        """How many questions there are."""
        return len(self.questions) if isinstance(self.questions, list) else 1

    def asked(self) -> list[Question]:
        """Return the questions."""
        listed = self.questions if isinstance(self.questions, list) else [self.questions]
        return unique([question.asked(place) for place, question in enumerate(listed, start=1)])


class PredictAnswer(BaseModel):
    """What a lens says to a question; of a refusal, the id and the reason alone."""

    id: str
    answer: int | None = None
    """Index of the chosen option."""
    option: str | None = None
    confidence: float | None = None
    """Probability of the chosen option."""
    probs: list[float] | None = None
    """Steered probability of each option."""
    base_probs: list[float] | None = None
    """The model's own."""
    shift: float | None = None
    """How far the question lies from those that the lens was fitted on: 1 is typical of them, 1.5 and beyond is far."""
    trust: float | None = None
    """The weight of the lens in the answer: 1 on a task that it was fitted on, 0 where the answer is the base's."""
    options_in_set: list[int] | None = None
    """The prediction set, if the lens was calibrated for one."""
    abstain: bool | None = None
    """Whether the answer is too uncertain for the stated risk, if the lens was calibrated for one."""
    refusal: str | None = None
    """Why there is no answer."""


class PredictReply(BaseModel):
    """The answers of a request, in the order of its questions."""

    lens: str
    digest: str
    """Of the lens."""
    answers: list[PredictAnswer]
    tokens: int
    """Tokens of all questions, each with its context and options."""


def predict_reply(reply: Reply) -> PredictReply:
    """Return the answer to a request."""
    answers = [predict_answer(q, o) for q, o in zip(reply.questions, reply.outcomes, strict=True)]
    return PredictReply(lens=reply.lens.name, digest=reply.lens.digest, answers=answers, tokens=reply.n_tokens)


def predict_answer(question: Question, outcome: Outcome) -> PredictAnswer:
    """Return the answer to one question."""
    if not isinstance(outcome, Answer):
        return PredictAnswer(id=question.id, refusal=outcome.reason)
    return PredictAnswer(
        id=question.id,
        answer=outcome.answer,
        option=outcome.option,
        confidence=outcome.confidence,
        probs=list(outcome.probs),
        base_probs=list(outcome.base_probs),
        shift=outcome.shift,
        trust=outcome.trust,
        options_in_set=None if outcome.options_in_set is None else list(outcome.options_in_set),
        abstain=outcome.abstain,
    )
