"""Read-outs: worked by hand, blind to letters where they say so, and the same through every door of the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.planted import PlantedStore, brier
from support.questions import toy_questions

from coral_lens.data.settings import Style
from coral_lens.engine.extract import score_in_memory
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Extraction
from coral_lens.errors import CoralError
from coral_lens.harness.scoring import choose_shape, score_requests
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit, fit_store
from coral_lens.lens.folder import load_lens
from coral_lens.lens.readouts import READ_OUTS, fit_letters, letter_numbers, matched, subtract_letters
from coral_lens.lens.settings import FitSettings, ReadName
from coral_lens.records import Question
from coral_lens.serve.lenses import open_lenses
from coral_lens.serve.metrics import ServeMetrics
from coral_lens.serve.queue import Job, JobQueue
from coral_lens.serve.settings import Address, Answering, Batching, Limits, ServeSettings
from coral_lens.serve.worker import ModelThread
from coral_lens.study.evaluate import evaluate

LETTERS = Style("letters")
OTHERS: tuple[ReadName, ...] = ("less-letter", "listed", "context")


# ------------------------------------------------------------------------------------------------------------- letters


def question(*options: str) -> Question:
    return Question("q", "q", "?", options)


def test_letters_are_known_by_the_options_or_by_the_style() -> None:
    asked = [question("A", "B"), question("red", "blue", "green")]
    assert letter_numbers(asked, lettered=False).tolist() == [0, 1, -1, -1, -1]
    assert letter_numbers(asked, lettered=True).tolist() == [0, 1, 0, 1, 2]


def test_the_mean_of_each_letter_worked_by_hand() -> None:
    states, numbers = np.array([[1.0], [10.0], [3.0], [20.0], [99.0]], dtype=np.float32), np.array([0, 1, 0, 1, -1])
    letters = fit_letters(states, numbers)
    assert letters.tolist() == [[2.0], [15.0], [8.5]]  # A, B, and both
    assert subtract_letters(states, numbers, letters)[:, 0].tolist() == [-1.0, -5.0, 1.0, 5.0, 90.5]
    # a letter that was never seen: less the mean of all
    assert subtract_letters(states[:1], np.array([4]), letters).tolist() == [[1.0 - 8.5]]


def test_without_letters_nothing_but_a_zero_is_subtracted() -> None:
    states = np.ones((3, 2), dtype=np.float32)
    numbers = np.array([-1, -1, -1])
    np.testing.assert_array_equal(subtract_letters(states, numbers, fit_letters(states, numbers)), states)


class Lettered(PlantedStore):
    """Questions by letters, whose states are pushed by their letter; other places hold what they are given."""

    def __init__(self, n: int, *, push: float = 0.0, seed: int = 0, signal_at: str = "answer") -> None:
        super().__init__(n, signal={1: 2.0}, seed=seed)
        self.questions = [replace(q, options=tuple("ABCDE"[: len(q.options)])) for q in self.questions]
        self.manifest["read"] = "answer listed context"
        letters = np.random.default_rng(5).normal(size=(5, 8)).astype(np.float32)
        noise = np.random.default_rng(6 + seed)
        self.by_place: dict[str, dict[int, np.ndarray]] = {}
        for place in ("answer", "listed"):
            known = {n: s + push * letters[self.table.options.option] for n, s in self.states.items()}
            other = {n: noise.normal(size=s.shape).astype(np.float32) for n, s in self.states.items()}
            self.by_place[place] = known if place == signal_at else other
        self.by_place["context"] = {n: np.ones_like(s) for n, s in self.states.items()}

    def layer(self, layer: int, place: str = "answer") -> np.ndarray:
        return self.by_place[place][layer]


def test_a_lens_less_letters_does_not_see_what_a_letter_does_to_states() -> None:
    settings = FitSettings(layers=(1,), read="less-letter")
    plain, pushed = (fit_store(Lettered(100, push=push), settings) for push in (0.0, 5.0))
    answers = [lens.apply(Lettered(60, push=p, seed=1)) for lens, p in ((plain, 0.0), (pushed, 5.0))]
    np.testing.assert_allclose(answers[0][plain.method], answers[1][plain.method], atol=1e-3)
    blind = fit_store(Lettered(100, push=5.0), FitSettings(layers=(1,)))
    fresh = Lettered(60, push=5.0, seed=1)
    assert brier(fresh, answers[1][pushed.plain_method]) < brier(fresh, blind.apply(fresh)[blind.plain_method])


# ---------------------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize(("at", "chosen"), [("answer", {"answer", "less-letter"}), ("listed", {"listed", "context"})])
def test_auto_takes_the_read_out_that_knows(at: str, chosen: set[str]) -> None:
    lens = fit_store(Lettered(120, signal_at=at), FitSettings(layers=(0, 1), read="auto"))
    assert lens.correction.reading.name in chosen
    assert lens.layers == (1,)
    assert lens.training.settings["read"] == "auto"


def test_the_context_is_multiplied_column_by_column() -> None:
    store = Lettered(5)
    store.by_place["context"][1] = np.full_like(store.states[1], 3.0)
    np.testing.assert_allclose(matched(store, 1), 3.0 * store.layer(1, "listed"))


def test_a_store_that_was_not_read_there_is_refused_with_what_to_do(tiny: Model) -> None:
    store = score_in_memory(tiny, toy_questions(30), Extraction(layers=(1,), style=LETTERS))
    with pytest.raises(CoralError, match="--read answer,listed"):
        fit_store(store, FitSettings(read="listed", style=LETTERS))
    assert fit_store(store, FitSettings(read="auto", style=LETTERS)).correction.reading.name in (
        "answer",
        "less-letter",
    )


@pytest.mark.parametrize("name", OTHERS)
def test_where_no_prompt_lists_options_its_name_would_be_wrong_and_it_is_refused(
    name: ReadName, tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coral_lens.lens.fit.score_questions", lambda *_, **__: pytest.fail("nothing is scored before"))
    with pytest.raises(
        CoralError, match=f"`--read {name}` is for prompts that list .* none of these 30 does; .* letters"
    ):
        fit(tiny, toy_questions(30), FitSettings(layers=(1,), read=name), bar=False)


@pytest.mark.parametrize("name", OTHERS)
def test_of_a_mixture_the_others_are_read_at_their_own_tokens(name: ReadName, tiny: Model) -> None:
    texts = toy_questions(60)
    lettered = [
        replace(q, text="\n".join([q.text, *(f"{letter}. {o}" for letter, o in zip("ABCDE", q.options, strict=False))]),
                options=tuple("ABCDE"[: len(q.options)]))
        for q in toy_questions(30, seed=5)
    ]  # fmt: skip
    mixed = [replace(q, id=str(i), group=str(i)) for i, q in enumerate([*texts, *lettered])]
    lens = fit(tiny, mixed, FitSettings(layers=(1,), read=name), bar=False)
    assert f"read as {name}" in lens.name
    assert len(lens.predict(tiny, toy_questions(8, seed=3))) == 8, "it answers where no prompt lists options"


# ------------------------------------------------------------------------------------------------- through every door


@pytest.fixture(scope="module", params=OTHERS)
def lens(request: pytest.FixtureRequest, tiny: Model) -> Lens:
    settings = FitSettings(layers=(1, 2), read=request.param, style=LETTERS)
    # toy questions teach nothing: of its own accord a lens of them would not change a probability
    return replace(fit(tiny, toy_questions(60), settings, bar=False), gamma=1.0).at_home()


def test_a_saved_lens_reads_as_before_to_the_bit(lens: Lens, tiny: Model, tmp_path: Path) -> None:
    fresh = toy_questions(8, seed=3)
    lens.save(tmp_path / "lens")
    again = load_lens(tmp_path / "lens")
    assert again.correction.reading.name == lens.correction.reading.name
    assert again.correction.reading.lettered
    assert f"read as {lens.correction.reading.name}" in again.name
    before, after = (one.predict(tiny, fresh) for one in (lens, again))
    assert [a.probs for a in before] == [a.probs for a in after]
    assert [a.probs for a in before] != [a.probs for a in replace(lens, gamma=0.0).predict(tiny, fresh)]


def test_a_run_of_it_has_the_same_answers(lens: Lens, tiny: Model) -> None:
    fresh = toy_questions(8, seed=3)
    run = evaluate(lens, tiny, {"test": fresh}, bar=False)
    row = run.evaluations[0].predictions[lens.method]
    found = {a.id: a.probs for a in lens.predict(tiny, fresh)}
    for i, name in enumerate(row.ids):
        assert row.probs[row.options.of(i)] == pytest.approx(found[name], abs=1e-5)


def test_a_server_reads_what_it_reads(lens: Lens, tiny: Model, tmp_path: Path) -> None:
    """Beside a lens that reads elsewhere, in one pass."""
    lens.save(tmp_path / "other")
    fit(tiny, toy_questions(60), FitSettings(layers=(2,)), bar=False).save(tmp_path / "plain")
    lenses = open_lenses([str(tmp_path / "other"), str(tmp_path / "plain")])
    assert set(lenses.places) == {"answer", *lens.places}
    questions = toy_questions(4, seed=3, labelled=False)
    jobs = [Job(lenses.find(name), questions, seconds=60.0) for name in ("other", "plain")]
    queue = JobQueue(1000)
    for job in jobs:
        queue.put(job)
    queue.close()
    settings = ServeSettings(Address(port=0), Limits(), Batching(), Answering())
    thread = ModelThread(tiny, lenses, queue, settings, ServeMetrics(lambda: queue.waiting))
    thread.start()
    thread.join()
    for job in jobs:
        wanted = job.lens.lens.predict(tiny, questions)
        outcomes: list[Any] = [scored.outcome for scored in job.done.result(60)]
        for given, answer in zip(outcomes, wanted, strict=True):
            assert given.probs == pytest.approx(answer.probs, abs=1e-4)


def test_lm_evals_requests_have_the_states_of_a_store(tiny: Model) -> None:
    asked = "Question: Which?\nA. red\nB. blue and green\nAnswer:"
    requests = {((asked, " A"), (asked, " B")): "q"}
    places = READ_OUTS["context"].places
    found = score_requests(tiny, requests, choose_shape(tiny), layers=(1, 2), read=places)
    question = Question("q", "q", "Which?", ("red", "blue and green"))
    store = score_in_memory(tiny, [question], Extraction(layers=(1, 2), style=LETTERS, read=places))
    for place in places:
        np.testing.assert_allclose(found.layer(2, place), store.layer(2, place), atol=1e-3)
    assert not np.allclose(found.layer(2, "listed"), found.layer(2), atol=0.01)
