"""SteerConf reads what models write, however odd, aggregates as the paper says, and goes on where it was killed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.questions import toy_questions

from coral_lens.engine import texts as texts_module
from coral_lens.engine.extract import extract
from coral_lens.engine.generation import Generated
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Extraction
from coral_lens.engine.settings import GenerationSettings
from coral_lens.engine.texts import read_piece, write_piece
from coral_lens.errors import CoralError
from coral_lens.lens.settings import FitSettings
from coral_lens.methods.entry import MethodEntry
from coral_lens.methods.interface import FitContext, QuestionSet
from coral_lens.methods.registry import read_method
from coral_lens.methods.steerconf import method as method_module
from coral_lens.methods.steerconf.answers import StatedAnswer, read_answer
from coral_lens.methods.steerconf.method import (
    AGGREGATIONS,
    MARGIN,
    Interview,
    InterviewPlan,
    Replies,
    SteerConfSettings,
    choose_interview,
    consistency,
    distribution,
    fit_steerconf,
    judge_of,
    majority,
    weighted_confidence,
)
from coral_lens.methods.steerconf.prompts import STEERING, instruction, option_texts, shown_question, verbal_prompt
from coral_lens.methods.steerconf.texts import load_or_generate
from coral_lens.records import Question, Rendered


class Unread:
    """Scored questions that nobody looks at."""

    manifest: dict[str, Any] = {}  # noqa: RUF012
    layers, questions = (), ()
    table: Any = None

    def layer(self, layer: int, place: str = "answer") -> np.ndarray:
        raise AssertionError("no state is read")


NOBODY = QuestionSet("nobody", Unread(), tuple)
OPTIONS = ("warm air", "a cold front", "42 degrees", "nothing")

READABLE = [
    ("Explanation: air rises.\nAnswer and Confidence (0-100): B, 85%", 1, 0.85),
    ("Answer and Confidence (0-100): [B], [85]%", 1, 0.85),
    ("Answer and Confidence (0-100): (B), 85 %", 1, 0.85),
    ("Answer and Confidence (0-100): **B**, **85%**", 1, 0.85),
    ("```Answer and Confidence (0-100): b, 85%```", 1, 0.85),
    ("answer and confidence: B 85", 1, 0.85),
    ("Answer and Confidence (0-100): B. a cold front, 85%", 1, 0.85),
    ("Answer and Confidence (0-100): B) a cold front - 85%", 1, 0.85),
    ("Answer and Confidence (0-100): a cold front, 85%", 1, 0.85),
    ("Answer and Confidence (0-100): A COLD FRONT., 85%", 1, 0.85),
    ("Answer and Confidence (0-100): 42 degrees, 60%", 2, 0.6),
    ("Answer and Confidence (0-100): C. 42 degrees, 60%", 2, 0.6),
    ("Answer and Confidence (0-100):\nB\n85%", 1, 0.85),
    ("Answer and Confidence (0-100): B\nConfidence: 85%", 1, 0.85),
    ("Answer: D\nConfidence: 30%", 3, 0.3),
    ("Confidence (0-100): 30\nFinal answer: (D)", 3, 0.3),
    ("D. nothing\n\nConfidence: [100]\n\nMy answer is D.", 3, 1.0),
    ("The answer is: A, 70%", 0, 0.7),
    ("Answer: A. warm air (70%)", 0, 0.7),
    ("B, 85%", 1, 0.85),
    ("B: 85%", 1, 0.85),
    ("B-85%", 1, 0.85),
    ("A, 0%", 0, 0.0),
    ("A, 100%", 0, 1.0),
    ("A, 99.5%", 0, 0.995),
    ("A, 99,5%", 0, 0.995),
    ("A, 0.85", 0, 0.85),
    ("A, 80-90%", 0, 0.85),
    ("A, 80 to 90 percent", 0, 0.85),
    ("A, 85/100", 0, 0.85),
    ("Ｂ，８５％", 1, 0.85),
    ("Answer and Confidence (0-100): option C with confidence of 55%", 2, 0.55),
    ("Answer and Confidence (0-100): [ONLY the option letter], [confidence]%\n\nAnswer and Confidence (0-100): C, 55%", 2, 0.55),
    ("Answer and Confidence (0-100): A, 20%\nQuestion: another?\nAnswer and Confidence (0-100): C, 90%", 0, 0.2),
    ("Sure! Here is my reply.\n\n> Answer and Confidence (0-100): D, 5%\u2028", 3, 0.05),
    ("Answer and Confidence (0-100): C, 75% <|im_end|><|im_end|>", 2, 0.75),
]  # fmt: skip
UNREADABLE = [
    "",
    " \n\t ",
    "B",
    "85%",
    "I would say that warm air rises, and I am quite sure.",
    "Answer and Confidence (0-100): [ONLY the option letter], [confidence]%",
    "Answer and Confidence (0-100): [insert answer], [0-100]%",
    "Answer and Confidence (0-100): F, 80%",
    "Answer and Confidence (0-100): A or B, 50%",
    "Answer and Confidence (0-100): A, B, 50%",
    "Answer and Confidence (0-100): all of the above, 90%",
    "Answer and Confidence (0-100): B. warm air, 85%",
    "Answer and Confidence (0-100): B, 150%",
    "Answer and Confidence (0-100): B, -5%",
    "Answer and Confidence (0-100): B, 99999999999999999999999%",
    "Answer and Confidence (0-100): B, high",
    "Answer and Confidence (0-100): B, NaN%",
    "Answer and Confidence (0-100): B, infinity%",
    "Answer and Confidence (0-100): , 80%",
    "Answer and Confidence (0-100): {{7*7}}, 80%",
    "A 100% natural product is what the question asks about",
    "\x00\x1b[31mB\x1b[0m",
    "Answer and Confidence (0-100): Ω, 80%",
    "A" * 5000,
    "Answer and Confidence (0-100): " + "(" * 2000,
    "1, 80%",
    "Well, who knows.\nConfidence: 80%",
]


@pytest.mark.parametrize(("text", "option", "confidence"), READABLE)
def test_what_a_model_means_is_read(text: str, option: int, confidence: float) -> None:
    said = read_answer(text, OPTIONS)
    assert said is not None
    assert (said.option, said.confidence) == (option, pytest.approx(confidence))


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_is_not_clear_is_not_guessed(text: str) -> None:
    assert read_answer(text, OPTIONS) is None


NUMBERS = ("12", "15", "18", "20")


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("Answer: B. 15", NUMBERS),
        ("Answer: B 15", NUMBERS),
        ("Answer: B, 15", NUMBERS),
        ("Answer and Confidence (0-100): B. 15", NUMBERS),
        ("Answer and Confidence (0-100): B 15", NUMBERS),
        ("Answer and Confidence (0-100): B. 18", NUMBERS),
        ("Answer and Confidence (0-100): B. 15\nC. 18", NUMBERS),
        ("Explanation: the options are\nA. 12\nB. 15\nC. 18\nD.", NUMBERS),
        ("Explanation: A. 12, B. 15, C. 18", NUMBERS),
        ("A) Dogs live about 12", NUMBERS),
        ("A) Dogs live about 12", OPTIONS),
        ("A) Air is nitrogen, cats and 12", OPTIONS),
        ("A. Oxygen makes up about 21%", OPTIONS),
        ("D. 20", NUMBERS),
        ("D. 20", OPTIONS),
        ("Answer: B. about 15 km", ("about 12 km", "about 15 km")),
        ("Answer: B. 15", ("12 km", "15 km")),
        ("Answer: B. Dogs live 12 to 15", ("cats", "Dogs live 12 to 15")),
        ("Answer: B. 15%", ("12%", "15%")),
        ("Answer and Confidence (0-100): B. 15%", ("12%", "15%")),
        ("Answer and Confidence (0-100): A. 15%", ("12%", "15%")),
        ("Explanation: A. 12%\nB. 15%", ("12%", "15%")),
        ("Answer: B. $15", ("$12", "$15")),
    ],
)
def test_the_number_of_an_option_is_no_confidence(text: str, options: tuple[str, ...]) -> None:
    assert read_answer(text, options) is None


@pytest.mark.parametrize(
    ("text", "options", "option", "confidence"),
    [
        ("Answer and Confidence (0-100): B. 15, 90%", NUMBERS, 1, 0.9),
        ("Answer and Confidence (0-100): B. 15, 90", NUMBERS, 1, 0.9),
        ("Answer and Confidence (0-100): 15, 90", NUMBERS, 1, 0.9),
        ("Answer and Confidence (0-100): B, 90", NUMBERS, 1, 0.9),
        ("Answer and Confidence (0-100): B. 15\n90", NUMBERS, 1, 0.9),
        ("Answer: B. 15\nConfidence: 20", NUMBERS, 1, 0.2),
        ("Answer and Confidence (0-100): B. 15%, 90%", ("12%", "15%"), 1, 0.9),
        ("Answer and Confidence (0-100): B, 90%", ("80%", "85%", "90%"), 1, 0.9),
        ("B, 85", OPTIONS, 1, 0.85),
        ("B. a cold front, 85", OPTIONS, 1, 0.85),
        ("B with confidence 85", OPTIONS, 1, 0.85),
        ("Answer: B, 85", OPTIONS, 1, 0.85),
    ],
)
def test_a_confidence_behind_the_number_of_an_option_is_read(
    text: str, options: tuple[str, ...], option: int, confidence: float
) -> None:
    assert read_answer(text, options) == StatedAnswer(option, confidence)


@pytest.mark.parametrize("end", ["9", "90", "0.", "0.8", "80-9", "85/1"])
def test_a_number_at_the_end_of_a_cut_text_is_not_read(end: str) -> None:
    text = f"Answer and Confidence (0-100): B, {end}"
    assert read_answer(text, OPTIONS, finished=False) is None
    assert read_answer(f"{text}%", OPTIONS, finished=False) == read_answer(f"{text}%", OPTIONS)
    assert read_answer("Answer and Confidence (0-100): B, 90\n", OPTIONS, finished=False) == StatedAnswer(1, 0.9)
    assert read_answer("Answer and Confidence (0-100): B, 90", OPTIONS) == StatedAnswer(1, 0.9)


def test_at_least_forty_varied_outputs_are_tried() -> None:
    assert len(READABLE) + len(UNREADABLE) >= 40


@given(st.text(max_size=300), st.lists(st.text(min_size=1, max_size=10), min_size=2, max_size=5))
def test_no_output_breaks_the_reading(text: str, options: list[str]) -> None:
    for one in (text, f"Answer and Confidence (0-100): {text}", f"Answer: {text}\nConfidence: {text}"):
        said = read_answer(one, options)
        assert said is None or (0 <= said.option < len(options) and 0.0 <= said.confidence <= 1.0)


# --- prompts


def test_the_prompts_are_the_papers_to_the_letter() -> None:
    assert instruction("vanilla", thinking=True) == (
        "Read the question, analyze step by step, provide your answer and your confidence in this answer. Note: The confidence "
        "indicates how likely you think your answer is true.\n"
        "Use the following format to answer:\n"
        "```Explanation: [insert step-by-step analysis here]\n"
        "Answer and Confidence (0-100): [ONLY the option letter], [confidence]%```"
    )
    assert instruction("vanilla", thinking=False) == (
        "Read the question, provide your answer and your confidence in this answer. Note: The confidence indicates how likely "
        "you think your answer is true.\n"
        "Use the following format to answer:\n"
        "```Answer and Confidence (0-100): [ONLY the option letter], [confidence]%```"
    )
    assert list(STEERING) == ["vanilla", "cautious", "very_cautious", "confident", "very_confident"]
    right = "You are making important decisions, thus you should avoid giving a right answer with low confidence."
    very = "You should be very confident, and tend to give high confidence on almost all of the answers."
    assert f" is true. {right} {very}\nUse" in instruction("very_confident", thinking=True)
    assert f" is true. {right}\nUse" in instruction("confident", thinking=False)
    every = {instruction(s, thinking=t) for s in STEERING for t in (True, False)}
    assert len(every) == 10, "the published code never reaches very_confident: here all ten differ"


def test_options_stand_under_letters_however_the_task_asks() -> None:
    own = Question("q", "q", "Which?", ("x", "y"), 0, passage="Read me.")
    assert shown_question(own) == "Read me.\n\nQuestion: Which?\nA. x\nB. y"
    cloze = replace(
        own, passage="", text="Question: Which?\nAnswer:", rendered=Rendered(("c",) * 2, (" x", " y"), ("x", "y"))
    )
    assert shown_question(cloze) == "Question: Which?\nA. x\nB. y"
    text = "Which?\nA. x\nB. y\nAnswer:"
    lettered = Question("q", "q", text, ("A", "B"), 0, rendered=Rendered((text,) * 2, (" A", " B"), ("A", "B")))
    assert shown_question(lettered) == "Question: Which?\nA. x\nB. y"
    assert option_texts(lettered) == ("x", "y")


def test_a_chat_template_is_used_where_there_is_one() -> None:
    question = toy_questions(1)[0]
    plain = verbal_prompt(question, "cautious", thinking=False, wrap=None)
    wrapped = verbal_prompt(
        question, "cautious", thinking=False, wrap=lambda m: f"<{m[0]['role']}>{m[0]['content']}</>"
    )
    assert wrapped == f"<user>{plain.strip()}</>"


# --- aggregation


def said(*pairs: tuple[int, float]) -> list[StatedAnswer]:
    return [StatedAnswer(*pair) for pair in pairs]


def test_aggregation_worked_by_hand() -> None:
    some = said((0, 0.9), (0, 0.6), (1, 0.3))
    # mean 0.6; consistency 2/3; standard deviation sqrt(0.06); V_conf = v / (1 + v) with v = sqrt(0.06) / 0.6
    v = np.sqrt(0.06) / 0.6
    assert consistency(some) == pytest.approx(2 / 3)
    assert AGGREGATIONS["mean"](some) == pytest.approx(0.6)
    assert weighted_confidence(some) == pytest.approx(0.6 * (2 / 3) * (1 - v / (1 + v)))
    assert AGGREGATIONS["adjusted"](some) == pytest.approx(0.6 * 2 / 3)
    assert weighted_confidence(said((1, 0.8), (1, 0.8))) == pytest.approx(0.8)
    assert weighted_confidence(said((1, 0.0), (1, 0.0))) == 0.0


def test_a_tied_vote_goes_to_the_surer_answer_and_then_to_the_first_option() -> None:
    assert majority(said((0, 0.4), (0, 0.4), (2, 0.9), (2, 0.1))) == 2
    assert majority(said((0, 0.9), (2, 0.1), (2, 0.1))) == 2
    assert majority(said((3, 0.5), (1, 0.5))) == 1


def test_the_rest_is_spread_evenly_and_the_answer_stays_the_answer() -> None:
    assert np.allclose(distribution(said((1, 0.7)), 4, "mean"), [0.1, 0.7, 0.1, 0.1])
    low = distribution(said((2, 0.05)), 4, "mean")
    assert low.argmax() == 2
    assert low[2] == pytest.approx(0.25 + MARGIN)
    assert np.allclose(distribution(said((0, 1.0)), 2, "consistency"), [1.0, 0.0])
    assert np.allclose(distribution([], 5, "weighted"), 0.2)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), min_size=1, max_size=10),
    st.sampled_from(list(AGGREGATIONS)),
)
def test_every_distribution_is_one_and_its_top_is_the_vote(pairs: list[tuple[int, float]], aggregation: str) -> None:
    probs = distribution(said(*pairs), 4, aggregation)
    assert probs.sum() == pytest.approx(1.0)
    assert (probs >= 0).all()
    assert probs.argmax() == majority(said(*pairs))


def test_failures_are_counted_by_sample_and_by_question() -> None:
    replies = Replies([[None, None], [StatedAnswer(0, 0.5), None], [None, StatedAnswer(1, 0.5)]], cut=2)
    assert replies.failures(2) == pytest.approx(
        {
            "samples that could not be read": 4 / 6,
            "questions without any readable sample": 1 / 3,
            "samples cut at the limit": 2 / 6,
        }
    )
    assert replies.failures(1)["questions without any readable sample"] == pytest.approx(2 / 3)
    assert np.allclose(replies.probs([2, 2, 2], 1, "mean"), [0.5, 0.5, 0.5 + MARGIN, 0.5 - MARGIN, 0.5, 0.5])


# --- choosing


class Scripted(Interview):
    """A model that is well calibrated under one way of asking only."""

    def ask_all(self, questions: Sequence[Question], name: str, plans: Sequence[InterviewPlan]) -> list[Replies]:
        together.append(len(plans))
        return [self.ask(questions, name, plan) for plan in plans]

    def ask(self, questions: Sequence[Question], name: str, plan: InterviewPlan) -> Replies:
        asked.append((plan.prompt, plan.thinking, plan.temperature, plan.samples))
        good = plan.prompt == "cautious" and not plan.thinking
        sure = 0.75 if good and plan.temperature == 0.5 else 1.0 if not good else 0.9
        samples: list[list[StatedAnswer | None]] = []
        for i, q in enumerate(questions):
            right = q.answer if i % 4 else (q.answer + 1) % len(q.options)  # three quarters are right
            samples.append([StatedAnswer(right, sure)] * plan.samples)
        if plan.prompt == "very_cautious":
            samples = [[None] * plan.samples for _ in questions]
        return Replies(samples, 0)


asked: list[tuple[Any, ...]] = []
together: list[int] = []


def test_ways_of_asking_are_chosen_in_stages_by_validation_ece(tmp_path: Path) -> None:
    asked.clear()
    together.clear()
    questions = [Question(str(i), str(i), "Which?", ("a", "b", "c", "d"), 0) for i in range(40)]
    context = FitContext(lambda: pytest.fail("loaded"), NOBODY, FitSettings(), tmp_path)
    interview = Scripted(context, SteerConfSettings(samples=(1, 5)))
    chosen = choose_interview(interview, questions, judge_of(questions, "ece"))
    assert (chosen.prompt, chosen.thinking, chosen.temperature, chosen.samples) == ("cautious", False, 0.5, 1)
    assert chosen.aggregation == "weighted"
    assert len(asked) == 5 * 2 + 3
    assert together == [10, 1, 1, 1], "wordings are asked side by side"
    assert {a[2:] for a in asked[:10]} == {(0.7, 3)}
    assert [a[2:] for a in asked[10:]] == [(0.7, 5), (0.5, 5), (1.0, 5)]
    tried = json.loads((tmp_path / "choice.json").read_text("utf-8"))["tried"]
    assert len(tried) == 10 + 3 * 2 * 3


def test_a_way_that_nobody_can_read_is_not_chosen_for_being_calibrated(tmp_path: Path) -> None:
    """The even distribution has hardly any ECE: a prompt that always fails would win."""
    questions = [Question(str(i), str(i), "Which?", ("a", "b", "c", "d"), i % 4) for i in range(40)]
    context = FitContext(lambda: pytest.fail("loaded"), NOBODY, FitSettings(), tmp_path)
    settings = SteerConfSettings(prompts=("very_cautious", "vanilla"), temperatures=(0.7,), samples=(1,), screening=1)
    chosen = choose_interview(Scripted(context, settings), questions, judge_of(questions, "ece"))
    assert chosen.prompt == "vanilla"


def test_what_is_named_twice_is_asked_once(tmp_path: Path) -> None:
    asked.clear()
    questions = [Question(str(i), str(i), "Which?", ("a", "b", "c", "d"), 0) for i in range(40)]
    context = FitContext(lambda: pytest.fail("loaded"), NOBODY, FitSettings(), tmp_path)
    settings = SteerConfSettings(
        prompts=("vanilla", "cautious", "vanilla"),
        thinking=(False, False),
        temperatures=(0.7, 0.5, 0.7),
        samples=(1, 1),
        aggregations=("mean", "mean"),
    )
    choose_interview(Scripted(context, settings), questions, judge_of(questions, "ece"))
    assert len(asked) == 2 + 2
    tried = json.loads((tmp_path / "choice.json").read_text("utf-8"))["tried"]
    assert len(tried) == 2 + 2


class Wrong(Interview):
    """A model that answers every question wrongly unless it is asked cautiously."""

    def ask_all(self, questions: Sequence[Question], name: str, plans: Sequence[InterviewPlan]) -> list[Replies]:
        return [
            Replies(
                [
                    [StatedAnswer(q.answer if plan.prompt == "cautious" and i % 2 else 1 - q.answer, 0.9)]
                    * plan.samples
                    for i, q in enumerate(questions)
                ],
                0,
            )
            for plan in plans
        ]


def test_a_way_of_asking_without_a_score_comes_last_and_if_all_are_so_that_is_said(tmp_path: Path) -> None:
    """AUROC of answers that are all wrong is no number, and would win wherever it came first."""
    questions = [Question(str(i), str(i), "Which?", ("a", "b"), 0) for i in range(40)]
    context = FitContext(lambda: pytest.fail("loaded"), NOBODY, FitSettings(), tmp_path)
    settings = SteerConfSettings(prompts=("vanilla", "cautious"), criterion="auroc", samples=(1,))
    judge = judge_of(questions, "auroc")
    assert choose_interview(Wrong(context, settings), questions, judge).prompt == "cautious"
    tried = json.loads((tmp_path / "choice.json").read_text("utf-8"))["tried"]
    assert tried[0]["auroc"] is None
    with pytest.raises(
        CoralError, match=r"auroc does not exist on the 40 validation questions.*choose by brier or ece"
    ):
        choose_interview(Wrong(context, replace(settings, prompts=("vanilla",))), questions, judge)


def test_everything_is_crossed_only_if_asked_for(tmp_path: Path) -> None:
    asked.clear()
    questions = [Question(str(i), str(i), "Which?", ("a", "b"), 0) for i in range(8)]
    context = FitContext(lambda: pytest.fail("loaded"), NOBODY, FitSettings(), tmp_path)
    choose_interview(Scripted(context, SteerConfSettings(crossed=True)), questions, judge_of(questions, "ece"))
    assert len(asked) == 5 * 2 * 3
    assert {a[3] for a in asked} == {10}


def test_options_are_checked() -> None:
    entry = MethodEntry.model_validate({"kind": "steerconf", "questions": 10, "samples": (1, 3), "thinking": (False,)})
    assert read_method(entry) == SteerConfSettings(questions=10, samples=(1, 3), thinking=(False,))
    with pytest.raises(CoralError, match=r"Unknown prompts 'very_cautios'; .* Did you mean 'very_cautious'"):
        read_method(MethodEntry.model_validate({"kind": "steerconf", "prompts": ("very_cautios",)}))
    with pytest.raises(CoralError, match="samples is empty"):
        read_method(MethodEntry.model_validate({"kind": "steerconf", "samples": ()}))
    with pytest.raises(CoralError, match=r"temperatures must be above 0. Got 0.0 instead"):
        read_method(MethodEntry.model_validate({"kind": "steerconf", "temperatures": (0.0,)}))


# --- with a model


@pytest.fixture
def sets(tiny: Model, tmp_path: Path) -> tuple[QuestionSet, QuestionSet]:
    found = []
    for name, questions in (("train", tuple(toy_questions(30))), ("test", tuple(toy_questions(5, seed=9)))):
        store = extract(tiny, questions, tmp_path / name, extraction=Extraction((1,)))
        found.append(QuestionSet(name, store, lambda q=questions: q))  # type: ignore[misc]
    return found[0], found[1]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:.*lost their beginning")
def test_a_model_that_never_answers_is_counted_and_gets_even_probabilities(
    tiny: Model, sets: tuple[QuestionSet, QuestionSet], tmp_path: Path
) -> None:
    settings = SteerConfSettings(
        prompts=("vanilla",),
        thinking=(False,),
        temperatures=(0.7,),
        samples=(1, 2),
        screening=1,
        questions=2,
        max_new_tokens=4,
    )
    context = FitContext(lambda: tiny, sets[0], FitSettings(), tmp_path / "method")
    found = fit_steerconf(context, settings)(sets[1])[""]
    sizes = np.diff(found.offsets)
    assert np.allclose(found.probs, np.repeat(1 / sizes, sizes))
    notes = json.loads((tmp_path / "method" / "notes.json").read_text("utf-8"))
    assert notes["test"]["questions without any readable sample"] == 1.0
    assert notes["test"]["samples cut at the limit"] == 1.0
    assert notes["chosen"]["samples"] == 1


def test_a_cut_answer_is_asked_for_once_more_and_only_if_that_was_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two samples of each of three questions: whole, cut before its answer, cut after it, cut within its number."""
    line = "Answer and Confidence (0-100):"
    half = f"{line} B, 9"
    first = [
        [Generated(f"Because.\n{line} A, 90%", (1,), True), Generated("Because it is", (1,), False)],
        [Generated(f"{line} B, 40%\nAnd so", (1,), False), Generated("It says C but", (1,), False)],
        [Generated("I do not know.", (1,), True), Generated(half, (1,), False)],
    ]
    prompts: list[list[str]] = []

    def written(_: FitContext, asked: list[str], label: str, *, settings: GenerationSettings) -> list[list[Generated]]:
        prompts.append(asked)
        if not label.endswith("-again"):
            return first
        assert (settings.n_samples, settings.temperature) == (1, 0.7)
        return [
            [Generated(" B, 70%```", (1,), True)],
            [Generated(" none", (1,), False)],
            [Generated(" B, 90%", (1,), True)],
        ]

    monkeypatch.setattr(method_module, "load_or_generate", written)
    questions = [Question(str(i), str(i), "Which?", ("a", "b", "c"), 0) for i in range(3)]
    model = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None))
    context = FitContext(lambda: model, NOBODY, FitSettings(), tmp_path)  # type: ignore[arg-type, return-value]
    plan = InterviewPlan("vanilla", thinking=True, temperature=0.7, samples=2, aggregation="")
    plain = Interview(context, SteerConfSettings()).ask(questions, "test", plan)
    assert len(prompts) == 1
    assert plain.samples[0] == [StatedAnswer(0, 0.9), None]
    again = Interview(context, SteerConfSettings(ask_again=True)).ask(questions, "test", plan)
    assert again.samples == [
        [StatedAnswer(0, 0.9), StatedAnswer(1, 0.7)],
        [StatedAnswer(1, 0.4), None],
        [None, StatedAnswer(1, 0.9)],
    ]
    assert prompts[2] == [
        f"{prompts[1][0]}Because it is\n{line}",
        f"{prompts[1][1]}It says C but\n{line}",
        f"{prompts[1][2]}{half}\n{line}",
    ]
    assert again.asked_again == 3
    assert again.failures(2)["samples asked for their answer again"] == 3
    assert "samples asked for their answer again" not in plain.failures(2)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:.*lost their beginning")
