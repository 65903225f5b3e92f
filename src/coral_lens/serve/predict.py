"""Our own format, `POST /v1/predict`: the fields of a file of questions in, everything that a lens says out."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from coral_lens.data.options import NO_YES
from coral_lens.data.parts import state_text
from coral_lens.lens.answers import Answer
from coral_lens.records import Kind, Question
from coral_lens.serve.complaints import Complaint
from coral_lens.serve.content import Given, Strict
from coral_lens.serve.queue import Scored
from coral_lens.serve.service import Reply, ask, away_note, unique

Listed = Annotated[list[str | int | float], Field(min_length=2, fail_fast=True)]
Described = Annotated[dict[str, str | None], Field(min_length=2)]


class PredictQuestion(Strict):
    """A question or a decision, with the fields that it has in a file."""

    question: str | None = None
    """What is asked; may be left out where the instructions say it."""
    options: Listed | Described | None = None
    """Their texts, or their names with descriptions. A yes-no question needs none: they are no and yes."""
    id: str | int | None = None
    """By default its place in the request, from 1."""
    context: str | None = None
    """Text to read before the question."""
    state: str | dict[str, Any] | list[Any] | None = None
    """What is decided about, text or JSON; it is read before the question, too."""
    instructions: str | None = None
    """How to decide, or what is asked."""
    kind: Kind = "choice"
    """`yes-no` and `score`, whose options are levels in their order, say more of an answer; the probabilities are the same."""

    def asked(self, place: int) -> Question:
        """Return the question at a place of the request."""
        text = self.question or ""
        asked, told = (text, self.instructions or "") if text.strip() else (self.instructions or "", "")
        return ask(
            str(place) if self.id in (None, "") else str(self.id),
            asked,
            self._options(place),
            passage="\n\n".join(filter(None, (state_text(self.state or ""), self.context or ""))),
            instructions=told,
            kind=self.kind,
        )

    def _options(self, place: int) -> list[str] | dict[str, str]:
        if self.options is None:
            if self.kind != "yes-no":
                raise Complaint(422, f"Question {place} has no options.", field="options")
            return list(NO_YES)
        if isinstance(self.options, dict):
            return {name: text or "" for name, text in self.options.items()}
        return [str(option) for option in self.options]


class PredictRequest(Strict):
    """Questions for a lens; one alone may stand there without a list."""

    lens: str | None = None
    """May be left out where one lens is served."""
    questions: Annotated[list[PredictQuestion], Field(min_length=1, fail_fast=True)] | PredictQuestion
    layers: bool = False
    """Also say of each layer what it would do by itself, if the lens keeps that."""

    @property
    def n_questions(self) -> int:
        """How many questions there are."""
        return len(self.questions) if isinstance(self.questions, list) else 1

    def asked(self) -> list[Question]:
        """Return the questions."""
        listed = self.questions if isinstance(self.questions, list) else [self.questions]
        return unique([question.asked(place) for place, question in enumerate(listed, start=1)])


class LayerAnswer(Given):
    """What one layer would do by itself."""

    layer: int
    changes: list[float]
    """By how much its own probe would change the probability of each option."""


class PredictAnswer(Given):
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
    home: bool | None = None
    """Whether the question is of a task that the lens was fitted on: no request names one, so the server is told (`--home`)."""
    kept: bool | None = None
    """Whether the answer stays the model's own, because the lens was not found to answer better; its confidence is used."""
    options_in_set: list[int] | None = None
    """The prediction set, if the lens was calibrated for one."""
    abstain: bool | None = None
    """Whether the answer is too uncertain for the stated risk, if the lens was calibrated for one."""
    p_true: float | None = None
    """Of a yes-no question: how likely the statement is true."""
    expected_level: float | None = None
    """Of a score: the mean level, counted from 0."""
    layers: list[LayerAnswer] | None = None
    """What each layer would do by itself, if that was asked for."""
    refusal: str | None = None
    """Why there is no answer."""


class PredictReply(Given):
    """The answers of a request, in the order of its questions."""

    lens: str
    digest: str
    """Of the lens."""
    answers: list[PredictAnswer]
    tokens: int
    """Tokens of all questions, each with its context and options."""
    cached_tokens: int
    """How many of them had been computed for an earlier request."""
    note: str | None = None
    """What nobody has checked, where the lens is away from home."""


def predict_reply(reply: Reply) -> PredictReply:
    """Return the answer to a request."""
    return PredictReply(
        lens=reply.lens.name,
        digest=reply.lens.digest,
        answers=[predict_answer(q, scored) for q, scored in zip(reply.questions, reply.scored, strict=True)],
        tokens=reply.n_tokens,
        cached_tokens=reply.n_cached,
        note=away_note(reply.lens, reply.outcomes),
    )


def predict_answer(question: Question, scored: Scored) -> PredictAnswer:
    """Return the answer to one question."""
    outcome, layers = scored.outcome, scored.layers
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
        home=outcome.home,
        kept=outcome.kept,
        options_in_set=None if outcome.options_in_set is None else list(outcome.options_in_set),
        abstain=outcome.abstain,
        p_true=outcome.p_true,
        expected_level=outcome.expected_level,
        layers=None if layers is None else [LayerAnswer(layer=one.layer, changes=list(one.changes)) for one in layers],
    )
