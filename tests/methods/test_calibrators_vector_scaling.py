"""Vector scaling agrees with a fit by automatic differentiation, stays put under a heavy weight, and refuses ragged options."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.questions import toy_questions

from coral_lens.data.settings import Style
from coral_lens.errors import CoralError
from coral_lens.methods.calibrators import VectorScaling, VectorSettings, fit_vector, refuse_ragged
from coral_lens.methods.entry import MethodEntry
from coral_lens.methods.registry import read_method
from coral_lens.records import Question


def planted(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of a model that prefers the first place and is too sure, and answers drawn from better ones."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, 4))
    true = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    answers = np.array([rng.choice(4, p=t) for t in true])
    seen = np.exp(2 * logits + [1.5, 0, 0, -0.5])
    return seen / seen.sum(axis=1, keepdims=True), answers


@pytest.mark.parametrize("weight", [0.0, 0.01, 0.3])
def test_the_fit_agrees_with_automatic_differentiation(weight: float) -> None:
    p, answers = planted(400, seed=1)
    found = fit_vector(p, answers, weight=weight)
    x = torch.tensor([1.0] * 4 + [0.0] * 4, dtype=torch.float64, requires_grad=True)
    logs, right = torch.tensor(np.log(p)), torch.tensor(answers)
    steps = torch.optim.LBFGS(
        [x], max_iter=500, tolerance_grad=1e-10, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def cost() -> torch.Tensor:
        steps.zero_grad()
        loss = torch.nn.functional.cross_entropy(x[:4] * logs + x[4:], right)
        loss = loss + weight * ((x[:4] - 1).square().sum() + x[4:].square().sum())
        loss.backward()
        return loss

    steps.step(cost)
    theirs = VectorScaling(x[:4].detach().numpy(), x[4:].detach().numpy())
    # without a weight a constant may be added to all biases: probabilities are what must agree
    assert np.allclose(found(p), theirs(p), atol=1e-5)


def test_it_finds_the_preference_for_a_place_and_the_overconfidence() -> None:
    p, answers = planted(4000, seed=2)
    found = fit_vector(p, answers, weight=1e-4)
    assert np.allclose(found.scale, 0.5, atol=0.08)
    assert np.allclose(found.bias - found.bias[1], [-0.75, 0.0, 0.0, 0.25], atol=0.2)


def test_a_heavy_weight_leaves_everything_as_it_is() -> None:
    p, answers = planted(100, seed=3)
    assert np.allclose(fit_vector(p, answers, weight=1e6)(p), p, atol=1e-5)


def test_a_probability_of_zero_stays_finite() -> None:
    p = np.array([[1.0, 0.0], [0.3, 0.7], [0.6, 0.4]])
    assert np.isfinite(fit_vector(p, np.array([1, 1, 0]), weight=0.01)(p)).all()


def test_ragged_options_are_refused_in_one_sentence() -> None:
    with pytest.raises(CoralError, match=r"question '0' has \d and '\d+' has \d; leave the method out"):
        refuse_ragged(toy_questions(10), Style(), VectorSettings())
    same = [Question(str(i), str(i), "Which?", ("a", "b", "c")) for i in range(3)]
    refuse_ragged(same, Style(), VectorSettings())


def test_its_option_is_checked() -> None:
    read = read_method(MethodEntry.model_validate({"kind": "vector-scaling", "weight": 0.1}))
    assert read == VectorSettings(0.1)
    with pytest.raises(CoralError, match="weight must be at least 0"):
        read_method(MethodEntry.model_validate({"kind": "vector-scaling", "weight": -1.0}))
    with pytest.raises(CoralError, match=r"no option 'wieght'. Did you mean 'weight'\?"):
        read_method(MethodEntry.model_validate({"kind": "vector-scaling", "wieght": 1.0}))
