"""Steering by features is the paper's formula, changes nothing at 0, and is tuned on validation questions alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.autoencoders import make_sae
from support.plain_passes import hook_counts, logprobs_of, options, plain_logprob, ragged_prompts, run
from support.questions import toy_questions

from coral_lens.engine.edits import AddDirection
from coral_lens.engine.extract import extract
from coral_lens.engine.hooks import Site
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Edited, Extraction
from coral_lens.errors import CoralError
from coral_lens.lens.rules import base_probs
from coral_lens.lens.settings import FitSettings
from coral_lens.methods.corrsteer import (
    CorrSteerSettings,
    Preferred,
    correlate_correctness,
    direction_of,
    fit_corrsteer,
)
from coral_lens.methods.entry import MethodEntry
from coral_lens.methods.interface import FitContext, QuestionSet
from coral_lens.methods.registry import read_method
from coral_lens.records import Question
from coral_lens.sae.autoencoder import Autoencoder
from coral_lens.sae.codes import Encoding, collect_codes
from coral_lens.sae.settings import Weighing
from coral_lens.sae.steer import SteerFeatures, Steering, best_by_size, settings_of, steering_of
from coral_lens.sae.sweep import Sweep, best_of, run_sweep

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 300 tokens, without timing the machine for the best size."""
    monkeypatch.setattr("coral_lens.engine.planned.choose_budget", lambda *_: 300)


# ----------------------------------------------------------------------------------------------------------- weights


def test_weights_are_those_worked_by_hand() -> None:
    """Feature 1 lowers accuracy when ablated, 2 raises ECE, 3 does both, 4 is harmful, 5 does nothing."""
    d_accuracy = {1: -0.02, 2: 0.01, 3: -0.01, 4: 0.03, 5: 0.0}
    d_ece = {1: -0.05, 2: 0.01, 3: 0.02, 4: -0.01, 5: 0.0}
    found = steering_of(d_accuracy, d_ece, Weighing(accuracy=1.0, calibration=2.0))
    # 1: 0.02; 2: 2 * 0.01; 3: 0.01 + 2 * 0.02 = 0.05; together 0.09
    assert found.features.tolist() == [3, 1, 2]
    torch.testing.assert_close(found.weights, torch.tensor([5.0, 2.0, 2.0]) / 9)
    torch.testing.assert_close(found.top(2).weights, torch.tensor([5.0, 2.0]) / 7)
    with pytest.raises(CoralError, match="None of the 2 ablated features is beneficial"):
        steering_of({4: 0.03, 5: 0.0}, {4: -0.01, 5: 0.0})


def test_settings_begin_with_no_steering_and_repeat_nothing() -> None:
    assert settings_of(120, (50, 100, 128, 200), (0.0, 1.0, 2.0)) == [
        (0, 0.0), (50, 1.0), (50, 2.0), (100, 1.0), (100, 2.0), (120, 1.0), (120, 2.0),
    ]  # fmt: skip
    assert best_by_size([(0, 0.0), (5, 1.0), (5, 2.0), (9, 1.0)], [0.1, 0.3, 0.2, 0.4], "brier") == [2, 3]
    assert best_by_size([(0, 0.0), (5, 1.0), (5, 2.0), (9, 1.0)], [0.1, 0.3, 0.2, 0.4], "accuracy") == [1, 3]


def test_a_criterion_that_does_not_exist_chooses_nothing() -> None:
    with pytest.raises(CoralError, match="auroc does not exist on the validation questions"):
        best_of([0.5, float("nan"), 0.7], "auroc")


# -------------------------------------------------------------------------------------------------------------- edit

STEERING = Steering(torch.tensor([7, 3, 20]), torch.tensor([0.5, 0.3, 0.2]))


def plainly_steered(sae: Autoencoder, states: torch.Tensor, gamma: float) -> torch.Tensor:
    """The paper's formula, feature by feature."""
    out = states.clone()
    for j, w in zip(STEERING.features.tolist(), STEERING.weights.tolist(), strict=True):
        f = (states @ sae.w_enc[:, j] + sae.b_enc[j]).relu()
        out += gamma * w * f[:, None] * sae.w_dec[j]
    return out


def test_steering_is_the_papers_formula_at_every_position(any_tiny: Model) -> None:
    sae, prompts, before = make_sae(2), ragged_prompts()[:4], hook_counts(any_tiny)
    found = logprobs_of(run(any_tiny, prompts, edits=[SteerFeatures(sae, STEERING, 1.5)]))
    site = Site("residual", 2)
    expected = [
        plain_logprob(any_tiny, context, option, {site: lambda s: plainly_steered(sae, s, 1.5)})
        for context, option in options(prompts)
    ]
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-3, rtol=1e-4)
    base = logprobs_of(run(any_tiny, prompts))
    assert torch.equal(logprobs_of(run(any_tiny, prompts, edits=[SteerFeatures(sae, STEERING, 0.0)])), base)
    assert hook_counts(any_tiny) == before


