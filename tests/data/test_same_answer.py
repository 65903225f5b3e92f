"""Which answers are the same: the rule that merges candidates and labels them, pinned case by case."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral_lens.data.same_answer import answer_key, same_answer

SAME = [
    # case, accents, space
    ("Paris", "PARIS"),
    ("Beyoncé", "beyonce"),
    ("  New   York ", "new york"),
    ("straße", "STRASSE"),
    # articles, wherever they stand
    ("The Hague", "Hague"),
    ("Battle of the Somme", "battle of Somme"),
    ("an apple", "apple"),
    # punctuation
    ("U.S.A.", "USA"),
    ("Jay-Z", "jay z"),
    ("O'Neill", "O’Neill"),
    ("Campbell-Bannerman", "Campbell Bannerman"),
    ("Vienna.", "Vienna"),
    ("“Hamlet”", "Hamlet"),
    ("Simon & Garfunkel", "Simon and Garfunkel"),
    # numbers by value, in figures and in words
    ("1,000", "1000"),
    ("1000.0", "1000"),
    ("one thousand", "1,000"),
    ("a hundred", "100"),
    ("twenty-one", "21"),
    ("two hundred and six", "206"),
    ("2.5 million", "2,500,000"),
    ("five hundred thousand", "500000"),
    ("007", "7"),
    (".5", "0.50"),
    ("50%", "fifty percent"),
    ("−3", "-3"),
    ("１２", "12"),
    ("Air Force One", "air force 1"),
    ("+5", "5"),
    ("10²", "10^2"),
    ("10⁻⁶", "10^-6"),
    ("½", "1/2"),
    ("2½", "2 1/2"),
    ("m²", "m2"),
    # signs and letters that Unicode has several of
    ("O´Neill", "O'Neill"),
    ("№ 5", "No 5"),
    ("C♯", "C#"),
    ("x=3", "x = 3"),
    ("❤\ufe0f love", "love"),
    ("パリ", "ﾊﾟﾘ"),
    ("한국", "\u1112\u1161\u11ab\u1100\u116e\u11a8"),
    ("שָׁלוֹם", "שלום"),
]
DIFFERENT = [
    ("Vienna", "Vienna, Austria"),
    ("-5", "5"),
    ("3.14", "3.15"),
    ("1.5", "15"),
    ("1990-1995", "1990"),
    ("one two", "12"),
    ("twenty eleven", "31"),
    ("5 kg", "5 km"),
    ("50%", "50"),
    ("Bach", "Back"),
    ("second", "2"),
    ("5.0.3", "5.3"),
    ("10,5", "105"),
    ("a", "the"),
    # signs
    ("$5", "€5"),
    ("$5", "5"),
    ("<5", ">5"),
    ("AB+", "AB-"),
    ("C++", "C"),
    ("C#", "C"),
    ("B♭", "B"),
    ("10²", "102"),
    ("2½", "21/2"),
    # marks that make another letter: Paris and Bali, persimmon and key, two vowels, two tones
    ("パリ", "バリ"),
    ("かき", "かぎ"),
    ("की", "का"),
    ("ไม่", "ไม้"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_answers_that_differ_in_form_alone_are_the_same(one: str, other: str) -> None:
    assert same_answer(one, other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_answers_that_say_different_things_are_not(one: str, other: str) -> None:
    assert not same_answer(one, other)


@pytest.mark.parametrize("text", ["", "  ", "???", "…", "'", "__"])
def test_a_text_that_says_nothing_is_no_answer_and_the_same_as_none(text: str) -> None:
    assert answer_key(text) == ""
    assert not same_answer(text, text)


WORDS = st.sampled_from(
    [
        "one",
        "twenty",
        "hundred",
        "and",
        "million",
        "the",
        "a",
        "5",
        "1,000",
        "0.50",
        "-7",
        "é",
        "Jay-Z",
        "%",
        "1_000",
        ".",
        "0",
        "№",
        "10²",
        "+$",
        "が",
        "की",
    ]
)


@given(st.one_of(st.text(max_size=30), st.lists(WORDS, max_size=8).map(" ".join)))
def test_the_key_of_a_key_is_itself_so_that_sameness_is_an_equivalence(text: str) -> None:
    assert answer_key(answer_key(text)) == answer_key(text)


@given(st.integers(0, 999_999_999))
def test_a_whole_number_is_the_same_however_it_is_grouped(number: int) -> None:
    assert same_answer(f"{number:,}", str(number))
    assert same_answer(f"{number}.00", str(number))


SMALL = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
         "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """A number below a million in English words."""
    if number < 20:
        return SMALL[number]
    if number < 100:
        return TENS[number // 10 - 2] + (f"-{SMALL[number % 10]}" if number % 10 else "")
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    rest = f" and {in_words(number % size)}" if 0 < number % size < 100 else f" {in_words(number % size)}"
    return f"{in_words(number // size)} {name}" + (rest if number % size else "")


@given(st.integers(0, 999_999))
def test_a_number_in_words_has_its_value(number: int) -> None:
    assert answer_key(in_words(number)) == str(number)
