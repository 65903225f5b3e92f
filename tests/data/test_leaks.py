"""A question that comes back in other clothes is recognised, and so is an edited copy of the article that it reads."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from support.questions import toy_questions

from coral_lens.data.leaks import (
    ARTICLE,
    COPY,
    REASONS,
    REPEATED,
    SHOWN,
    Guard,
    copies_of,
    first_normalised,
    guard_of,
    guard_of_shown,
    normalised,
    question_keys,
    readers_of,
)
from coral_lens.records import Question

ORIGINAL = Question("1", "1", "Where is the résumé?", ("In Apple's café", "on banana street", "here"), 0, passage="A.")


@pytest.mark.parametrize(
    "other",
    [
        replace(ORIGINAL, id="2", group="9", answer=2, task="other", split="test"),
        replace(ORIGINAL, text="WHERE is -- the Résumé"),
        replace(ORIGINAL, text="Where is the resume?"),
        replace(ORIGINAL, text="Where  is\u00a0the re\u0301sume\u0301 ?"),
        replace(ORIGINAL, options=("here", "on banana street", "In Apple's café"), answer=2),
        replace(ORIGINAL, options=("HERE.", "On Banana Street", "in apple's cafe"), answer=2),
    ],
)
def test_a_repeat_is_found_despite_case_accents_punctuation_and_the_order_of_options(other: Question) -> None:
    assert normalised(other) == normalised(ORIGINAL)
    assert question_keys([other]).tolist() == question_keys([ORIGINAL]).tolist()
    assert guard_of([ORIGINAL]).find([other]).counts == {REPEATED: 1}


@pytest.mark.parametrize(
    "other",
    [
        replace(ORIGINAL, text="Where is the summary?"),
        replace(ORIGINAL, options=ORIGINAL.options[:2]),
        replace(ORIGINAL, options=("In Apple's", "café on banana street", "here")),
        replace(ORIGINAL, passage="B."),
    ],
)
def test_a_different_question_is_kept(other: Question) -> None:
    assert question_keys([other]).tolist() != question_keys([ORIGINAL]).tolist()
    assert guard_of([ORIGINAL]).find([replace(other, id="2", group="2")]).counts == {}


RAW = Question("1", "1", "How many\nare 2 + 2?", ("three", "four", "B. five"), 1)


LISTED = "How many\nare 2 + 2?\nA. four\nB. B. five\nC. three"


@pytest.mark.parametrize(
    "other",
    [
        replace(RAW, text="Question: How many\nare 2 + 2?\nAnswer:"),
        replace(RAW, text="Q: How many\nare 2 + 2?\nA:"),
        replace(RAW, text=f"{LISTED}\nAnswer:", options=tuple("ABC")),
        replace(RAW, text=f"Question: {LISTED}\nAnswer:", options=tuple("ABC")),
        replace(RAW, text=LISTED.replace(". ", ") "), options=tuple("ABC")),
        replace(RAW, text="are 2 + 2?", passage="How many"),
    ],
)
def test_a_repeat_is_found_whatever_template_asks_it(other: Question) -> None:
    assert question_keys([other]).tolist() == question_keys([RAW]).tolist()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 2+2?", "What is 2-2?"),
        ("What is x * y?", "What is x/y?"),
        ("Is a = 3?", "Is a \u2260 3?"),
        ("Take -5.", "Take 5."),
        ("Take .5 of it", "Take 5 of it"),
        ("Which of these, A or B?\nA. yes\nB. no", "Which of these, A or B?\nA. yes\nB. never"),
    ],
)
def test_signs_and_what_letters_stand_for_make_another_question(one: str, other: str) -> None:
    options = ("A", "B")
    keys = question_keys([Question(t, t, t, options, 0) for t in (one, other)])
    assert len(set(keys.tolist())) == 2


def test_a_sign_is_the_same_however_it_is_printed_and_a_dash_between_words_is_none() -> None:
    same = [
        ("5 - 3 and 1/2", "5\u22123 and \u00bd"),
        ("a well-known fact", "a well known fact"),
        ("so - he said", "so, he said"),
    ]
    for pair in same:
        assert len({normalised(Question("1", "1", text, ("yes", "no"), 0)) for text in pair}) == 1


def test_keys_of_the_first_version_are_what_they_were() -> None:
    """Of text and options as they are; lenses that were made with them still know their questions."""
    text = "a\nwhere is the resume\nhere\nin apple s cafe\non banana street"
    assert first_normalised(ORIGINAL) == text
    expected = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
    assert question_keys([ORIGINAL], version=1).tolist() == [expected]


def test_repeats_are_marked_and_counted() -> None:
    train, others = ([replace(q, group=q.id) for q in toy_questions(10, seed=seed)] for seed in (0, 9))
    leaks = guard_of([train[2], train[7], *others]).find(train)
    assert [q.id for q in leaks.kept(train)] == ["0", "1", "3", "4", "5", "6", "8", "9"]
    assert leaks.counts == {REPEATED: 2}


def test_keys_fit_a_signed_integer() -> None:
    keys = question_keys(toy_questions(200))
    assert keys.dtype == np.int64
    assert (keys >= 0).all()
    assert len(set(keys.tolist())) == 200


ARTICLE_TEXT = "On a cold morning in May the old man took his boat out to sea and came back with nothing but a smile"


def reader(identity: str, group: str, text: str) -> Question:
    return Question(identity, group, text, ("a", "b"), 0)


def test_an_edited_copy_of_an_article_is_found_and_another_article_is_not() -> None:
    edited = ARTICLE_TEXT.replace("a cold morning", "one cold MORNING,").replace("smile", "fish")
    train = [
        reader("1", "art-1", f"{edited}. Who smiled?"),
        reader("2", "art-1", f"{edited}. What was cold?"),
        reader(
            "3", "art-2", "A young woman who had never seen the mountains went there by train one day in June. Why?"
        ),
        reader("4", "4", f"{ARTICLE_TEXT}. Who smiled?"),
    ]
    test = [reader("5", "art-5", f"{ARTICLE_TEXT}. Where was he?"), reader("6", "6", train[2].text)]
    # the fourth question is a group of its own: it reads no article, and its repeats are found by its text
    assert copies_of(test)(train).tolist() == [True, True, False, False]
    assert readers_of(test)(train).tolist() == [False] * 4
    assert guard_of(test).find(train).counts == {REPEATED: 1, COPY: 2}
    assert guard_of([]).find(train).mask.tolist() == [False] * 4
    other = guard_of([reader("7", "art-2", "Another text.")]).find(train)
    assert (other.mask.tolist(), other.counts) == ([False, False, True, False], {ARTICLE: 1})


def test_questions_that_are_groups_of_their_own_are_not_the_same_for_being_called_the_same() -> None:
    one, other = reader("1", "1", "What is first?"), reader("1", "1", "What is last?")
    assert guard_of([one]).find([other]).counts == {}
    # but where one of them belongs to a group of that name, both do
    member = reader("2", "1", "What is next?")
    assert guard_of([member]).find([other]).counts == guard_of([one]).find([member]).counts == {ARTICLE: 1}


def test_a_question_is_counted_once_under_the_first_reason_that_applies() -> None:
    questions = [reader(str(i), "art" if i < 2 else str(i), f"{ARTICLE_TEXT} Which, {i}?") for i in range(4)]
    guard = guard_of_shown([questions[0], questions[3]]) + guard_of([questions[0]])
    leaks = guard.find(questions)
    assert leaks.counts == {REPEATED: 1, ARTICLE: 1, SHOWN: 1}
    assert leaks.kept(questions) == [questions[2]]
    assert list(leaks.counts) == sorted(leaks.counts, key=REASONS.index)


def test_guards_say_what_they_can_check() -> None:
    assert Guard().checked == []
    assert guard_of_shown([]).checked == [SHOWN]
    assert (guard_of_shown([]) + guard_of([])).checked == list(REASONS)


def test_leaks_of_several_guards_are_those_of_their_sum() -> None:
    train = [reader(str(i), "art" if i < 2 else str(i), f"{ARTICLE_TEXT} Which, {i}?") for i in range(4)]
    first, second = guard_of(train[:1]), guard_of(train[2:3])
    both = first.find(train) | second.find(train)
    assert both.first.tolist() == (first + second).find(train).first.tolist()
    assert both.counts == {REPEATED: 2, ARTICLE: 1}
