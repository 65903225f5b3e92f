"""OpenAI's format, `POST /v1/decisions`: predicates, choices and scores about one input; `model` is the name of a lens.

`confidence` is the highest probability, which is what OpenAI's page leaves open and Google's says.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictBool, StrictStr

from coral_lens.lens.answers import Answer
from coral_lens.records import Question
from coral_lens.serve.complaints import Complaint
from coral_lens.serve.content import Strict, described, text_of_messages, text_of_parts
from coral_lens.serve.extras import CoralExtras, expected_level, extras_of
from coral_lens.serve.queue import Outcome
from coral_lens.serve.service import Reply, ask, unique

# ------------------------------------------------------------------------------------------------------------- requests

Content = str | list[dict[str, Any]]
"""A text, or parts: `{"type": "input_text", "text": ...}` or `{"type": "input_json", "data": ...}`."""
Value = StrictStr | StrictBool
"""What a choice stands for: the text "true" and the boolean are different values."""
TRUE, FALSE = "true", "false"


class Predicate(Strict):
    """A statement: how likely is it true?"""

    type: Literal["predicate"]
    instructions: Content
    name: str | None = None

    def options(self) -> list[str]:
        """Return the texts that are scored."""
        return [TRUE, FALSE]

    def text(self) -> str:
        """Return what is asked."""
        return f"True or false: {text_of_parts(self.instructions, field='instructions')}"


class ChoiceOption(Strict):
    """One of the options of a choice."""

    value: Value
    description: str | None = None


class Choice(Strict):
    """Which of the options?"""

    type: Literal["choice"]
    instructions: Content
    choices: list[ChoiceOption] = Field(min_length=2)
    name: str | None = None

    def options(self) -> list[str]:
        """Return the texts that are scored; where a text and a boolean would read alike, the text has quotes."""
        values = [choice.value for choice in self.choices]
        words = {json.dumps(value) for value in values if isinstance(value, bool)}
        return [
            json.dumps(v, ensure_ascii=False) if isinstance(v, bool) or v in words else v for v in values
        ]  # fmt: skip

    def text(self) -> str:
        """Return what is asked, with the descriptions of the options."""
        texts = zip(self.options(), self.choices, strict=True)
        return described(
            text_of_parts(self.instructions, field="instructions"), {text: c.description or "" for text, c in texts}
        )


class Level(Strict):
    """One of the levels of a scale."""

    label: str
    description: str | None = None


class Score(Strict):
    """Where on the scale?"""

    type: Literal["score"]
    instructions: Content
    levels: list[Level] = Field(min_length=2)
    """From the lowest to the highest."""
    name: str | None = None

    def options(self) -> list[str]:
        """Return the texts that are scored."""
        return [level.label for level in self.levels]

    def text(self) -> str:
        """Return what is asked, with the descriptions of the levels."""
        return described(
            text_of_parts(self.instructions, field="instructions"), {v.label: v.description or "" for v in self.levels}
        )


DecisionQuestion = Annotated[Predicate | Choice | Score, Field(discriminator="type")]


class DecisionRequest(Strict):
    """Questions about one input."""

    model: str
    """The name of a lens."""
    input: str | list[dict[str, Any]]
    """A text, or messages with texts and JSON; images are refused."""
    questions: list[DecisionQuestion] = Field(min_length=1)
    prompt_cache_key: str | None = None
    """Without effect, as the next two are."""
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None

    @property
    def n_questions(self) -> int:
        """How many questions there are."""
        return len(self.questions)

    def asked(self) -> list[Question]:
        """Return the questions, each with the input as its passage."""
        passage = self.input if isinstance(self.input, str) else text_of_messages(self.input)
        return unique([asked(q, place, passage) for place, q in enumerate(self.questions, start=1)])


def asked(question: Predicate | Choice | Score, place: int, passage: str) -> Question:
    """Return one of the questions, under its name or its place."""
    identity, options = question.name or str(place), question.options()
    if not text_of_parts(question.instructions, field="instructions").strip():
        raise Complaint(422, f"Question {identity!r} is empty.")
    if len(set(options)) < len(options):
        raise Complaint(422, f"Question {identity!r} has the same option twice; each must be unique.")
    return ask(identity, question.text(), options, passage=passage)


# -------------------------------------------------------------------------------------------------------------- replies


class Decided(BaseModel):
    """What all answers have."""

    name: str | None
    coral: CoralExtras


class PredicateAnswer(Decided):
    """How likely the statement is true."""

    type: Literal["predicate"] = "predicate"
    probability: float


class ValueProbability(BaseModel):
    """The probability of an option."""

    value: Value
    probability: float


class ChoiceAnswer(Decided):
    """The most probable option."""

    type: Literal["choice"] = "choice"
    choice: Value
    confidence: float
    probabilities: list[ValueProbability]


class LevelProbability(BaseModel):
    """The probability of a level."""

    label: str
    value: int
    probability: float


class ScoreAnswer(Decided):
    """The expected level, counted from 0."""

    type: Literal["score"] = "score"
    score: float
    confidence: float
    probabilities: list[LevelProbability]


class RefusalAnswer(Decided):
    """A question without an answer; `coral` says why."""

    type: Literal["refusal"] = "refusal"


DecisionAnswer = PredicateAnswer | ChoiceAnswer | ScoreAnswer | RefusalAnswer


class InputDetails(BaseModel):
    """No cache is kept from one request to another."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(BaseModel):
    """Nothing is written by the model."""

    reasoning_tokens: int = 0


class DecisionUsage(BaseModel):
    """Tokens of a request."""

    input_tokens: int
    """Of all questions, each with its input and options."""
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class DecisionReply(BaseModel):
    """Answers in the order of the questions."""

    model: str
    answers: list[DecisionAnswer]
    usage: DecisionUsage


def decision_reply(request: DecisionRequest, reply: Reply) -> DecisionReply:
    """Return the answer to a request."""
    pairs = zip(request.questions, reply.outcomes, strict=True)
    answers = [decision_answer(q, outcome, extras_of(reply.lens, outcome)) for q, outcome in pairs]
    usage = DecisionUsage(input_tokens=reply.n_tokens, total_tokens=reply.n_tokens)
    return DecisionReply(model=reply.lens.name, answers=answers, usage=usage)


def decision_answer(question: Predicate | Choice | Score, outcome: Outcome, coral: CoralExtras) -> DecisionAnswer:
    """Return the answer to one question, in the form of its type."""
    name = question.name
    if not isinstance(outcome, Answer):
        return RefusalAnswer(name=name, coral=coral)
    if isinstance(question, Predicate):
        return PredicateAnswer(name=name, coral=coral, probability=outcome.probs[0])
    if isinstance(question, Choice):
        values = zip(question.choices, outcome.probs, strict=True)
        return ChoiceAnswer(
            name=name,
            coral=coral,
            choice=question.choices[outcome.answer].value,
            confidence=outcome.confidence,
            probabilities=[ValueProbability(value=c.value, probability=p) for c, p in values],
        )
    levels = enumerate(zip(question.levels, outcome.probs, strict=True))
    return ScoreAnswer(
        name=name,
        coral=coral,
        score=expected_level(outcome),
        confidence=outcome.confidence,
        probabilities=[LevelProbability(label=v.label, value=i, probability=p) for i, (v, p) in levels],
    )
