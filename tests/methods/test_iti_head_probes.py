"""Probes of all heads at once are those that scikit-learn fits one by one, and directions are what the paper says."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from coral_lens.methods.iti.head_probes import accuracies, class_weights, fit_probes, mean_difference, spreads, unit
from coral_lens.storage import arrays


def drawn(n: int = 300, n_heads: int = 7, dim: int = 5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Heads of very different scales, some of which know the answer; one option in four is right."""
    rng = np.random.default_rng(seed)
    y = (rng.random(n) < 0.25).astype(np.float64)
    states = rng.normal(size=(n, n_heads, dim)) * np.logspace(-2, 2, n_heads)[:, None]
    states[:, ::2, 0] += (np.logspace(-2, 2, n_heads)[::2]) * y[:, None] * 2
    states[:, 1] += 30.0  # a mean far from 0
    return states.astype(np.float32), y


@pytest.mark.parametrize("balanced", [False, True])
def test_every_head_is_fitted_as_scikit_learn_would_fit_it(balanced: bool) -> None:
    states, y = drawn()
    probes = fit_probes(states, y, class_weights(y, balanced=balanced))
    for head in range(states.shape[1]):
        own = LogisticRegression(class_weight="balanced" if balanced else None, tol=1e-12, max_iter=100_000)
        own.fit(states[:, head].astype(np.float64), y)
        np.testing.assert_allclose(probes.weights[head], own.coef_[0], rtol=2e-3, atol=2e-4)
        logits = own.decision_function(states[:, head].astype(np.float64))
        np.testing.assert_allclose(probes.logits(states)[:, head], logits, rtol=2e-3, atol=2e-3)


def test_options_that_can_be_told_apart_without_error_end_in_finite_weights() -> None:
    y = np.array([1.0] * 6 + [0.0] * 6)
    states = np.stack([y * 1e3, 1e3 * y - 5, np.zeros(12)], axis=1)[:, :, None].astype(np.float32)
    probes = fit_probes(states, y, np.ones(12))
    assert np.isfinite(probes.weights).all()
    assert probes.weights[2, 0] == 0.0
    assert accuracies(probes, states, y, np.ones(12)).tolist() == [1.0, 1.0, 0.5]


def test_rows_in_chunks_give_what_rows_at_once_give(monkeypatch: pytest.MonkeyPatch) -> None:
    states, y = drawn()
    whole = fit_probes(states, y, np.ones(len(y)))
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 8 * 7 * 6 * 11)
    np.testing.assert_allclose(fit_probes(states, y, np.ones(len(y))).weights, whole.weights, rtol=1e-7)


def test_balanced_accuracy_gives_nothing_for_calling_everything_wrong() -> None:
    y = np.array([1.0, 0.0, 0.0, 0.0])
    states = np.zeros((4, 1, 2), dtype=np.float32)
    plain, balanced = (class_weights(y, balanced=b) for b in (False, True))
    assert balanced.tolist() == [2.0, 2 / 3, 2 / 3, 2 / 3]
    always_wrong = fit_probes(states, y, plain)
    assert accuracies(always_wrong, states, y, plain).tolist() == [0.75]
    assert accuracies(always_wrong, states, y, balanced) == pytest.approx([0.5])


def test_directions_worked_by_hand() -> None:
    y = np.array([1.0, 0.0, 1.0, 0.0])
    states = np.array([[[4, 0]], [[0, 1]], [[2, 8]], [[0, -1]]], dtype=np.float32)  # one head
    shift = mean_difference(states, y)
    assert shift.tolist() == [[3.0, 4.0]]
    direction = unit(shift)
    np.testing.assert_allclose(direction, [[0.6, 0.8]])
    along = [2.4, 0.8, 7.6, -0.8]
    np.testing.assert_allclose(spreads(states, direction), [np.std(along)], rtol=1e-6)
    assert unit(np.zeros((1, 2))).tolist() == [[0.0, 0.0]]
