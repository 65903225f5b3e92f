"""The prompts of SteerConf: how a model is asked for an answer and its confidence in words. Only strings.

The base prompt and the four steering instructions are those of the paper's appendix B.3, to the letter. It prints the prompt with
chain of thought only; without it, `analyze step by step, ` and the line of the explanation are left out, as in the original
method. The steering instruction follows the note on confidence, where the original method puts it.
"""

from __future__ import annotations

import string
from collections.abc import Callable

from coral_lens.errors import CoralError
from coral_lens.methods.letters import listed_wording
from coral_lens.records import Question

ANSWER_TYPE = "option letter"
THINKING = "analyze step by step, "
EXPLANATION = "Explanation: [insert step-by-step analysis here]\n"
ANSWER_LINE = "Answer and Confidence (0-100):"
TEMPLATE = (
    "Read the question, {thinking}provide your answer and your confidence in this answer. Note: The confidence indicates how "
    "likely you think your answer is true.{steering}\nUse the following format to answer:\n```{explanation}"
    + ANSWER_LINE
    + " [ONLY the {answer_type}], [confidence]%```"
)
STEERING: dict[str, str] = {
    "vanilla": "",
    "cautious": "You are making important decisions, thus you should avoid giving a wrong answer with high confidence.",
    "very_cautious": "You are making important decisions, thus you should avoid giving a wrong answer with high confidence. You "
    "should be very cautious, and tend to give low confidence on almost all of the answers.",
    "confident": "You are making important decisions, thus you should avoid giving a right answer with low confidence.",
    "very_confident": "You are making important decisions, thus you should avoid giving a right answer with low confidence. You "
    "should be very confident, and tend to give high confidence on almost all of the answers.",
}


def instruction(steering: str, *, thinking: bool) -> str:
    """Return what the model is told to do."""
    sentence = STEERING[steering]
    return TEMPLATE.format(
        thinking=THINKING if thinking else "",
        steering=f" {sentence}" if sentence else "",
        explanation=EXPLANATION if thinking else "",
        answer_type=ANSWER_TYPE,
    )


def option_texts(question: Question) -> tuple[str, ...]:
    """Return the texts behind the letters: those listed in a task's prompt, or the options themselves."""
    wording = listed_wording(question)
    return wording.listed if wording else question.options


def shown_question(question: Question) -> str:
    """Return the question with its options under letters; without worked examples, of which SteerConf has none."""
    wording = listed_wording(question)
    stem = (wording.stem if wording else question.wording.bare).strip()
    texts = option_texts(question)
    if len(texts) > len(string.ascii_uppercase):
        raise CoralError(f"Question {question.id!r} has {len(texts)} options, more than there are letters.")
    lines = [f"{letter}. {text.strip()}" for letter, text in zip(string.ascii_uppercase, texts, strict=False)]
    passage = f"{question.passage.strip()}\n\n" if question.passage.strip() else ""
    return "\n".join([f"{passage}Question: {stem}", *lines])


def verbal_prompt(
    question: Question, steering: str, *, thinking: bool, wrap: Callable[[list[dict[str, str]]], str] | None
) -> str:
    """Return the whole prompt: one turn of the user in the model's chat template, or plain text where it has none."""
    text = f"{instruction(steering, thinking=thinking)}\n\n{shown_question(question)}"
    return wrap([{"role": "user", "content": text}]) if wrap else f"{text}\n\n"