def test_wordings_that_are_asked_together_are_answered_as_one_by_one(tiny: Model, tmp_path: Path) -> None:
    questions = [Question(str(i), str(i), f"Which of {i}?", ("a", "b", "c"), 0) for i in range(3)]
    settings = SteerConfSettings(max_new_tokens=6)
    plans = [InterviewPlan(p, t, 0.7, 2, "") for p in ("vanilla", "cautious") for t in (True, False)]

    def written(name: str, *groups: Sequence[InterviewPlan]) -> list[str]:
        context = FitContext(lambda: tiny, NOBODY, FitSettings(), tmp_path / name)
        for group in groups:
            Interview(context, settings).ask_all(questions, "validation", group)
        pieces = [read_piece(path) or [] for path in sorted((tmp_path / name).rglob("texts-*.jsonl"))]
        return sorted(text.text for piece in pieces for samples in piece for text in samples)

    apart = written("apart", *([plan] for plan in plans))
    assert written("together", plans) == apart
    assert len(set(apart)) > len(plans)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:.*lost their beginning")
def test_the_samples_of_the_first_stage_are_not_written_again(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [Question(str(i), str(i), f"Which of {i}?", ("a", "b", "c"), 0) for i in range(3)]
    settings = SteerConfSettings(
        prompts=("vanilla", "cautious"),
        thinking=(False,),
        temperatures=(0.7, 0.5),
        samples=(1, 4),
        screening=2,
        max_new_tokens=6,
        ask_again=True,
    )
    wanted: list[tuple[str, int, int, int]] = []

    def counted(
        context: FitContext, prompts: Sequence[str], name: str, *, settings: GenerationSettings
    ) -> list[list[Generated]]:
        wanted.append((name, len(prompts), settings.first_sample, settings.n_samples))
        return load_or_generate(context, prompts, name, settings=settings)

    monkeypatch.setattr(method_module, "load_or_generate", counted)

    def interview(name: str) -> Interview:
        return Interview(FitContext(lambda: tiny, NOBODY, FitSettings(), tmp_path / name), settings)

    staged, afresh = interview("staged"), interview("afresh")
    chosen = choose_interview(staged, questions, judge_of(questions, "ece"))
    wording = f"validation-{chosen.prompt}-direct"
    assert [(n, first, samples) for name, n, first, samples in wanted if not name.endswith("-again")] == [
        (6, 0, 2),
        (3, 2, 2),
        (3, 0, 4),
    ]
    again = {name: n for name, n, *_ in wanted if name.endswith("-again")}
    assert again == {"validation-2-wordings-0.7-again": 12, f"{wording}-0.7-again": 6, f"{wording}-0.5-again": 12}
    plan = replace(chosen, temperature=0.7, samples=4)
    assert afresh.ask(questions, "validation", plan) == staged.ask(questions, "validation", plan)
    assert afresh.drawn.items() <= staged.drawn.items(), "the very texts that are written at once"


@pytest.mark.usefixtures("one_thread")
def test_killed_writing_goes_on_and_ends_with_the_same_bytes(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts_module, "PIECE", 2)
    prompts, settings = (
        [f"Say {i}" for i in range(5)],
        GenerationSettings(max_new_tokens=4, temperature=1.0, n_samples=2),
    )

    def context(name: str) -> FitContext:
        return FitContext(lambda: tiny, NOBODY, FitSettings(), tmp_path / name)

    whole = load_or_generate(context("whole"), prompts, "texts", settings=settings)
    usual, calls = texts_module.generate_answers, []

    def deadly(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return usual(*arguments, **more)

    monkeypatch.setattr(texts_module, "generate_answers", deadly)
    with pytest.raises(KeyboardInterrupt):
        load_or_generate(context("killed"), prompts, "texts", settings=settings)
    resumed = load_or_generate(context("killed"), prompts, "texts", settings=settings)
    assert resumed == whole
    assert len(calls) == 4, "the first piece is not written again"
    files = [sorted((tmp_path / name).rglob("texts-*.jsonl")) for name in ("whole", "killed")]
    assert len(files[0]) == 3
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]
    # a damaged piece is written again
    files[1][1].write_bytes(files[1][1].read_bytes().replace(b"text", b"tExt", 1))
    assert load_or_generate(context("killed"), prompts, "texts", settings=settings) == whole
    assert files[1][1].read_bytes() == files[0][1].read_bytes()
    # and so is one that is sound, but of fewer prompts than a piece has
    first = read_piece(files[1][0])
    assert first is not None
    write_piece(files[1][0], first[:1])
    assert load_or_generate(context("killed"), prompts, "texts", settings=settings) == whole
    assert files[1][0].read_bytes() == files[0][0].read_bytes()
