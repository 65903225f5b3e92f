"""ITI finds the heads that know, shifts them as the paper says, and does nothing at strength 0."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from support.models import make_model
from support.plain_passes import options, plain_logprob
from support.questions import toy_questions

from coral_lens.data.settings import Style
from coral_lens.engine.extract import extract
from coral_lens.engine.hooks import Site
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Edited, Extraction
from coral_lens.engine.prompts import prepare
from coral_lens.errors import CoralError
from coral_lens.lens.rules import base_probs
from coral_lens.lens.settings import FitSettings
from coral_lens.methods.entry import MethodEntry
from coral_lens.methods.interface import FitContext, QuestionSet
from coral_lens.methods.iti import method as iti
from coral_lens.methods.iti.method import (
    HeadScan,
    Intervention,
    InterventionSetting,
    ItiSettings,
    fit_iti,
    intervention_of,
    intervention_settings,
)
from coral_lens.methods.registry import read_method
from coral_lens.records import Prompt, Question
from coral_lens.storage.files import digest, read_record

pytestmark = pytest.mark.usefixtures("one_thread")

TRAIN, TEST = tuple(toy_questions(40, seed=1)), tuple(toy_questions(6, seed=2))


def question_set(model: Model, questions: tuple[Question, ...], folder: Path) -> QuestionSet:
    states = extract(model, questions, folder / "states", extraction=Extraction(layers=(1,)))
    return QuestionSet(folder.name, states, lambda: questions)


def context_of(model: Model, folder: Path, questions: tuple[Question, ...] = TRAIN) -> FitContext:
    train = question_set(model, questions, folder / "train")
    return FitContext(lambda: model, train, FitSettings(), folder / "method")


def prompts_of(model: Model, questions: tuple[Question, ...]) -> tuple[Prompt, ...]:
    return prepare(questions, Style(), model).prompts


# --------------------------------------------------------------------------- the whole method, the plain way


def plain_heads(model: Model, questions: tuple[Question, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Heads [option, layer, head, dim] at the last token of each option, from a pass per option; labels and questions."""
    rows, right, number = [], [], []
    for i, (question, prompt) in enumerate(zip(questions, prompts_of(model, questions), strict=True)):
        for j, (context, option) in enumerate(options([prompt])):
            seen: list[torch.Tensor] = []
            keep = {Site("heads", layer): lambda s, seen=seen: seen.append(s[-1]) or s for layer in (1, 2, 3)}
            plain_logprob(model, context, option, keep)
            rows.append(torch.stack(seen).reshape(3, 4, -1).numpy())
            right.append(float(j == question.answer))
            number.append(i)
    return np.stack(rows), np.array(right), np.array(number)


def plain_scores(model: Model, shifts: dict[tuple[int, int], np.ndarray]) -> np.ndarray:
    """Log-probabilities of the test options with heads shifted by hooks of the test's own, one pass per option."""
    dim = next(iter(shifts.values())).shape[0]
    found = []
    for context, option in options(prompts_of(model, TEST)):
        start = len(context) - 1
        changes = {}
        for layer in {layer for layer, _ in shifts}:
            whole = torch.zeros(4 * dim)
            for (at, head), shift in shifts.items():
                if at == layer:
                    whole[head * dim : (head + 1) * dim] = torch.from_numpy(shift)
            changes[Site("heads", layer)] = lambda s, at=start, by=whole: torch.cat([s[:at], s[at:] + by])
        found.append(float(plain_logprob(model, context, option, changes)))
    return np.array(found)


