"""How a question is put into words: the one place that knows, for base models and for chat models, with and without a template.

A question that says no more than a text and options is asked as lm-eval asks: `text` follows its template of ARC, `letters` that
of CommonsenseQA. Instructions and descriptions of options have their places around that. A passage, such as the state that
several decisions are about, always comes before whatever differs between them, so that its tokens are computed once. What kind
of question it is changes nothing: a yes-no question reads as the choice between no and yes.

Only strings: a chat template is a model's, and is applied by the engine.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coral_lens.data.settings import Style
from coral_lens.data.templates import fill_in
from coral_lens.errors import CoralError
from coral_lens.records import UNKNOWN, Question

BETWEEN = "\n\n"
"""Between worked examples, and between a passage and what is asked."""
PROPOSED = "{text}\nProposed answer: {option}\nIs the proposed answer right?"
"""How one option of a question is asked about by itself."""


@dataclass(frozen=True)
class Turn:
    """A question in words, by itself."""

    asked: str
    """What comes before an option."""
    choices: tuple[str, ...]
    """What is scored for each option, without what stands between it and the question."""
    delimiter: str = " "
    """What stands between, for a base model; in a chat the answer is a turn of its own."""

    def answered(self, answer: int) -> str:
        """Return the question with its answer, as a worked example has it."""
        return f"{self.asked}{self.delimiter}{self.choices[answer]}"


def put_into_words(question: Question, style: Style) -> Turn:
    """Return a question in words, without worked examples and without a system prompt."""
    if style.template:
        return by_template(question, style)
    if question.instructions or question.descriptions:
        return decision(question, style)
    lines = [f"Question: {question.text.strip()}"]
    choices = question.options
    if style.kind == "letters":
        choices = letters_of(question)
        lines += [f"{letter}. {option.strip()}" for letter, option in zip(choices, question.options, strict=True)]
    return Turn(passage_of(question) + "\n".join([*lines, "Answer:"]), choices)


def letters_of(question: Question) -> tuple[str, ...]:
    """Return the letters of a question's options."""
    if len(question.options) > len(string.ascii_uppercase):
        raise CoralError(
            f"Question {question.id!r} has {len(question.options)} options, more than there are letters; use the text style."
        )
    return tuple(string.ascii_uppercase[: len(question.options)])


def passage_of(question: Question) -> str:
    """Return what is read before a question, with the space after it."""
    return f"{question.passage.strip()}{BETWEEN}" if question.passage.strip() else ""


# ----------------------------------------------------------------------------------------------------------- decisions


def decision(question: Question, style: Style) -> Turn:
    """Return a question with instructions or described options in words.

    A base model reads on after `Answer:`; a chat model is told what to answer with.
    """
    letters = letters_of(question) if style.kind == "letters" else ()
    listed = option_lines(question, letters)
    told = f"{question.instructions.strip()}{BETWEEN}" if question.instructions.strip() else ""
    if style.chat:
        what = "the letter of one of these options" if letters else "one of these options, and nothing else"
        asked = f"{told}{question.text.strip()}{BETWEEN}Answer with {what}:\n{listed}"
    else:
        shown = f"\n{listed}" if letters or question.descriptions else ""
        asked = f"{told}Question: {question.text.strip()}{shown}\nAnswer:"
    return Turn(passage_of(question) + asked, letters or question.options)


def option_lines(question: Question, letters: Sequence[str]) -> str:
    """Return the options with their descriptions, a line for each."""
    descriptions = question.descriptions or ("",) * len(question.options)
    lines = []
    for j, (option, description) in enumerate(zip(question.options, descriptions, strict=True)):
        mark = f"{letters[j]}. " if letters else "- "
        lines.append(mark + option.strip() + (f": {description.strip()}" if description.strip() else ""))
    return "\n".join(lines)


def asked_as(questions: Sequence[Question], style: Style) -> Sequence[Question]:
    """Return the questions that a style really asks: `p-true` asks about each option by itself. Asking twice changes nothing."""
    refuse_without_options(questions)
    if style.kind != "p-true":
        return questions
    return [statement for question in questions for statement in as_statements(question)]


def refuse_without_options(questions: Sequence[Question]) -> None:
    """Refuse what Python lets anyone pass where questions with options are wanted: open questions, and plain texts."""
    for other in (q for q in questions if not isinstance(q, Question)):
        raise CoralError(
            f"The question {getattr(other, 'id', other)!r} comes without options; the model can be asked to write the answer "
            "(`lens.ask`, `fit_open`), or give questions with options, from `load_questions` or as `Question`."
        )


def as_statements(question: Question) -> list[Question]:
    """Return one yes-no question for each option, whether it is right; what is a yes-no question already is asked as it is."""
    if question.kind == "yes-no":
        return [question]
    if question.soft:
        raise CoralError(
            f"Question {question.id!r} has a soft answer, which says of no option by itself whether it is right."
        )
    if question.rendered is not None or question.shots:
        has = (
            "its own prompt, which asks for one of its options"
            if question.rendered
            else "worked examples, which choose one"
        )
        raise CoralError(f"Question {question.id!r} brings {has}: its options cannot be asked about one by one.")
    right = question.right or (question.answer,)
    known = question.answer != UNKNOWN
    return [
        replace(
            question,
            id=f"{question.id}#{j}",
            text=PROPOSED.format(text=question.text.strip(), option=described_option(question, j)),
            options=("no", "yes"),
            answer=int(j in right) if known else UNKNOWN,
            kind="yes-no",
            descriptions=(),
            right=(),
        )
        for j in range(len(question.options))
    ]


def described_option(question: Question, j: int) -> str:
    """Return an option with its description."""
    description = question.descriptions[j].strip() if question.descriptions else ""
    return question.options[j].strip() + (f" ({description})" if description else "")


# ----------------------------------------------------------------------------------------------------------- templates


def by_template(question: Question, style: Style) -> Turn:
    """Return a question as the user's own template puts it."""
    letters = string.ascii_uppercase[: len(question.options)]
    named = [letters[j] if j < len(letters) else str(j + 1) for j in range(len(question.options))]
    values = question.visible_columns | {
        "question": question.text,
        "options": list(question.options),
        "letters": named,
        "lettered": list(zip(named, question.options, strict=True)),
        "descriptions": list(question.descriptions or ("",) * len(question.options)),
        "context": question.passage,
        "state": question.passage,
        "instructions": question.instructions,
    }
    try:
        asked, scored = fill_in(style.template, values, list(zip(question.options, named, strict=True)))
    except CoralError as error:
        raise CoralError(f"Question {question.id!r}: {error}") from error
    if scored is not None:
        return Turn(asked, scored, delimiter="")
    choices = letters_of(question) if style.kind == "letters" else question.options
    return Turn(asked, choices, delimiter="" if asked[-1:].isspace() else " ")
