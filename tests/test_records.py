"""A question's text is taken apart once, into parts that make the same text again; predictions are taken question by question."""

from __future__ import annotations

import re
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral_lens.records import Predictions, Question, Wording, cue_of, listed_parts, take_apart

PIECES = [
    "Question: ",
    "Q: ",
    "\nA. ",
    "\nB. ",
    "\nA) ",
    "\nB) ",
    "\nAnswer:",
    "\nA:",
    "\n",
    "Which?",
    "he",
    "\nAntwort:",
    "B. ",
]


def question(text: str, options: tuple[str, ...]) -> Question:
    return Question("1", "1", text, options)


@pytest.mark.parametrize(
    ("text", "wording"),
    [
        ("Who?", Wording("", "Who?", (), "", "")),
        ("Question: Who?\nAnswer:", Wording("Question: ", "Who?", (), "", "\nAnswer:")),
        ("Q: Who?\n\nA :", Wording("Q: ", "Who?", (), "", "\n\nA :")),
        ("Who?\nA. he\nB. she\nAnswer:", Wording("", "Who?", ("he", "she"), ". ", "\nAnswer:")),
        ("Q: Who?\nA) he\nB) she", Wording("Q: ", "Who?", ("he", "she"), ") ", "")),
        ("Wer?\nA. er\nB. sie\nAntwort:", Wording("", "Wer?", ("er", "sie"), ". ", "\nAntwort:")),
        ("So\nA. is it?\nA. a\nb\nB. c\nAnswer:", Wording("", "So\nA. is it?", ("a\nb", "c"), ". ", "\nAnswer:")),
        ("Who?\nA. he\nAnswer:", Wording("", "Who?\nA. he", (), "", "\nAnswer:")),
    ],
)
def test_label_stem_list_and_cue_of_a_text_whose_options_are_letters(text: str, wording: Wording) -> None:
    assert question(text, ("A", "B")).wording == wording


def test_a_list_is_part_of_the_stem_where_texts_are_scored() -> None:
    wording = question("Question: Who?\nA. he\nB. she\nAnswer:", ("he", "she")).wording
    assert (wording.stem, wording.listed) == ("Who?\nA. he\nB. she", ())
    assert wording.bare == "Who?\nA. he\nB. she"


@given(st.lists(st.sampled_from(PIECES), max_size=9), st.sampled_from([("A", "B"), (" A", " B"), ("he", "she")]))
def test_the_parts_make_the_same_text_again(pieces: list[str], options: tuple[str, ...]) -> None:
    text = "".join(pieces)
    wording = question(text, options).wording
    assert wording.text == text
    assert len(wording.listed) in (0, 2)
    assert wording.bare in text


SPACES = ["\n", " ", "\t", "A", "B", "C", ".", ")", ":", "x", "\nA. ", "\nB. ", "\nC. ", "\nA.  ", "\nB.  ", "\nAnswer"]


@given(st.lists(st.sampled_from(SPACES), max_size=24).map("".join), st.sampled_from(["AB", "ABC"]))
def test_list_and_cue_are_what_a_pattern_would_find(text: str, letters: str) -> None:
    """The pattern says what they are; it is not used, because it takes hours for some texts of strangers."""
    lines = "".join(rf"\n{letter}(?P=mark)(.*?)" for letter in letters[1:])
    match = re.fullmatch(rf"(.*)\nA(?P<mark>[.)]\s+)(.*?){lines}", text, re.DOTALL)
    wanted = None if match is None else (match[1], match["mark"], match.groups()[2:])
    assert listed_parts(text, tuple(letters)) == wanted
    cue = re.search(r"\n\s*(?:Answer|A)\s*:\s*\Z", text)
    assert cue_of(text) == (cue[0] if cue else "")


def test_a_long_text_of_broken_lists_and_empty_lines_is_taken_apart_at_once() -> None:
    lists = "Which?" + "\nA. a\nB. b\nC. c\nD. d" * 5000
    assert take_apart(lists, tuple("ABCDE")) == Wording("", lists, (), "", "")
    whole = take_apart(lists + "\nE. e", tuple("ABCDE"))
    assert whole.listed == ("a", "b", "c", "d", "e")
    lines = "Which?" + "\n" * 500_000 + "x"
    assert take_apart(lines, ("A", "B")).stem == lines
    spaces = "Which?" + "\nA." + " " * 500_000 + "x"
    assert take_apart(spaces, ("A", "B")).stem == spaces


def test_a_text_is_taken_apart_once_and_another_text_anew() -> None:
    asked = question("Q: Who?", ("he", "she"))
    assert asked.wording is asked.wording
    assert replace(asked, text="Q: Where?").wording.stem == "Where?"


def test_the_wording_is_no_part_of_the_record_and_of_equality() -> None:
    one, other = question("Q: Who?", ("he", "she")), question("Q: Who?", ("he", "she"))
    assert one.wording.stem == "Who?"
    assert one == other
    assert asdict(one) == asdict(other)
    assert "wording" not in asdict(one)


def test_predictions_of_some_questions_keep_their_answers_probabilities_and_groups() -> None:
    probs = np.array([0.9, 0.1, 0.2, 0.3, 0.5, 0.6, 0.4])
    groups = ("essay", "essay", "letter")
    everything = Predictions(
        "m", "tiny", "t", "", ("a", "b", "c"), np.array([0, 2, 1]), np.array([0, 2, 5, 7]), probs, groups
    )
    last_first = everything.take(np.array([2, 1]))
    assert last_first.ids == ("c", "b")
    assert last_first.answers.tolist() == [1, 2]
    assert last_first.probs.tolist() == [0.6, 0.4, 0.2, 0.3, 0.5]
    assert last_first.offsets.tolist() == [0, 2, 5]
    assert last_first.groups == ("letter", "essay")
    marked = everything.take(np.array([False, True, True]))
    assert marked.ids == ("b", "c")
    assert marked.probs.tolist() == [0.2, 0.3, 0.5, 0.6, 0.4]
    assert replace(everything, groups=()).take(np.array([0])).groups == ()