def test_a_sweep_gives_what_each_edit_gives_and_resumes(tmp_path: Path, tiny: Model) -> None:
    shots = "A worked example that all of them share, long enough to be kept. "
    questions = [Question(q.id, q.group, shots + q.text, q.options, q.answer) for q in toy_questions(9)]
    sae = make_sae(1)
    edits = [SteerFeatures(sae, STEERING, g) for g in (0.0, 1.0, 4.0)]
    what = Sweep(1, edits, [e.about for e in edits])
    found = run_sweep(tiny, questions, tmp_path / "sweep", what)
    assert np.array_equal(found.ablated[0], found.table.logprobs)
    for edit, row in zip(edits, found.ablated, strict=True):
        whole = extract(tiny, questions, tmp_path / f"{edit.gamma}", extraction=Extraction((), edited=edited(edit)))
        np.testing.assert_allclose(row, whole.table.logprobs, atol=1e-4)
    again = run_sweep(tiny, questions, tmp_path / "sweep", what)
    assert np.array_equal(again.ablated, found.ablated)
    with pytest.raises(CoralError, match="something else: variants is"):
        run_sweep(tiny, questions, tmp_path / "sweep", Sweep(1, edits[:2], [e.about for e in edits[:2]]))


def edited(edit: SteerFeatures) -> Edited:
    return Edited((edit,), edit.about)


# --------------------------------------------------------------------------------------------------------- CorrSteer

TRAIN, TEST = tuple(toy_questions(60, seed=1)), tuple(toy_questions(6, seed=2))


def context_of(model: Model, folder: Path) -> FitContext:
    def asked(questions: tuple[Question, ...], name: str) -> QuestionSet:
        states = extract(model, questions, folder / name, extraction=Extraction(layers=(1,)))
        return QuestionSet(name, states, lambda: questions)

    return FitContext(lambda: model, asked(TRAIN, "train"), FitSettings(), folder / "method")


def test_the_direction_is_the_mean_of_correct_samples_along_correlated_features(tmp_path: Path, tiny: Model) -> None:
    sae = make_sae(1)
    codes = collect_codes(tiny, TRAIN, tmp_path, Encoding(sae))
    preferred = {q.id: Preferred(0, is_answer=i % 3 == 0) for i, q in enumerate(TRAIN)}
    pearson, means = correlate_correctness(codes, preferred)
    dense = {codes.ids[c.question]: c.dense(sae.n_features)[0] for c in codes}
    x, y = np.stack([dense[q.id] for q in TRAIN]), np.array([preferred[q.id].is_answer for q in TRAIN])
    np.testing.assert_allclose(means, x[y].mean(axis=0), atol=1e-5)
    often = (x > 1e-4).sum(axis=0) >= 10
    r = np.array([np.corrcoef(x[:, j], y)[0, 1] if often[j] and x[:, j].std() > 0 else -1 for j in range(x.shape[1])])
    best = np.argsort(-r)[:3]
    expected = sum(means[j] * sae.w_dec[j].numpy() for j in best if r[j] > 0)
    np.testing.assert_allclose(direction_of(sae, pearson, means, 3).numpy(), expected, atol=1e-4)
    with pytest.raises(CoralError, match="Got 4 right of 60 training questions"):
        correlate_correctness(codes, {q.id: Preferred(0, is_answer=i < 4) for i, q in enumerate(TRAIN)})


def test_corrsteer_scores_test_questions_under_the_direction_it_chose(tmp_path: Path, tiny: Model) -> None:
    make_sae(1).save(tmp_path / "sae")
    settings = CorrSteerSettings(str(tmp_path / "sae"), features=(1, 3), alphas=(1.0,), criterion="accuracy")
    context = context_of(tiny, tmp_path)
    test = QuestionSet("test", extract(tiny, TEST, tmp_path / "test", extraction=Extraction(layers=(1,))), lambda: TEST)
    found = fit_corrsteer(context, settings)(test)[""]
    assert found.ids == tuple(q.id for q in TEST)
    (chosen,) = [json.loads(path.read_text("utf-8")) for path in tmp_path.rglob("corrsteer.json")]
    assert {one["alpha"] for one in chosen["tried"]} == {1.0}, "not to steer is tried where it is asked for"
    still = fit_corrsteer(context, CorrSteerSettings(str(tmp_path / "sae"), features=(1, 3), alphas=(0.0,)))(test)[""]
    nothing = Edited((AddDirection({Site("residual", 1): torch.zeros(32)}, 0.0, "all"),), {"nothing": True})
    base = extract(tiny, TEST, tmp_path / "base", extraction=Extraction((), edited=nothing)).table
    np.testing.assert_array_equal(still.probs, base_probs(base, "token"))


def test_corrsteer_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    with pytest.raises(CoralError, match="needs sae = FOLDER"):
        read_method(MethodEntry(kind="corrsteer"))
    with pytest.raises(CoralError, match="does not exist"):
        read_method(MethodEntry(kind="corrsteer", sae=str(tmp_path / "none")))
