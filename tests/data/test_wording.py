"""How questions are put into words, letter by letter: existing ones as ever, decisions in one style for base and one for chat."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import Style, TableOptions
from coral_lens.data.wording import as_statements, put_into_words
from coral_lens.engine.prompts import render
from coral_lens.errors import CoralError
from coral_lens.records import UNKNOWN, Question

PLAIN = Question("1", "1", "Which floats?", ("cork", "lead"), 0)
DECISION = Question(
    "2",
    "2",
    "What does the customer want?",
    ("refund", "other"),
    1,
    passage='{"text": "Where is my parcel?"}',
    instructions="Be strict.",
    descriptions=("money back", ""),
)


def test_a_plain_question_is_asked_as_ever() -> None:
    assert put_into_words(PLAIN, Style()).asked == "Question: Which floats?\nAnswer:"
    lettered = put_into_words(replace(PLAIN, passage="Water. "), Style("letters"))
    assert lettered.asked == "Water.\n\nQuestion: Which floats?\nA. cork\nB. lead\nAnswer:"
    assert lettered.choices == ("A", "B")


def test_a_decision_for_a_base_model() -> None:
    turn = put_into_words(DECISION, Style())
    assert turn.asked == (
        '{"text": "Where is my parcel?"}\n\nBe strict.\n\nQuestion: What does the customer want?\n- refund: money back\n- other\n'
        "Answer:"
    )
    assert turn.answered(1).endswith("\nAnswer: other")
    assert put_into_words(replace(DECISION, descriptions=()), Style()).asked.endswith("want?\nAnswer:")


def test_a_decision_for_a_chat_model() -> None:
    turn = put_into_words(DECISION, Style(chat=True))
    assert turn.asked == (
        '{"text": "Where is my parcel?"}\n\nBe strict.\n\nWhat does the customer want?\n\nAnswer with one of these options, and '
        "nothing else:\n- refund: money back\n- other"
    )
    assert turn.choices == ("refund", "other")
    lettered = put_into_words(DECISION, Style("letters", chat=True))
    assert lettered.asked.endswith("Answer with the letter of one of these options:\nA. refund: money back\nB. other")
    assert lettered.choices == ("A", "B")


@pytest.mark.parametrize("style", [Style(), Style("letters"), Style(chat=True)])
def test_a_kind_changes_no_word(style: Style) -> None:
    statement, choice = load_questions(
        [
            {"question": "It is late.", "kind": "yes-no", "instructions": "Judge."},
            {"question": "It is late.", "options": ["no", "yes"], "instructions": "Judge."},
        ]
    )
    assert put_into_words(statement, style) == put_into_words(choice, style)
    levels = {"question": "How late?", "options": ["low", "high"]}
    score, two = load_questions([{**levels, "kind": "score"}, levels])
    assert put_into_words(score, style) == put_into_words(two, style)


def test_worked_examples_and_a_system_prompt_come_before_the_question() -> None:
    asked = replace(PLAIN, shots=(replace(PLAIN, text="Which sinks?", answer=1),))
    rendered = render(asked, Style(system="You are brief."), None)
    assert rendered.contexts[0] == (
        "You are brief.\n\nQuestion: Which sinks?\nAnswer: lead\n\nQuestion: Which floats?\nAnswer:"
    )
    assert rendered.continuations == (" cork", " lead")


class Chat:
    """A model that shows its messages."""

    @staticmethod
    def chat_template(messages: list[dict[str, str]]) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def test_worked_examples_are_turns_of_a_chat() -> None:
    asked = replace(PLAIN, shots=(replace(PLAIN, text="Which sinks?", answer=1),))
    rendered = render(asked, Style(chat=True, system="Be brief."), Chat())  # type: ignore[arg-type]
    assert rendered.contexts[0] == (
        "<system>Be brief.<user>Question: Which sinks?\nAnswer:<assistant>lead<user>Question: Which floats?\nAnswer:<assistant>"
    )
    assert (rendered.continuations, rendered.chat) == (("cork", "lead"), True)


# ----------------------------------------------------------------------------------------------------------- templates


def test_a_template_sees_the_columns_of_the_table_and_never_the_answer() -> None:
    row = {"sentence1": "It rains.", "sentence2": "It is wet.", "gold": "yes"}
    (question,) = load_questions([row], TableOptions(kind="yes-no", instructions="Does it follow?"))
    style = Style(template="{{ sentence1 }}\n{{ question }} {{ sentence2 }}\nAnswer:")
    rendered = render(question, style, None)
    assert rendered.contexts[0] == "It rains.\nDoes it follow? It is wet.\nAnswer:"
    assert rendered.continuations == (" no", " yes")
    with pytest.raises(CoralError, match="'gold' is undefined"):
        render(question, Style(template="{{ gold }}"), None)
    named = TableOptions(kind="yes-no", instructions="?", columns={"answer": "sentence2", "soft": ""})
    with pytest.raises(CoralError, match="'sentence2' is undefined"):
        render(load_questions([{**row, "sentence2": "yes"}], named)[0], style, None)


def test_what_is_scored_after_a_template_begins_where_it_ends() -> None:
    assert render(PLAIN, Style(template="{{ question }}"), None).continuations == (" cork", " lead")
    assert render(PLAIN, Style(template="{{ question }}\n"), None).continuations == ("cork", "lead")
    chinese = "{{ question }}答案：{% macro continuation(option, letter) %}{{ option }}{% endmacro %}"
    assert render(PLAIN, Style(template=chinese), None).continuations == ("cork", "lead")
    lettered = render(PLAIN, Style("letters", template="{{ question }}"), None)
    assert lettered.continuations == (" A", " B")


def test_a_style_is_named_by_its_texts() -> None:
    assert [str(Style()), str(Style("letters", chat=True))] == ["text", "letters+chat"]
    one, other = Style(template="{{ question }}"), Style(template="{{ question }}?")
    assert str(one).startswith("text+template ")
    assert len({str(one), str(other), str(Style(system="Be brief.")), str(Style())}) == 4


# ----------------------------------------------------------------------------------------------------- option by option


def test_each_option_is_asked_about_by_itself() -> None:
    several = replace(DECISION, answer=UNKNOWN, right=(0, 1))
    first, second = as_statements(several)
    assert first.text == (
        "What does the customer want?\nProposed answer: refund (money back)\nIs the proposed answer right?"
    )
    assert [(q.id, q.options, q.answer, q.kind, q.group) for q in (first, second)] == [
        ("2#0", ("no", "yes"), 1, "yes-no", "2"),
        ("2#1", ("no", "yes"), 1, "yes-no", "2"),
    ]
    assert [q.answer for q in as_statements(DECISION)] == [0, 1]
    assert [q.answer for q in as_statements(replace(PLAIN, answer=UNKNOWN))] == [UNKNOWN, UNKNOWN]


def test_what_cannot_be_asked_option_by_option_is_refused() -> None:
    with pytest.raises(CoralError, match="soft answer"):
        as_statements(Question("1", "1", "?", ("x", "y"), soft=(0.5, 0.5)))
    statement = Question("1", "1", "It is late.", ("no", "yes"), kind="yes-no")
    assert as_statements(statement) == [statement]
