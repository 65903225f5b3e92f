"""The two networks of CCPS: the loss by hand, what they learn, and that nothing but the seed decides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from coral_lens.methods.ccps.contrastive import (
    Confidence,
    Examples,
    NetworkSettings,
    adapt_classifier,
    contrastive_loss,
    draw_pairs,
    fit_classifier,
    fit_embedding,
)

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = NetworkSettings(steps=150, learning_rate=3e-3)


def drawn(n: int = 400, *, sign: float = 1.0, seed: int = 0) -> Examples:
    """One option in five is right, and one column of six says which."""
    rng = np.random.default_rng(seed)
    y = (np.arange(n) % 5 == 0).astype(np.float64)
    z = rng.normal(size=(n, 6))
    z[:, 2] += sign * 3 * y
    return Examples(z, y)


def test_the_loss_worked_by_hand() -> None:
    one = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 4.0], [0.0, 0.5]])
    other = torch.tensor([[0.3, 0.4], [0.3, 0.4], [0.0, 0.0], [0.0, 0.5]])
    differ = torch.tensor([0.0, 1.0, 1.0, 0.0])
    # alike at 0.5: 0.25; unlike at 0.5 of margin 1: 0.25; unlike and far: 0; alike and equal: 0
    assert float(contrastive_loss(one, other, differ, margin=1.0)) == pytest.approx((0.25 + 0.25 + 0 + 0) / 4, abs=1e-5)


def test_half_of_the_pairs_differ_however_rare_right_options_are() -> None:
    y = np.zeros(1000)
    y[:10] = 1.0
    i, j = draw_pairs(y, 4000, np.random.default_rng(0))
    assert abs((y[i] != y[j]).mean() - 0.5) < 0.03
    assert abs(y[i].mean() - 0.5) < 0.03


@pytest.mark.parametrize(
    "settings", [QUICK, replace(QUICK, activation="relu", dropout=0.1), replace(QUICK, tune_embedding=True)]
)
def test_right_options_are_told_from_wrong_ones_on_rows_never_seen(settings: NetworkSettings) -> None:
    train, fresh = drawn(), drawn(seed=1)
    embedding = fit_embedding(train, settings, seed=0)
    before = [p.clone() for p in embedding.parameters()]
    confidence = fit_classifier(embedding, train, settings, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(before, embedding.parameters(), strict=True))
    p = confidence(fresh.z)
    right, wrong = p[fresh.y == 1], p[fresh.y == 0]
    assert (right[:, None] > wrong[None, :]).mean() > 0.95
    assert abs(p.mean() - 0.2) < 0.08, "rows are drawn as frequent as they are"


def test_only_the_seed_decides_and_not_the_global_generator() -> None:
    found = []
    for state in (1, 2):
        torch.manual_seed(state)
        np.random.seed(state)
        embedding = fit_embedding(drawn(), replace(QUICK, steps=20), seed=7)
        found.append(fit_classifier(embedding, drawn(), replace(QUICK, steps=20), seed=7)(drawn(seed=1).z))
    assert (found[0] == found[1]).all()
    other = fit_embedding(drawn(), replace(QUICK, steps=20), seed=8)
    assert not (fit_classifier(other, drawn(), replace(QUICK, steps=20), seed=8)(drawn(seed=1).z) == found[0]).all()


def test_adapting_moves_the_classifier_and_never_the_embedding() -> None:
    train = drawn()
    confidence = fit_classifier(fit_embedding(train, QUICK, seed=0), train, QUICK, seed=0)
    before = {name: t.clone() for name, t in confidence.tensors().items()}
    turned = drawn(sign=-1.0, seed=2)
    adapted = adapt_classifier(confidence, turned, replace(QUICK, tune_embedding=True), seed=0)
    assert all(torch.equal(before[name], t) for name, t in confidence.tensors().items())
    new = adapted.tensors()
    assert all(torch.equal(before[n], new[n]) for n in new if n.startswith("embedding"))
    fresh = drawn(sign=-1.0, seed=3)
    right = adapted(fresh.z)[fresh.y == 1].mean() - adapted(fresh.z)[fresh.y == 0].mean()
    assert right > confidence(fresh.z)[fresh.y == 1].mean() - confidence(fresh.z)[fresh.y == 0].mean()


def test_saved_networks_say_the_same() -> None:
    train = drawn()
    settings = replace(QUICK, steps=5, embedding=4, classifier=(10, 6))
    confidence = fit_classifier(fit_embedding(train, settings, seed=0), train, settings, seed=0)
    again = Confidence.from_tensors(confidence.tensors(), settings)
    assert (again(train.z) == confidence(train.z)).all()


def test_the_networks_have_the_papers_sizes() -> None:
    settings = NetworkSettings(steps=1)
    confidence = fit_classifier(fit_embedding(drawn(), settings, seed=0), drawn(), settings, seed=0)
    shapes = [tuple(t.shape) for name, t in confidence.tensors().items() if name.endswith("weight")]
    assert shapes == [(64, 6), (64, 64), (8, 64), (48, 8), (24, 48), (12, 24), (2, 12)]
