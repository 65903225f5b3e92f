"""TypeSafe's format, `POST /v1/systemone`: nouls, choices and scores about one state; `model` is the name of a lens.

`confidence` is (n p - 1) / (n - 1) for the highest probability p of n options, as TypeSafe defines it. A question that is not
answered has the type `refusal`, which its clients pass over with a warning.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from coral_lens.data.options import NO_YES
from coral_lens.lens.answers import Answer
from coral_lens.records import Kind, Question
from coral_lens.serve.complaints import Complaint
from coral_lens.serve.content import NO_IMAGES, Given, Strict, text_of_json
from coral_lens.serve.extras import CoralExtras, expected_level, extras_of
from coral_lens.serve.queue import Outcome
from coral_lens.serve.service import Reply, ask

# ------------------------------------------------------------------------------------------------------------- requests

Content = str | dict[str, Any] | list[Any]
"""A text, or any JSON, which is written out."""
KINDS: dict[str, Kind] = {"noul": "yes-no", "choice": "choice", "score": "score", "box": "choice"}
"""What each type of question is called in a file of decisions: it is asked in the same words."""


class NoulCriteria(Strict):
    """What counts as yes, and what as no."""

    true: Content | None = None
    false: Content | None = None


class Noul(Strict):
    """Yes or no?"""

    type: Literal["noul"]
    instructions: Content | None = None
    criteria: NoulCriteria | None = None

    def options(self) -> dict[str, str]:
        """Return the texts that are scored, with what counts as each."""
        criteria = self.criteria or NoulCriteria()
        meanings = (criteria.false, criteria.true)
        return {name: text_of_json(meaning or "") for name, meaning in zip(NO_YES, meanings, strict=True)}

    def text(self) -> str:
        """Return what is asked."""
        if self.instructions is None and not any(self.options().values()):
            raise Complaint(422, "A noul needs instructions, or criteria for true or false.")
        return text_of_json(self.instructions or "Yes or no?")


class Choice(Strict):
    """Which of the named options?"""

    type: Literal["choice"]
    instructions: Content | None = None
    criteria: dict[str, Content | None] = Field(min_length=2)
    """The options by name, each with its description."""

    def options(self) -> dict[str, str]:
        """Return the texts that are scored, with their descriptions."""
        return {name: text_of_json(meaning or "") for name, meaning in self.criteria.items()}

    def text(self) -> str:
        """Return what is asked."""
        return text_of_json(self.instructions or "Which of these applies?")


class Score(Strict):
    """Which level?"""

    type: Literal["score"]
    instructions: Content | None = None
    criteria: list[Content] = Field(min_length=2, fail_fast=True)
    """Descriptions of the levels, from 0."""

    def options(self) -> list[str]:
        """Return the texts that are scored."""
        return [text_of_json(level) for level in self.criteria]

    def text(self) -> str:
        """Return what is asked."""
        return text_of_json(self.instructions or "Which of these applies?")


class Box(Strict):
    """Where in an image? It is refused, in one sentence."""

    type: Literal["box"]
    instructions: Content | None = None

    def options(self) -> list[str]:
        """Refuse it."""
        raise Complaint(422, NO_IMAGES)

    def text(self) -> str:
        """Refuse it."""
        raise Complaint(422, NO_IMAGES)


SystemOneQuestion = Annotated[Noul | Choice | Score | Box, Field(discriminator="type")]


class SystemOneRequest(Strict):
    """Questions about one state, by ids of the client's choice."""

    model: str
    """The name of a lens."""
    state: Content
    questions: dict[str, SystemOneQuestion] = Field(min_length=1)
    assets: dict[str, Any] | None = None
    """Images, which are refused."""

    @property
    def n_questions(self) -> int:
        """How many questions there are."""
        return len(self.questions)

    def asked(self) -> list[Question]:
        """Return the questions, each with the state as its passage."""
        if self.assets:
            raise Complaint(422, NO_IMAGES, field="assets")
        passage = text_of_json(self.state)
        return [
            ask(name, q.text(), q.options(), passage=passage, kind=KINDS[q.type]) for name, q in self.questions.items()
        ]


# -------------------------------------------------------------------------------------------------------------- replies


class SystemOneAnswer(Given):
    """What all answers have."""

    coral: CoralExtras


class NoulAnswer(SystemOneAnswer):
    """The probability of yes."""

    type: Literal["noul"] = "noul"
    noul: float


class ChoiceAnswer(SystemOneAnswer):
    """The most probable option."""

    type: Literal["choice"] = "choice"
    choice: str
    confidence: float
    probabilities: dict[str, float]


class ScoreAnswer(SystemOneAnswer):
    """The expected level."""

    type: Literal["score"] = "score"
    score: float
    confidence: float
    legend: dict[str, Content]
    probabilities: dict[str, float]


class RefusalAnswer(SystemOneAnswer):
    """A question without an answer; `coral` says why."""

    type: Literal["refusal"] = "refusal"


class SystemOneUsage(Given):
    """Tokens of a request."""

    input_tokens: int
    """Of all questions, each with its state and options."""
    output_tokens: int = 0


class SystemOneReply(Given):
    """Answers by the ids of the questions."""

    model: str
    answers: dict[str, NoulAnswer | ChoiceAnswer | ScoreAnswer | RefusalAnswer]
    usage: SystemOneUsage


def systemone_reply(request: SystemOneRequest, reply: Reply) -> SystemOneReply:
    """Return the answer to a request."""
    outcomes = zip(request.questions.items(), reply.outcomes, strict=True)
    answers = {name: systemone_answer(q, outcome, extras_of(reply.lens, outcome)) for (name, q), outcome in outcomes}
    return SystemOneReply(model=reply.lens.name, answers=answers, usage=SystemOneUsage(input_tokens=reply.n_tokens))


def systemone_answer(
    question: Noul | Choice | Score | Box, outcome: Outcome, coral: CoralExtras
) -> NoulAnswer | ChoiceAnswer | ScoreAnswer | RefusalAnswer:
    """Return the answer to one question, in the form of its type."""
    if not isinstance(outcome, Answer):
        return RefusalAnswer(coral=coral)
    if isinstance(question, Noul):
        return NoulAnswer(coral=coral, noul=outcome.probs[1])
    if isinstance(question, Choice):
        return ChoiceAnswer(
            coral=coral,
            choice=outcome.option,
            confidence=confidence_beyond_chance(outcome),
            probabilities=dict(zip(question.criteria, outcome.probs, strict=True)),
        )
    assert isinstance(question, Score), "a box is refused before"
    return ScoreAnswer(
        coral=coral,
        score=expected_level(outcome),
        confidence=confidence_beyond_chance(outcome),
        legend={str(level): text for level, text in enumerate(question.criteria)},
        probabilities={str(level): p for level, p in enumerate(outcome.probs)},
    )


def confidence_beyond_chance(answer: Answer) -> float:
    """Return (n p - 1) / (n - 1): 0 where all n options are equally probable, 1 where one is certain."""
    n = len(answer.probs)
    return max(0.0, (n * answer.confidence - 1) / (n - 1))
