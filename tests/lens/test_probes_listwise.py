"""The listwise lens minimises the cross-entropy of whole questions, and never rules an option out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from support.questions import toy_questions

from coral_lens.lens.fit import fit
from coral_lens.lens.folder import load_lens
from coral_lens.lens.probes.listwise import fit_listwise_path
from coral_lens.lens.rules import tilt
from coral_lens.lens.settings import FitSettings
from coral_lens.ragged import Options


def planted(n: int, *, width: int = 6, seed: int = 0, signal: float = 2.0):
    """Questions of two to five options whose answer is drawn from softmax(log p / 2 + signal * z[0])."""
    rng = np.random.default_rng(seed)
    options = Options.of_sizes(rng.integers(2, 6, size=n).tolist())
    z = rng.normal(size=(options.n_rows, width)).astype(np.float32)
    p = options.softmax(rng.normal(size=options.n_rows) * 2)
    truth = options.softmax(0.5 * np.log(p) + signal * z[:, 0])
    answers = np.array([rng.choice(b - a, p=truth[a:b]) for a, b in pairwise(options.edges)])
    return z, p, options, answers, truth


def test_a_planted_direction_and_base_weight_are_found() -> None:
    z, p, options, answers, truth = planted(4000)
    (fit_,) = fit_listwise_path(z, p, options, answers, decays=(1e-4,))
    weight = fit_.probe.weight  # type: ignore[attr-defined]
    assert weight[0] == pytest.approx(2.0, abs=0.15)
    assert np.abs(weight[1:]).max() < 0.1
    assert fit_.base_weight == pytest.approx(0.5, abs=0.07)
    found = tilt(fit_.base_weight * np.log(p), z @ weight, options, gamma=1.0)
    assert np.abs(found - truth).mean() < 0.02


def test_two_options_are_a_logistic_regression_on_differences() -> None:
    rng = np.random.default_rng(1)
    n, width, decay = 300, 4, 0.05
    z = rng.normal(size=(2 * n, width)).astype(np.float32)
    options = Options.of_sizes([2] * n)
    p = np.full(2 * n, 0.5)
    answers = (rng.random(n) < 1 / (1 + np.exp(-1.5 * (z[1::2, 0] - z[::2, 0])))).astype(np.int64)
    (ours,) = fit_listwise_path(z, p, options, answers, decays=(decay,))
    reference = LogisticRegression(C=1 / (decay * n), fit_intercept=False, tol=1e-8, max_iter=1000)
    reference.fit(z[1::2] - z[::2], answers)
    assert ours.probe.weight == pytest.approx(reference.coef_[0], abs=2e-3)


def test_stronger_decay_gives_smaller_weights() -> None:
    z, p, options, answers, _ = planted(300)
    norms = [float(np.linalg.norm(f.probe.weight)) for f in fit_listwise_path(z, p, options, answers)]
    assert norms == sorted(norms)


def test_centring_leaves_no_mean_within_a_question_and_no_effect_on_a_linear_score() -> None:
    z, p, options, _, _ = planted(50)
    centred = options.centre(z)
    means = np.add.reduceat(centred, options.starts, axis=0)
    assert np.abs(means).max() < 1e-5
    weight = np.arange(6.0)
    a, b = (tilt(np.log(p), x.astype(np.float64) @ weight, options, gamma=1.0) for x in (z, centred))
    assert a == pytest.approx(b, abs=1e-5)


@given(st.integers(0, 10_000), st.floats(0, 3), st.floats(0, 5))
def test_probabilities_sum_to_one_and_gamma_zero_is_temperature(seed: int, gamma: float, base_weight: float) -> None:
    z, p, options, _, _ = planted(5, seed=seed)
    base, scores = base_weight * np.log(p), z[:, 0].astype(np.float64)
    probs = tilt(base, scores, options, gamma=gamma)
    assert (probs > 0).all()
    assert np.add.reduceat(probs, options.starts) == pytest.approx(np.ones(5))
    still = tilt(base, scores, options, gamma=0.0)
    assert still == pytest.approx(options.softmax(base))


def test_a_saved_listwise_lens_answers_alike(tiny, tmp_path) -> None:
    lens = fit(tiny, toy_questions(24), FitSettings(lens="listwise", layers=(1, 2)))
    lens.save(tmp_path / "lens")
    new = toy_questions(5, seed=9)
    assert load_lens(tmp_path / "lens").predict(tiny, new) == lens.predict(tiny, new)
    assert (lens.plain_method, lens.method) == ("listwise", "listwise tempered")
    assert "listwise" in (tmp_path / "lens" / "README.md").read_text()
