"""OpenAI's format, `POST /v1/decisions`: predicates, choices and scores about one input; `model` is the name of a lens.

`confidence` is the highest probability, which is what OpenAI's page leaves open and Google's says.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictStr

from coral_lens.data.options import NO_YES
from coral_lens.lens.answers import Answer
from coral_lens.records import Kind, Question
from coral_lens.serve.complaints import Complaint
from coral_lens.serve.content import Given, Strict, text_of_messages, text_of_parts
from coral_lens.serve.extras import CoralExtras, expected_level, extras_of
from coral_lens.serve.queue import Outcome
from coral_lens.serve.service import Reply, ask, unique

# ------------------------------------------------------------------------------------------------------------- requests

Parts = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Content = str | Parts
"""A text, or parts: `{"type": "input_text", "text": ...}` or `{"type": "input_json", "data": ...}`."""
Value = StrictStr | StrictBool
"""What a choice stands for: the text "true" and the boolean are different values."""
KINDS: dict[str, Kind] = {"predicate": "yes-no", "choice": "choice", "score": "score"}
"""What each type of question is called in a file of decisions: it is asked in the same words."""


class Predicate(Strict):
    """A statement: how likely is it true?"""

    type: Literal["predicate"]
    instructions: Content
    name: str | None = None

    def options(self) -> dict[str, str]:
        """Return the texts that are scored, which have no descriptions."""
        return dict.fromkeys(NO_YES, "")

    @property
    def n_options(self) -> int:
        """How many are named."""
        return 2

    def text(self) -> str:
        """Return what is asked."""
        return text_of_parts(self.instructions, field="instructions")


class ChoiceOption(Strict):
    """One of the options of a choice."""

    value: Value
    description: str | None = None


class Choice(Strict):
    """Which of the options?"""

    type: Literal["choice"]
    instructions: Content
    choices: list[ChoiceOption] = Field(min_length=2, fail_fast=True)
    name: str | None = None

    def options(self) -> dict[str, str]:
        """Return the texts that are scored with their descriptions; one that reads like a boolean beside it has quotes."""
        words = {json.dumps(choice.value) for choice in self.choices if isinstance(choice.value, bool)}

        def text(value: str | bool) -> str:
            return json.dumps(value, ensure_ascii=False) if isinstance(value, bool) or value in words else value

        return {text(choice.value): choice.description or "" for choice in self.choices}

    @property
    def n_options(self) -> int:
        """How many are named; fewer differ where one comes twice."""
        return len(self.choices)

    def text(self) -> str:
        """Return what is asked."""
        return text_of_parts(self.instructions, field="instructions")


class Level(Strict):
    """One of the levels of a scale."""

    label: str
    description: str | None = None


class Score(Strict):
    """Where on the scale?"""

    type: Literal["score"]
    instructions: Content
    levels: list[Level] = Field(min_length=2, fail_fast=True)
    """From the lowest to the highest."""
    name: str | None = None

    def options(self) -> dict[str, str]:
        """Return the texts that are scored with their descriptions."""
        return {level.label: level.description or "" for level in self.levels}

    @property
    def n_options(self) -> int:
        """How many are named; fewer differ where one comes twice."""
        return len(self.levels)

    def text(self) -> str:
        """Return what is asked."""
        return text_of_parts(self.instructions, field="instructions")


DecisionQuestion = Annotated[Predicate | Choice | Score, Field(discriminator="type")]


class DecisionRequest(Strict):
    """Questions about one input."""

    model: str
    """The name of a lens."""
    input: str | Parts
    """A text, or messages with texts and JSON; images are refused."""
    questions: list[DecisionQuestion] = Field(min_length=1, fail_fast=True)
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
    if len(options) < question.n_options:
        raise Complaint(422, f"Question {identity!r} has the same option twice; each must be unique.")
    return ask(identity, question.text(), options, passage=passage, kind=KINDS[question.type])


# -------------------------------------------------------------------------------------------------------------- replies


class Decided(Given):
    """What all answers have."""

    name: str | None
    coral: CoralExtras


class PredicateAnswer(Decided):
    """How likely the statement is true."""

    type: Literal["predicate"] = "predicate"
    probability: float


class ValueProbability(Given):
    """The probability of an option."""

    value: Value
    probability: float


class ChoiceAnswer(Decided):
    """The most probable option."""

    type: Literal["choice"] = "choice"
    choice: Value
    confidence: float
    probabilities: list[ValueProbability]


class LevelProbability(Given):
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


class InputDetails(Given):
    """What was computed before."""

    cached_tokens: int = 0
    """Tokens that an earlier request had computed."""
    cache_write_tokens: int = 0


class OutputDetails(Given):
    """Nothing is written by the model."""

    reasoning_tokens: int = 0


class DecisionUsage(Given):
    """Tokens of a request."""

    input_tokens: int
    """Of all questions, each with its input and options."""
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class DecisionReply(Given):
    """Answers in the order of the questions."""

    model: str
    answers: list[DecisionAnswer]
    usage: DecisionUsage


def decision_reply(request: DecisionRequest, reply: Reply) -> DecisionReply:
    """Return the answer to a request."""
    pairs = zip(request.questions, reply.outcomes, strict=True)
    answers = [decision_answer(q, outcome, extras_of(reply.lens, outcome)) for q, outcome in pairs]
    details = InputDetails(cached_tokens=reply.n_cached)
    usage = DecisionUsage(input_tokens=reply.n_tokens, input_tokens_details=details, total_tokens=reply.n_tokens)
    return DecisionReply(model=reply.lens.name, answers=answers, usage=usage)


def decision_answer(question: Predicate | Choice | Score, outcome: Outcome, coral: CoralExtras) -> DecisionAnswer:
    """Return the answer to one question, in the form of its type."""
    name = question.name
    if not isinstance(outcome, Answer):
        return RefusalAnswer(name=name, coral=coral)
    if isinstance(question, Predicate):
        return PredicateAnswer(name=name, coral=coral, probability=outcome.probs[1])
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