@pytest.mark.parametrize(
    ("family", "sigma"), [("llama", False), ("gemma2", True), ("gpt2", False), ("qwen3-window", True)]
)
def test_the_whole_method_is_that_of_plain_passes_and_scikit_learn(family: str, sigma: bool, tmp_path: Path) -> None:
    model, context = make_model(family), context_of(make_model(family), tmp_path)
    settings = ItiSettings(heads=(3,), directions=("probe",) if sigma else ("mean",), alphas=(2.0,), sigma=sigma)
    found = fit_iti(context, settings)(question_set(model, TEST, tmp_path / "test"))[""]

    heads, y, number = plain_heads(model, TRAIN)
    held_out = context.data.is_validation[number]
    accuracy, directions = {}, {}
    for layer in range(3):
        for head in range(4):
            x = heads[:, layer, head].astype(np.float64)
            probe = LogisticRegression(class_weight="balanced", tol=1e-10, max_iter=10_000)
            probe.fit(x[~held_out], y[~held_out])
            recalls = [(probe.predict(x[held_out & (y == c)]) == c).mean() for c in (0, 1)]
            accuracy[layer + 1, head] = np.mean(recalls)
            raw = probe.coef_[0]
            if not sigma:
                train = ~held_out
                raw = x[train & (y == 1)].mean(axis=0) - x[train & (y == 0)].mean(axis=0)
            theta = raw / np.linalg.norm(raw)
            directions[layer + 1, head] = 2.0 * theta * ((x[~held_out] @ theta).std() if sigma else 1.0)
    best = sorted(accuracy, key=lambda at: (-round(accuracy[at], 9), at))[:3]
    record = json.loads((context.folder / "iti.json").read_text("utf-8"))
    assert [(h["layer"], h["head"]) for h in record["heads"]] == best
    logprobs = plain_scores(model, {at: directions[at].astype(np.float32) for at in best})
    lengths = np.array([len(option) for _, option in options(prompts_of(model, TEST))])
    np.testing.assert_allclose(found.probs, found.options.softmax(logprobs / lengths), atol=2e-4)


def test_strength_zero_gives_the_bits_of_the_model_as_it_is(any_tiny: Model, tmp_path: Path) -> None:
    test = question_set(any_tiny, TEST, tmp_path / "test")
    nothing, shift = (Intervention(np.ones((3, 4, 8), dtype=np.float32), alpha) for alpha in (0.0, 1.0))
    edited = Edited((nothing.edit,), nothing.about)
    context = FitContext(lambda: any_tiny, test, FitSettings(), tmp_path / "method")
    assert np.array_equal(context.score(TEST, "none", edited=edited).table.logprobs, test.states.table.logprobs)
    moved = Edited((shift.edit,), shift.about)
    assert not np.allclose(context.score(TEST, "none", edited=moved).table.logprobs, test.states.table.logprobs)


# ------------------------------------------------------------------------------------------------------- its parts


def test_the_most_accurate_heads_come_first_and_numbers_beyond_all_heads_are_all_heads() -> None:
    accuracy = np.array([[0.5, 0.9], [0.9, 0.7]])
    scan = HeadScan(accuracy, {"mean": np.ones((2, 2, 3)), "probe": np.full((2, 2, 3), 2.0)})
    assert scan.best(3) == [(1, 1), (2, 0), (2, 1)]
    tried = intervention_settings(scan, ItiSettings(heads=(1, 24, 48), directions=("mean",), alphas=(0.5, 1.0)))
    assert tried == [
        InterventionSetting(1, "mean", 0.5),
        InterventionSetting(1, "mean", 1.0),
        InterventionSetting(4, "mean", 0.5),
        InterventionSetting(4, "mean", 1.0),
    ]
    intervention = intervention_of(scan, InterventionSetting(2, "probe", 0.5))
    assert intervention.directions[:, :, 0].tolist() == [[0.0, 2.0], [2.0, 0.0]]
    assert {site.layer for site in intervention.edit.sites} == {1, 2}


