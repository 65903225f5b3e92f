"""A planted preference for letters is taken out exactly, and questions are asked again just as lm-eval would ask them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.questions import toy_questions

from coral_lens.data.settings import Style, TaskOptions
from coral_lens.data.tasks import load_task
from coral_lens.data.wording import put_into_words
from coral_lens.engine.extract import extract
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Edited, Extraction
from coral_lens.errors import CoralError
from coral_lens.lens.settings import FitSettings
from coral_lens.methods.entry import MethodEntry
from coral_lens.methods.interface import FitContext, QuestionSet
from coral_lens.methods.letters import (
    letter_prior,
    listed_wording,
    mean_over_orders,
    prior_for,
    refuse_texts,
    reordered,
    without_content,
)
from coral_lens.methods.registry import METHODS, read_method
from coral_lens.ragged import Options
from coral_lens.records import OptionTable, Question, Rendered, Wording

LETTERS = Style("letters")
BIAS = {3: np.array([0.5, 0.3, 0.2]), 4: np.array([0.1, 0.2, 0.3, 0.4])}


def weighty(i: int, n: int) -> Question:
    """A question whose options say how much they deserve."""
    weights = np.random.default_rng(i).dirichlet(np.ones(n))
    return Question(str(i), str(i), f"Which, {i}?", tuple(f"{w:.6f}" for w in weights), int(weights.argmax()))


def deserved(questions: Sequence[Question]) -> np.ndarray:
    found = [np.array([float(o) for o in q.options]) for q in questions]
    return np.concatenate([w / w.sum() for w in found])


class Told:
    """Scores of a model that multiplies what an option deserves by what it thinks of its letter."""

    layers = ()
    manifest: dict[str, Any] = {"model": {"name": "biased"}, "questions": "00"}  # noqa: RUF012

    def __init__(self, questions: Sequence[Question]) -> None:
        self.questions = questions
        logs = []
        for q in questions:
            weights = np.array([1.0 if o == "N/A" else float(o) for o in q.options])
            logs.append(np.log(weights * BIAS[len(weights)]) - 7.0)
        ones = np.ones(sum(map(len, logs)), dtype=np.int64)
        offsets, answers = Options.of_sizes([len(v) for v in logs]).edges, np.array([q.answer for q in questions])
        self.table = OptionTable(np.concatenate(logs), ones, ones, ones, offsets, answers)

    def layer(self, layer: int, place: str = "answer") -> np.ndarray:
        raise AssertionError("no letter remedy reads states")


class BiasedContext(FitContext):
    """Has the biased model score."""

    def score(self, questions: Sequence[Question], name: str, *, edited: Edited | None = None) -> Told:  # type: ignore[override]
        assert len({q.id for q in questions}) == len(questions)
        return Told(questions)


def told(name: str, questions: Sequence[Question]) -> QuestionSet:
    return QuestionSet(name, Told(questions), lambda: tuple(questions))


@pytest.fixture
def context(tmp_path: Path) -> FitContext:
    train = told("train", [weighty(i, 3 + i % 2) for i in range(60)])
    return BiasedContext(lambda: pytest.fail("loaded"), train, FitSettings(style=LETTERS), tmp_path)


TEST = [weighty(100 + i, 3 + i % 2) for i in range(9)]


def outcome(context: FitContext, kind: str, **options: Any) -> np.ndarray:
    settings = read_method(MethodEntry.model_validate({"kind": kind, **options}))
    (found,) = METHODS[kind].fit(context, settings)(told("test", TEST)).values()
    return found.probs


@pytest.mark.parametrize(
    ("kind", "options"), [("contextual-calibration", {}), ("pride", {}), ("pride", {"questions": 1})]
)
def test_a_preference_that_multiplies_is_divided_out_exactly(
    context: FitContext, kind: str, options: dict[str, int]
) -> None:
    assert np.allclose(outcome(context, kind, **options), deserved(TEST), atol=1e-6)


def test_batch_calibration_divides_by_the_mean_over_the_validation_questions(context: FitContext) -> None:
    found = outcome(context, "batch-calibration")
    p = np.split(np.exp(Told(TEST).table.logprobs + 7.0), Told(TEST).table.options.starts[1:])
    validation = [context.train.states.questions[i] for i in context.validation()]
    for i, question in enumerate(TEST):
        n = len(question.options)
        means = np.zeros(n)
        alike = [q for q in validation if len(q.options) == n]
        for other in alike:
            weights = np.array([float(o) for o in other.options]) * BIAS[n]
            means += weights / weights.sum() / len(alike)
        expected = p[i] / means
        rows = Options.of_sizes([len(q.options) for q in TEST]).of(i)
        assert np.allclose(found[rows], expected / expected.sum(), atol=1e-6)


def test_cyclic_averaging_gives_every_option_every_letter(context: FitContext) -> None:
    found = np.split(outcome(context, "cyclic"), Options.of_sizes([len(q.options) for q in TEST]).starts[1:])
    for question, probs in zip(TEST, found, strict=True):
        weights, n = np.array([float(o) for o in question.options]), len(question.options)
        total = np.zeros(n)
        for shift in range(n):
            at = [(i - shift) % n for i in range(n)]  # the place at which option i stands
            shown = weights * BIAS[n][at]
            total += shown / shown.sum() / n
        assert np.allclose(probs, total, atol=1e-6)
        assert probs.argmax() == weights.argmax()


def test_a_prior_and_an_average_worked_by_hand() -> None:
    # two options; the first letter gets 0.8 in one order and 0.6 in the other
    observed = np.array([[0.8, 0.2], [0.6, 0.4]])
    first = np.sqrt(0.8 * 0.6) / (np.sqrt(0.8 * 0.6) + np.sqrt(0.2 * 0.4))
    assert np.allclose(letter_prior(observed), [first, 1 - first])
    assert np.allclose(mean_over_orders(observed), [(0.8 + 0.4) / 2, (0.2 + 0.6) / 2])


def test_a_preference_among_more_letters_serves_fewer_and_not_the_reverse() -> None:
    priors = {4: np.array([0.4, 0.3, 0.2, 0.1]), 5: np.full(5, 0.2)}
    assert np.allclose(prior_for(priors, 3), [0.4 / 0.9, 0.3 / 0.9, 0.2 / 0.9])
    with pytest.raises(CoralError, match="has 6 options, but no validation question has more than 5"):
        prior_for(priors, 6)


# --- asking again


def csqa(number: int, order: Sequence[int] = (0, 1, 2, 3, 4), *, answer: int = 1) -> dict[str, Any]:
    texts = [f"thing {number}", "a place\nof two lines", "B. an odd one", f"no {number}", "yes: A. or B."]
    labels = list("ABCDE")
    return {
        "id": f"q{number}",
        "question": f"Which of these\nA. is it, {number}?",
        "question_concept": "it",
        "choices": {"label": labels, "text": [texts[i] for i in order]},
        "answerKey": labels[list(order).index(answer)],
    }


def put(root: Path, rows: list[dict[str, Any]]) -> Path:
    (root / "commonsense_qa").mkdir(parents=True)
    for split in ("train", "validation"):
        text = "".join(json.dumps(r) + "\n" for r in rows)
        (root / "commonsense_qa" / f"{split}.jsonl").write_text(text, "utf-8")
    return root


@pytest.mark.parametrize("chat", [False, True])
def test_a_task_is_asked_in_another_order_just_as_lm_eval_would_ask_it(tmp_path: Path, chat: bool) -> None:
    template: Callable[..., str] | None = (lambda messages, **_: f"<{messages[-1]['content']}>") if chat else None
    options = TaskOptions(split="validation", chat_template=template)
    plain = load_task("commonsense_qa", replace(options, data_dir=put(tmp_path / "a", [csqa(i) for i in range(3)])))
    for shift in range(1, 5):
        order = [(j + shift) % 5 for j in range(5)]
        root = put(tmp_path / f"b{shift}", [csqa(i, order) for i in range(3)])
        expected = load_task("commonsense_qa", replace(options, data_dir=root))
        for ours, theirs in zip((reordered(q, shift) for q in plain), expected, strict=True):
            assert ours.rendered == theirs.rendered
            assert (ours.text, ours.answer, ours.options) == (theirs.text, theirs.answer, theirs.options)


def test_worked_examples_stay_and_only_the_question_loses_its_content(tmp_path: Path) -> None:
    root = put(tmp_path, [csqa(i) for i in range(4)])
    question = load_task("commonsense_qa", TaskOptions(split="validation", num_fewshot=2, data_dir=root))[0]
    empty = without_content(question)
    assert question.rendered is not None
    assert empty.rendered is not None
    before, after = question.rendered.contexts[0], empty.rendered.contexts[0]
    shots = before.removesuffix(question.text)
    assert shots.count("Answer: B") == 2
    assert after == shots + "Question: N/A\nA. N/A\nB. N/A\nC. N/A\nD. N/A\nE. N/A\nAnswer:"
    assert set(empty.rendered.contexts) == {after}


def test_own_questions_are_asked_in_another_order_and_without_content() -> None:
    question = Question("q", "q", "Which?", ("x", "y", "z"), 0, passage="Read this.")
    moved = reordered(question, 1)
    assert (moved.options, moved.answer) == (("y", "z", "x"), 2)
    assert reordered(replace(question, answer=-1), 1).answer == -1
    empty = without_content(question)
    assert (empty.text, empty.options, empty.passage) == ("N/A", ("N/A",) * 3, "N/A")


def test_what_an_option_means_and_its_share_go_where_it_goes() -> None:
    meant = {"descriptions": ("of x", "of y", "of z"), "instructions": "Say."}
    question = Question("a", "a", "Which?", ("x", "y", "z"), 1, **meant)
    for shift in (1, 2):
        asked = put_into_words(reordered(question, shift), LETTERS).asked
        assert all(f"{option}: of {option}\n" in asked for option in "xyz")
    assert "of" not in put_into_words(without_content(question), LETTERS).asked
    assert "Say." in put_into_words(without_content(question), LETTERS).asked
    several = reordered(Question("a", "a", "Which?", ("x", "y", "z"), right=(0, 2)), 1)
    assert [several.options[j] for j in several.right] == ["z", "x"]
    soft = reordered(Question("a", "a", "Which?", ("x", "y", "z"), soft=(0.2, 0.5, 0.3)), 2)
    assert dict(zip(soft.options, soft.soft, strict=True)) == {"x": 0.2, "y": 0.5, "z": 0.3}
    assert soft.options[soft.answer] == "y"


def test_questions_of_other_instructions_or_worked_examples_have_a_prompt_without_content_of_their_own(
    context: FitContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[Question] = []
    monkeypatch.setattr(BiasedContext, "score", lambda _, questions, __: scored.extend(questions) or Told(questions))
    plain, shot = weighty(1, 3), weighty(2, 3)
    asked = [plain, replace(plain, instructions="Say."), replace(plain, shots=(shot,)), replace(plain, text="Alike?")]
    settings = read_method(MethodEntry.model_validate({"kind": "contextual-calibration"}))
    METHODS["contextual-calibration"].fit(context, settings)(told("test", asked))
    assert sorted((q.instructions, len(q.shots)) for q in scored) == [("", 0), ("", 1), ("Say.", 0)]


def test_what_is_not_listed_under_its_letters_is_refused() -> None:
    stem = "Which?\nA. red\nB. blue\nAnswer:"
    whole = Question(
        "q", "q", stem, ("A", "B"), 0, rendered=Rendered((f"Hello\n{stem}",) * 2, (" A", " B"), ("A", "B"))
    )
    assert listed_wording(whole) == Wording("", "Which?", ("red", "blue"), ". ", "\nAnswer:")
    assert whole.rendered is not None
    by_text = replace(whole, rendered=replace(whole.rendered, continuations=(" red", " blue")))
    unlisted = replace(whole, text="Which?", rendered=replace(whole.rendered, contexts=("Which?",) * 2))
    short = "Which?\nA. red\nAnswer:"
    missing = replace(whole, text=short, rendered=replace(whole.rendered, contexts=(short,) * 2))
    for bad in (by_text, unlisted, missing):
        with pytest.raises(CoralError, match="need options that are listed in the prompt and scored by letter"):
            refuse_texts([whole, bad], Style(), None)
    with pytest.raises(CoralError, match="own questions in the style letters"):
        refuse_texts(toy_questions(2), Style("text"), None)
    refuse_texts(toy_questions(2), LETTERS, None)


@pytest.mark.usefixtures("one_thread")
def test_every_remedy_runs_on_a_model_and_finds_its_scores_again(tiny: Model, tmp_path: Path) -> None:
    questions, tests = toy_questions(30, seed=1), toy_questions(6, seed=2)
    extraction = Extraction((1,), LETTERS)
    sets = [
        QuestionSet(n, extract(tiny, q, tmp_path / n, extraction=extraction), lambda q=q: tuple(q))  # type: ignore[misc]
        for n, q in (("train", questions), ("test", tests))
    ]
    for kind in ("contextual-calibration", "batch-calibration", "pride", "cyclic"):
        settings = read_method(MethodEntry(kind=kind))
        folder, outcomes = tmp_path / kind, []
        for model in (lambda: tiny, lambda: tiny):
            context = FitContext(model, sets[0], FitSettings(style=LETTERS), folder)
            outcomes.append(METHODS[kind].fit(context, settings)(sets[1])[""].probs)
        assert np.array_equal(*outcomes)
        base = np.exp(sets[1].states.table.logprobs)
        assert not np.allclose(outcomes[0], base)
