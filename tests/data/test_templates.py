"""A template puts a question into words and can do nothing else, whoever wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest

from coral_lens.data.templates import MOST_TEXT, compiled, fill_in, read_template, read_text
from coral_lens.errors import CoralError

GERMAN = """{{ context }}

Frage: {{ question }}
{% for letter, option in lettered %}
{{ letter }}) {{ option }}
{% endfor %}
Antwort:
{%- macro continuation(option, letter) %} {{ letter }}{% endmacro %}
"""
VALUES = {
    "question": "Wo liegt Wien?",
    "context": "Wien ist eine Stadt.",
    "options": ["Ungarn", "Österreich"],
    "lettered": [("A", "Ungarn"), ("B", "Österreich")],
}
CHOICES = [("Ungarn", "A"), ("Österreich", "B")]


def test_a_template_of_another_language_says_what_is_asked_and_what_is_scored() -> None:
    prompt, scored = fill_in(GERMAN, VALUES, CHOICES)
    assert prompt == "Wien ist eine Stadt.\n\nFrage: Wo liegt Wien?\nA) Ungarn\nB) Österreich\nAntwort:"
    assert scored == (" A", " B")


def test_a_template_without_a_macro_leaves_to_the_style_what_is_scored() -> None:
    assert fill_in("{{ question }} ->", VALUES, CHOICES) == ("Wo liegt Wien? ->", None)


def test_filters_and_methods_that_texts_need_are_there() -> None:
    made, _ = fill_in(
        "{{ options | join(' / ') | upper }} {{ question.lower() | replace('wo', 'WO') }} {{ 1 + 2 }}", VALUES, []
    )
    assert made == "UNGARN / ÖSTERREICH WO liegt wien? 3"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ question", "line 1: unexpected end of template"),
        ("\n{% for %}", "line 2"),
        (
            "{{ answer }}",
            "asks for what the question has not: 'answer' is undefined. It has context, lettered, options, question.",
        ),
        ("{{ question.__class__ }}", "cannot be filled in"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "The template"),
        ("{{ self.__init__.__globals__ }}", "The template"),
        ("{{ lipsum.__globals__ }}", "asks for what the question has not"),
        ("{% for i in range(10) %}x{% endfor %}", "SecurityError: Undefined is not safely callable"),
        ("{{ 'x' * 10**9 }}", "SecurityError"),
        ("{{ 9**9**9 }}", "SecurityError"),
        ("{{ '%999999999d' % 1 }}", "SecurityError"),
        ("{{ '{:>999999999}'.format(1) }}", "SecurityError"),
        ("{{ 'x'.ljust(999999999) }}", "SecurityError"),
        ("{{ 'x' | center(999999999) }}", "No filter named 'center'"),
        ("{{ question ~ question }}", "line 1, joins texts by ~"),
        ("{% include 'x' %}", "line 1, reads others"),
        ("{% import 'x' as y %}", "line 1, reads others"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "cannot be filled in: RecursionError"),
        ("{% set s = question + question %}" + "{% set s = s + s %}" * 60 + "{{ s }}", "SecurityError"),
        ("{% set s = question %}" + "{% set s = [s, s] | join %}" * 60 + "{{ s }}", "SecurityError"),
        ("{% set s = question %}" + "{% set s = s | replace('i', s) %}" * 9 + "{{ s }}", "SecurityError"),
        ("x" * 60_000, "has 60,000 characters"),
    ],
)
def test_a_template_that_does_more_than_put_into_words_is_one_sentence(template: str, said: str) -> None:
    with pytest.raises(CoralError) as error:
        fill_in(template, VALUES, CHOICES)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_what_a_template_writes_is_bounded() -> None:
    with pytest.raises(CoralError, match="more than 2,000,000 characters"):
        fill_in("{{ question }}", {"question": "x" * (MOST_TEXT + 1)}, [])


def test_a_template_is_read_from_a_file_and_checked_at_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(GERMAN, "utf-8")
    assert read_template(str(path)) == GERMAN
    assert compiled(GERMAN) is compiled(GERMAN)
    path.write_text("{{ question", "utf-8")
    with pytest.raises(CoralError, match=r"--template .*mine.jinja: The template, line 1"):
        read_template(str(path))
    with pytest.raises(CoralError, match="cannot be read: No such file"):
        read_template(str(tmp_path / "none"))


def test_a_text_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("You are strict.\n")
    assert read_text(f"@{tmp_path / 'system.txt'}") == "You are strict."
    assert read_text("You are kind.") == "You are kind."
    with pytest.raises(CoralError, match="--system-prompt @none cannot be read"):
        read_text("@none", "--system-prompt")
