"""What a model writes becomes candidates: merged by the rule, counted, labelled by known answers; what is none is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from coral_lens.data.open_questions import OpenQuestion, as_open
from coral_lens.data.settings import Style
from coral_lens.data.shots import n_shots
from coral_lens.engine import candidates as module
from coral_lens.engine.candidates import Candidates, as_choice, labels, merge, write_candidates
from coral_lens.engine.generation import Generated
from coral_lens.engine.model import Model
from coral_lens.engine.prompts import render
from coral_lens.engine.settings import MOST_EXAMPLES, Sampling
from coral_lens.errors import CoralError
from coral_lens.records import NONE, UNKNOWN

pytestmark = pytest.mark.usefixtures("one_thread")


def wrote(*texts: str, finished: bool = True) -> list[Generated]:
    return [Generated(text, (1,), finished) for text in texts]


def test_equal_answers_are_one_candidate_in_its_most_frequent_spelling_and_the_most_frequent_comes_first() -> None:
    texts = wrote(" Rome", "the Danube", "Danube.", " Danube", "Danube", "ROME", "12", "twelve")
    assert merge(texts).texts == ("Danube", "Rome", "12")
    assert merge(texts).counts == (4, 2, 2)


def test_empty_answers_and_answers_that_did_not_end_are_no_candidates_but_are_counted() -> None:
    texts = [*wrote("Rome", "", " ?! "), *wrote("Rome and so on and", finished=False)]
    assert merge(texts) == Candidates(("Rome",), (1,), 2, 1)


@pytest.mark.parametrize(
    ("answers", "right"),
    [
        (("rome",), (0,)),
        (("Paris", "the PARIS"), (1,)),
        (("Rome", "Paris"), (0, 1)),
        (("London",), (2,)),  # none of these
        ((), ()),
    ],
)
def test_candidates_are_labelled_by_the_rule_that_merges_them(answers: tuple[str, ...], right: tuple[int, ...]) -> None:
    question = OpenQuestion("q", "Which?", answers)
    assert labels(question, ("Rome", "Paris")) == right
    choice = as_choice(question, ("Rome", "Paris"), (5, 2, 1), Sampling())
    assert choice.options == ("Rome", "Paris", NONE)
    assert choice.answer == (right[0] if right else UNKNOWN)
    assert choice.right == (right if len(right) > 1 else ())
    assert choice.counts == (5, 2, 1)
    assert choice.is_open


def test_worked_examples_come_before_the_question_and_no_option_is_ever_shown(tiny: Model) -> None:
    choice = as_choice(OpenQuestion("q", "Which river?", passage="A state."), ("Danube",), (8, 0), Sampling())
    (context, _) = render(choice, Style(), tiny).contexts
    assert context.endswith("A state.\n\nQuestion: Which river?\nAnswer:")
    assert context.count("Question:") == MOST_EXAMPLES + 1
    assert "Danube" not in context
    assert n_shots(choice) == MOST_EXAMPLES
    bare = as_choice(OpenQuestion("q", "Which river?"), ("Danube",), (8, 0), Sampling(examples=0))
    assert render(bare, Style(), tiny).contexts[0] == "Question: Which river?\nAnswer:"


def test_a_question_without_a_candidate_is_left_out_by_name_and_the_others_stay(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [wrote("Rome", "Rome"), wrote("", "  "), wrote("and on", "and on", finished=False)]
    monkeypatch.setattr(module, "generate_answers", lambda *_, **__: texts)
    asked = as_open(["One?", "Two?", "Three?"])
    silent, endless = "'2': the model wrote nothing in 2 answers", "'3': none of 2 answers ended within 32 tokens"
    with pytest.warns(UserWarning, match=rf"2 question\(s\) left out.*{silent}.*{endless}"):
        written = write_candidates(tiny, asked, Sampling(candidates=2))
    assert [q.id for q in written.questions] == ["1"]
    assert set(written.left_out) == {"2", "3"}


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [(wrote("", ""), "the model wrote nothing"), (wrote("and on", "x", finished=False), "raise --max-tokens")],
)
def test_a_model_that_writes_nothing_or_never_stops_is_one_sentence(
    tiny: Model, monkeypatch: pytest.MonkeyPatch, texts: list[Generated], sentence: str
) -> None:
    monkeypatch.setattr(module, "generate_answers", lambda *_, **__: [texts])
    with pytest.raises(CoralError, match=sentence):
        write_candidates(tiny, as_open("Who?"), Sampling(candidates=2))


@pytest.mark.parametrize("style", [Style(kind="letters"), Style(kind="p-true"), Style(template="{{ question }}")])
def test_styles_that_show_options_are_refused(tiny: Model, style: Style) -> None:
    with pytest.raises(CoralError, match="there are no options to be shown"):
        write_candidates(tiny, as_open("Who?"), Sampling(), style=style)


@pytest.mark.filterwarnings("ignore:.*left out:UserWarning")
def test_what_is_written_is_kept_and_depends_on_seed_and_temperature(tiny: Model, tmp_path: Path) -> None:
    asked = as_open([f"Toy {i}?" for i in range(6)])
    sampling = Sampling(candidates=6, temperature=1.0, max_tokens=64, examples=0)
    place = tmp_path / "texts"
    first = write_candidates(tiny, asked, sampling, place=place)
    assert first == write_candidates(tiny, asked, sampling, place=place)
    assert first.questions == write_candidates(tiny, asked, sampling).questions
    other = Sampling(candidates=6, temperature=1.0, max_tokens=64, examples=0, seed=1)
    assert write_candidates(tiny, asked, other, place=place).questions != first.questions
    assert len(list(tmp_path.glob("texts-*"))) == 2
