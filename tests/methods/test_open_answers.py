"""Baselines of open answers: what each chooses and how sure it is, by hand; and maps that never turn an order."""

from __future__ import annotations

import numpy as np
import pytest
from support.open_planted import OpenPlantedStore

from coral_lens.data.open_questions import OpenQuestion
from coral_lens.data.settings import Style
from coral_lens.engine.candidates import as_choice
from coral_lens.engine.extract import score_in_memory
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Extraction
from coral_lens.engine.prompts import render
from coral_lens.engine.settings import Sampling
from coral_lens.methods.open_answers import (
    SIMPLE,
    SureAnswers,
    answers_of_lens,
    by_entropy,
    by_frequency,
    by_logprob,
    by_p_true,
    fit_platt,
    predictions_of_answers,
    statement_of,
)
from coral_lens.metrics.scores import score
from coral_lens.records import NONE, OptionTable, Question

pytestmark = pytest.mark.usefixtures("one_thread")


class TwoQuestions:
    """Candidates written 2, 5 and once of 8 times, and one written 4 of 8 times; the rest was no candidate."""

    manifest = {"model": {"name": "m"}}  # noqa: RUF012
    layers = ()
    questions = (
        Question("a", "a", "A?", ("x", "y", "z", NONE), 0, counts=(2, 5, 1, 0)),
        Question("b", "b", "B?", ("w", NONE), 1, counts=(4, 4)),
    )
    table = OptionTable(
        np.array([-1.0, -6.0, -9.0, -9.0, -2.0, -0.1]), np.array([1, 2, 3, 3, 1, 3]), *[np.ones(6, dtype=int)] * 2,
        np.array([0, 4, 6]), np.array([0, 1]), counts=np.array([2, 5, 1, 0, 4, 4]),
    )  # fmt: skip

    def layer(self, layer: int, place: str = "answer") -> np.ndarray:
        raise AssertionError("no state is read")


def test_the_most_frequent_candidate_and_its_share_never_none_of_these() -> None:
    found = by_frequency(TwoQuestions())
    assert found.chosen.tolist() == [1, 0]
    assert found.sure == pytest.approx([5 / 8, 4 / 8])
    assert found.right.tolist() == [False, False]


def test_the_candidate_of_the_highest_mean_log_probability() -> None:
    found = by_logprob(TwoQuestions())
    assert found.chosen.tolist() == [0, 0]
    assert found.sure == pytest.approx([-1, -2])
    assert found.right.tolist() == [True, False]


def test_candidates_that_disagree_make_semantic_entropy_unsure() -> None:
    found = by_entropy(TwoQuestions())
    shares = np.array([2, 5, 1]) / 8
    assert found.chosen.tolist() == [1, 0]
    assert found.sure == pytest.approx([(shares * np.log(shares)).sum(), 0])


def test_p_true_asks_the_model_about_the_most_frequent_candidate_after_all_that_it_wrote(tiny: Model) -> None:
    statement = statement_of(TwoQuestions.questions[0], 1)
    text = render(statement, Style(), tiny).contexts[0]
    assert "Possible answers:\n- x\n- y\n- z\nProposed answer: y\nIs the proposed answer right?" in text
    assert NONE not in text
    assert statement.options == ("no", "yes")
    found = by_p_true(tiny, TwoQuestions())
    judged = score_in_memory(tiny, [statement], Extraction(layers=()))
    no, yes = np.exp(judged.table.logprobs)
    assert found.sure[0] == pytest.approx(yes / (yes + no), abs=1e-5)
    assert found.chosen.tolist() == [1, 0]


def test_a_map_makes_any_number_a_confidence_that_is_right_on_average_and_turns_no_order() -> None:
    store = OpenPlantedStore(500)
    for method in SIMPLE:
        answers = method(store)
        platt = fit_platt(answers)
        mapped = predictions_of_answers(answers, store, platt)
        assert platt(answers.sure).mean() == pytest.approx(answers.right.mean(), abs=0.01)
        assert score(mapped, "auroc") == pytest.approx(score(predictions_of_answers(answers, store), "auroc"), abs=1e-3)
        assert mapped.method == f"{answers.method} + temperature"


def test_a_number_that_misleads_is_given_no_weight() -> None:
    right = np.array([True, False] * 50)
    platt = fit_platt(SureAnswers("m", np.zeros(100, dtype=int), np.where(right, -2.0, -1.0), right))
    assert platt.slope == 0
    assert platt(np.array([-1.0])) == pytest.approx(0.5, abs=0.01)


def test_probabilities_of_candidates_answer_with_the_likeliest_of_them() -> None:
    found = answers_of_lens("lens", np.array([0.3, 0.1, 0.1, 0.5, 0.2, 0.8]), TwoQuestions())
    assert found.chosen.tolist() == [0, 0]
    assert found.sure == pytest.approx([0.3, 0.2])
    assert found.right.tolist() == [True, False]


def test_several_right_candidates_are_each_right() -> None:
    choice = as_choice(OpenQuestion("q", "Who?", ("x", "y")), ("x", "y"), (3, 5, 0), Sampling())
    store = TwoQuestions()
    store.questions = (choice, TwoQuestions.questions[1])
    store.table = OptionTable(
        np.array([-1.0, -2.0, -9.0, -2.0, -0.1]), *[np.ones(5, dtype=int)] * 3, np.array([0, 3, 5]), np.array([0, 1]),
        counts=np.array([3, 5, 0, 4, 4]),
    )  # fmt: skip
    assert by_frequency(store).right.tolist() == [True, False]
    assert by_logprob(store).right.tolist() == [True, False]
