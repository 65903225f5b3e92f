"""Two trusts: by the name of a task, never by a small shift; elsewhere the answer goes back to the base by temperature."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.planted import PlantedStore

from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit_store
from coral_lens.lens.settings import FitSettings
from coral_lens.lens.trace import ELSEWHERE
from coral_lens.lens.trust import FADE, Believed, Trust, have_fixed_options
from coral_lens.ragged import Options
from coral_lens.records import Question

TASKS = {"a": 1.0, "b": 1.0}
TRUST = Trust(0.4, 2.0, 8.0, 1.0)


@pytest.fixture(scope="module")
def lens() -> Lens:
    return fit_store(PlantedStore(120, signal={1: 2.0}, tasks=TASKS), FitSettings(layers=(1,)))


# ------------------------------------------------------------------------------------------------------- the formula


def test_the_blend_worked_by_hand() -> None:
    options = Options.of_sizes([2, 2])
    base, q = np.array([0.6, 0.4, 0.6, 0.4]), np.array([0.1, 0.9, 0.1, 0.9])
    weights, scales = np.array([0.5, 1.0]), np.array([1.0, 2.0])
    half = np.sqrt(0.06) / (np.sqrt(0.06) + np.sqrt(0.36))
    squared = 0.01 / (0.01 + 0.81)
    assert Believed(weights, scales, np.ones(2)).blend(base, q, options) == pytest.approx(
        [half, 1 - half, squared, 1 - squared]
    )
    # temperature 2 takes the square root of what would be
    cooled = Believed(weights, scales, np.array([2.0, 2.0])).blend(base, q, options)
    assert cooled == pytest.approx(
        [0.06**0.25 / (0.06**0.25 + 0.36**0.25), 1 - 0.06**0.25 / (0.06**0.25 + 0.36**0.25), 0.1, 0.9]
    )


def test_what_a_probe_of_the_task_says_is_added_to_the_logits_and_fades() -> None:
    options = Options.of_sizes([2, 2])
    base = q = np.array([0.6, 0.4, 0.6, 0.4])
    ones, own = np.ones(2), np.log([2.0, 1.0, 2.0, 1.0])
    blended = Believed(ones, ones, ones, fading=np.array([1.0, 0.5])).blend(base, q, options, own)
    faded = 0.6 * np.sqrt(2.0)
    assert blended == pytest.approx([0.75, 0.25, faded / (faded + 0.4), 0.4 / (faded + 0.4)])


@given(st.integers(0, 1000))
def test_weight_0_is_the_base_and_weight_1_the_lens(seed: int) -> None:
    rng, options = np.random.default_rng(seed), Options.of_sizes([3, 5, 2])
    base, q = (options.softmax(rng.normal(size=10)) for _ in range(2))
    ones = np.ones(3)
    assert Believed(0 * ones, ones, ones).blend(base, q, options) == pytest.approx(base)
    assert Believed(ones, ones, ones).blend(base, q, options) == pytest.approx(q, rel=1e-6)


def test_up_to_its_reach_the_lens_has_its_weight_and_beyond_none() -> None:
    shift = np.array([0.1, 1.0, 2.0, 2.0 * np.sqrt(FADE), 2.0 * FADE, 100.0])
    assert TRUST.weights(shift, np.zeros(6, dtype=bool)) == pytest.approx([0.4, 0.4, 0.4, 0.2, 0.0, 0.0])
    assert TRUST.weights(4 * shift, np.ones(6, dtype=bool)) == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.0, 0.0])


@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=9), st.booleans())
def test_more_shift_never_means_more_trust(shifts: list[float], at_home: bool) -> None:
    found = TRUST.weights(np.sort(shifts), np.full(len(shifts), at_home))
    assert (np.diff(found) <= 0).all()


def test_options_that_are_always_the_same_take_the_lens_out_but_not_at_home() -> None:
    home = np.array([True, False])
    assert TRUST.weights(np.ones(2), home, fixed=True).tolist() == [1.0, 0.0]


def test_the_temperature_elsewhere_goes_where_the_weight_goes() -> None:
    """Where the lens is left out, the base by temperature is left as it is; at home nothing is scaled twice."""
    doubted = replace(TRUST, temperature=4.0)
    shift = np.array([1.0, 2.0 * np.sqrt(FADE), 2.0 * FADE, 1.0])
    questions = [asked("a", "b"), asked("a", "c"), asked("a", "d"), asked("a", "e")]
    believed = doubted.believed(questions, shift, np.array([False, False, False, True]))
    assert believed.weights == pytest.approx([0.4, 0.2, 0.0, 1.0])
    assert believed.temperature == pytest.approx([4.0, 2.0, 1.0, 1.0])
    adapted = replace(doubted, adapted=True).believed(questions, shift, np.zeros(4, dtype=bool))
    assert adapted.temperature.tolist() == [4.0] * 4, "one that labels have found is that of the task"


def test_fixed_options_leave_the_base_by_temperature_as_it_is() -> None:
    believed = replace(TRUST, temperature=4.0).believed(
        [asked("yes", "no"), asked("yes", "no", text="Was it?")], np.ones(2), np.zeros(2, dtype=bool)
    )
    assert believed.weights.tolist() == [0.0, 0.0]
    assert believed.temperature.tolist() == [1.0, 1.0]


# ----------------------------------------------------------------------------------------------------- fixed options


def asked(*options: str, text: str = "Is it?") -> Question:
    return Question(text, text, text, options)


def fixed(*questions: Question) -> list[bool]:
    found: list[bool] = have_fixed_options(questions).tolist()
    return found


def test_the_same_strings_in_every_question_are_fixed_options() -> None:
    assert fixed(asked("billing", "parcels"), asked("Parcels", "billing ", text="And this?")) == [True, True]
    assert fixed(asked("billing", "parcels"), asked("up", "down")) == [False, False]


def test_one_odd_question_does_not_switch_off_what_holds_for_the_others() -> None:
    classes = [asked("billing", "parcels", text=f"{i}?") for i in range(30)]
    assert fixed(*classes, asked("a cat", "a dog")) == [True] * 30 + [False]


def test_two_kinds_of_classes_are_both_seen_and_so_are_a_few_among_many_others() -> None:
    kinds = (("billing", "parcels"), ("spam", "letter"))
    classes = [asked(*options, text=f"{i}?") for i in range(10) for options in kinds]
    others = [asked(f"{i} cats", f"{i} dogs") for i in range(200)]
    assert fixed(*classes, *others) == [True] * 20 + [False] * 200


def test_the_same_question_given_twice_is_one_question() -> None:
    cat, twice = asked("a cat", "a dog"), [asked("a cat", "a dog")] * 12
    assert fixed(cat, cat) == [False, False]
    assert not any(fixed(*twice, asked("up", "down")))
    classes = [asked("billing", "parcels", text=f"{i}?") for i in range(3)]
    assert fixed(*classes, *twice[:4]) == [True] * 3 + [False] * 4, "three of four questions, however often one comes"
    believed = TRUST.believed([cat, cat], np.ones(2), np.zeros(2, dtype=bool))
    assert believed.weights.tolist() == [0.4, 0.4]


def test_two_questions_about_the_same_two_things_are_no_classes() -> None:
    """As WinoGrande asks: once of the trophy, and once of the suitcase."""
    twins = [asked(f"the trophy {i // 2}", f"the suitcase {i // 2}") for i in range(40)]
    assert not any(fixed(*twins))


@pytest.mark.parametrize(
    "options",
    [
        ("Yes", "no"),
        ("yes", "No.", "unknown"),
        ("positive", "negative"),
        ("negative", "neutral", "positive"),
        ("Agree", "Disagree"),
        ("strongly disagree", "disagree", "neutral", "agree", "strongly agree"),
        ("entailment", "neutral", "contradiction"),
        ("entailment", "not_entailment"),
        ("1", "2", "3", "4", "5"),
        ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10"),
    ],
)
def test_verdicts_and_levels_are_known_of_one_question_alone(options: tuple[str, ...]) -> None:
    assert fixed(asked(*options)) == [True]


@pytest.mark.parametrize("options", [("a cat", "a dog"), ("3", "4"), ("2", "4", "6", "8", "10"), ("yes", "a cat")])
def test_what_may_be_the_answer_to_one_question_is_no_verdict(options: tuple[str, ...]) -> None:
    assert fixed(asked(*options)) == [False]


def test_of_such_questions_the_lens_has_no_weight_and_of_the_others_its_own() -> None:
    questions = [asked("yes", "no"), asked("yes", "no"), asked("a cat", "a dog"), asked("yes", "no")]
    home = np.array([False, False, False, True])
    assert TRUST.believed(questions, np.ones(4), home).weights.tolist() == [0.0, 0.0, 0.4, 1.0]


def test_letters_are_not_what_is_asked_where_the_text_lists_the_options() -> None:
    one = asked("A", "B", text="Which?\nA. red\nB. blue\nAnswer:")
    other = asked("A", "B", text="Which?\nA. tall\nB. short\nAnswer:")
    assert fixed(one, other) == [False, False]
    again = asked("A", "B", text="Which?\nA. red\nB. blue\nAnswer:")
    elsewhere = asked("A", "B", text="And this?\nA. blue\nB. red\nAnswer:")
    assert fixed(one, again) == [False, False], "the same question"
    assert fixed(one, elsewhere) == [True, True]


def test_elsewhere_answers_are_kept_by_what_was_found_on_tasks_that_were_left_out() -> None:
    trust = replace(TRUST, answers={"": True, "hard": False, ELSEWHERE: False})
    questions = [replace(asked("a", "b"), task=task) for task in ("hard", "easy", "new")]
    assert trust.answering(questions, np.array([True, True, False])).tolist() == [False, True, False]
    assert replace(trust, answers={"": True}).answering(questions, np.zeros(3, dtype=bool)).all(), "of earlier versions"


def test_the_papers_lens_is_believed_everywhere() -> None:
    lens = fit_store(PlantedStore(60, signal={1: 2.0}), FitSettings(lens="ridge", layers=(1,)))
    assert lens.trust is None
    away = PlantedStore(5, seed=1)
    assert {(a.trust, a.home) for a in lens.answers(away)} == {(None, False)}
    assert {(a.trust, a.home) for a in lens.at_home().answers(away)} == {(None, True)}
    assert lens.at_home().record() == lens.record()


def test_the_tempered_row_stands_beside_the_plain_one(lens: Lens) -> None:
    found = lens.apply(PlantedStore(40, signal={1: 2.0}, seed=5))
    assert list(found) == ["base", "temperature", "listwise", "listwise tempered"]
    assert lens.method == "listwise tempered"


def test_a_lens_without_tempering_leaves_its_probabilities_to_the_bit() -> None:
    lens = fit_store(PlantedStore(60, signal={1: 2.0}), FitSettings(layers=(1,), temper=False))
    store = PlantedStore(20, signal={1: 2.0}, seed=5)
    found = lens.apply(store)
    assert list(found) == ["base", "temperature", "listwise"]
    p, options = lens.base_probs(store.table), store.table.options
    assert found["listwise"].tobytes() == lens.steered(p, lens.correction.states(store), options).tobytes()