def test_the_strengths_are_the_papers_or_the_originals() -> None:
    assert ItiSettings().strengths == (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
    assert max(ItiSettings(sigma=True).strengths) == 15.0
    assert ItiSettings().heads == (24, 48, 96)


def test_the_choice_is_the_best_on_validation_questions_and_is_found_again(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, settings = (
        context_of(tiny, tmp_path),
        ItiSettings(heads=(2, 5), alphas=(0.0, 3.0), criterion="brier", questions=5),
    )
    test = question_set(tiny, TEST, tmp_path / "test")
    first = fit_iti(context, settings)(test)[""]
    record = json.loads((context.folder / "iti.json").read_text("utf-8"))
    assert record["validation_questions"] == 5
    assert len(record["tried"]) == 2 * 2 * 2
    notes = read_record(context.folder / "notes.json")
    assert notes == {"chosen": record["chosen"]}
    assert record["chosen"]["brier"] == min(tried["brier"] for tried in record["tried"])
    # strength 0 scores as the model does, to rounding
    p = base_probs(context.data.table, "token")
    mask = np.isin(np.arange(len(TRAIN)), context.validation(5))
    assert record["tried"][0]["brier"] == pytest.approx(context.data.scores(p, ["brier"], mask)["brier"], abs=1e-5)
    monkeypatch.setattr(iti, "choose_intervention", lambda *_: pytest.fail("it was chosen before"))
    assert np.array_equal(fit_iti(context, settings)(test)[""].probs, first.probs)


def test_another_share_of_validation_questions_makes_another_choice_in_the_same_folder(
    tiny: Model, tmp_path: Path
) -> None:
    context, settings = context_of(tiny, tmp_path), ItiSettings(heads=(2,), alphas=(3.0,))
    for share, n in ((0.2, 8), (0.5, 20), (0.2, 8)):
        fit_iti(replace(context, common=replace(context.common, validation=share)), settings)
        assert json.loads((context.folder / "iti.json").read_text("utf-8"))["validation_questions"] == n


def test_another_division_of_the_questions_makes_another_choice(tiny: Model, tmp_path: Path) -> None:
    questions = tuple(replace(q, task=f"task {i % 3}") for i, q in enumerate(TRAIN))
    context, settings = context_of(tiny, tmp_path, questions), ItiSettings(heads=(2,), alphas=(3.0,))
    fit_iti(context, settings)
    first = read_record(context.folder / "iti.json")
    assert first["key"] == digest([context.train.states.manifest, "token", 0.2, 0]), "as earlier versions named it"
    fit_iti(replace(context, common=replace(context.common, stratified=False)), settings)
    assert read_record(context.folder / "iti.json")["key"] != first["key"]


# ---------------------------------------------------------------------------------------------------------- mistakes


def test_a_model_without_heads_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="scored in a row of its own"):
        context = context_of(make_model("mamba"), tmp_path)
    with pytest.raises(CoralError, match=r"'tiny-mamba' has no attention output projection .* ITI cannot be used"):
        fit_iti(context, ItiSettings())


def test_heads_that_do_not_divide_the_projection_are_named(tiny: Model, tmp_path: Path) -> None:
    context = context_of(tiny, tmp_path)
    odd = make_model("llama")
    odd.hf.config.num_attention_heads = 5
    with pytest.raises(CoralError, match=r"reads 32 columns, which 5 heads cannot share equally"):
        fit_iti(replace(context, model=lambda: odd), ItiSettings())


def test_too_few_options_are_refused(tiny: Model, tmp_path: Path) -> None:
    context = context_of(tiny, tmp_path, TRAIN[:10])
    with pytest.raises(
        CoralError, match=r"at least 10 right and 10 wrong options among the training questions. Got 8 right"
    ):
        fit_iti(context, ItiSettings())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": (3,)}, r"no option 'head'. Did you mean 'heads'"),
        ({"heads": (0,)}, r"heads must be at least 1. Got 0 instead"),
        ({"directions": ("mass",)}, r"Unknown directions 'mass'; use one of mean, probe"),
        ({"criterion": "ecee"}, r"Unknown criterion 'ecee'; use one of .*Did you mean 'ece'"),
        ({"questions": 0}, r"questions must be at least 1. Got 0 instead"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(CoralError, match=message):
        read_method(MethodEntry(kind="iti", **options))
