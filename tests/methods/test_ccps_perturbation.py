"""CCPS's features in closed form are what autograd and a plain loop over tokens and radii give."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cosine, jensenshannon
from scipy.special import log_softmax
from scipy.stats import entropy
from support.models import make_model
from support.plain_passes import by_option, options, plain_states, ragged_prompts, run
from torch import Tensor, nn

from coral_lens.engine.hooks import Site
from coral_lens.engine.model import Model
from coral_lens.errors import CoralError
from coral_lens.methods.ccps.perturbation import (
    RADII,
    Head,
    PerturbationFeatures,
    Push,
    epsilon_to_flip,
    head_of,
    jacobians,
    option_features,
    perturbation_features,
    radii_of,
    token_features,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def drawn_head(*, bias: bool = False, cap: float | None = None, factor: float = 1.0) -> tuple[Head, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)
    weight = torch.randn(50, 12, generator=rng, dtype=torch.float64)
    states = torch.randn(9, 12, generator=rng, dtype=torch.float64)
    shift = torch.randn(50, generator=rng, dtype=torch.float64) if bias else None
    return Head(weight, shift, cap, factor), states, torch.randint(0, 50, (9,), generator=rng)


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize(("bias", "cap"), [(False, None), (True, None), (True, 3.0), (False, 30.0)])
def test_the_closed_form_of_the_jacobian_is_autograds(bias: bool, cap: float | None, factor: float) -> None:
    head, states, targets = drawn_head(bias=bias, cap=cap, factor=factor)
    leaf = states.clone().requires_grad_()
    logits = factor * nn.functional.linear(leaf, head.weight, head.bias)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logits.log_softmax(dim=-1)[torch.arange(9), targets].sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(jacobians(head, head.raw(states), targets), leaf.grad, rtol=1e-10, atol=1e-12)


# -------------------------------------------------------------------------------------------- against a plain loop


def plain_token(head: Head, h: np.ndarray, t: int, push: Push) -> dict[str, float]:
    """The features of one token, by definition, with the Jacobian from autograd and the flip from a fine scan."""
    weight = head.weight.double().numpy()
    shift = 0.0 if head.bias is None else head.bias.double().numpy()

    def logp(state: np.ndarray) -> np.ndarray:
        raw = head.factor * (weight @ state + shift)
        return log_softmax(raw if head.cap is None else head.cap * np.tanh(raw / head.cap))

    gradient = gradient_of(head, h, t)
    size = np.linalg.norm(gradient)
    towards = gradient / size * (1 if push == "up" else -1)
    base = logp(h)
    p, order = np.exp(base), np.sort(base)
    found = {"logprob": base[t], "entropy": entropy(p), "margin": order[-1] - order[-2], "norm": np.linalg.norm(h)}
    found |= {"jacobian": size, "flip": scanned_flip(lambda eps: int(logp(h + eps * towards).argmax()))}
    pushed = [logp(h + eps * towards) for eps in RADII]
    for which in ("all", "small", "large"):
        some = [
            k for k in range(len(RADII)) if which == "all" or (RADII[k] <= 1 if which == "small" else RADII[k] >= 1)
        ]
        found[f"pei.{which}"] = np.mean([max(0.0, base[t] - pushed[k][t]) for k in some])
    for k, other in enumerate(pushed):
        q = np.exp(other)
        found |= {
            f"kl.{k}": (p * (base - other)).sum(),
            f"js.{k}": jensenshannon(p, q) ** 2,
            f"cosine.{k}": 1 - cosine(p, q),
        }
    return found


def gradient_of(head: Head, h: np.ndarray, t: int) -> np.ndarray:
    leaf = torch.from_numpy(h).requires_grad_()
    raw = head.factor * nn.functional.linear(
        leaf, head.weight.double(), None if head.bias is None else head.bias.double()
    )
    logits = raw if head.cap is None else head.cap * torch.tanh(raw / head.cap)
    logits.log_softmax(dim=-1)[t].backward()
    assert leaf.grad is not None
    return leaf.grad.numpy()


def scanned_flip(winner: object) -> float:
    """Bisection between the last radius of a fine scan at which the first winner wins and the next."""
    grid = np.linspace(0, max(RADII), 4001)
    first = winner(0.0)  # type: ignore[operator]
    low = next((grid[i - 1] for i in range(1, len(grid)) if winner(grid[i]) != first), None)  # type: ignore[operator]
    if low is None:
        return max(RADII)
    high = low + grid[1]
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if winner(middle) == first else (low, middle)  # type: ignore[operator]
    return float(high)


@pytest.mark.parametrize("push", ["down", "up"])
@pytest.mark.parametrize(("bias", "cap", "factor"), [(True, None, 1.0), (False, 4.0, 1.0), (True, 4.0, 0.25)])
def test_features_of_tokens_are_those_of_a_plain_loop(push: Push, bias: bool, cap: float | None, factor: float) -> None:
    head, states, targets = drawn_head(bias=bias, cap=cap, factor=factor)
    found = perturbation_features(head, states, targets, push=push).numpy()
    for row, h, t in zip(found, states.numpy(), targets.tolist(), strict=True):
        expected = plain_token(head, h, t, push)
        assert set(expected) == set(token_features(RADII))
        np.testing.assert_allclose(row, [expected[n] for n in token_features(RADII)], rtol=1e-6, atol=1e-9)


def test_pushing_up_leaves_no_pei_where_the_token_only_gains() -> None:
    head, states, targets = drawn_head()
    up, down = (perturbation_features(head, states, targets, push=push) for push in ("up", "down"))
    at = token_features(RADII).index("pei.small")
    assert (up[:, at] == 0).all()
    assert (down[:, at] > 0).all()


def test_the_first_crossing_worked_by_hand() -> None:
    raw = torch.tensor([[3.0, 1.0, 0.0], [3.0, 1.0, 0.0], [2.0, 2.0, 0.0]])
    along = torch.tensor([[-1.0, 0.0, 0.5], [1.0, 0.0, 0.5], [0.0, 1.0, 0.0]])
    # 3 - e = 0.5 e and 3 - e = 1 cross at 2 and 2; nobody catches up; a tie flips at once
    assert epsilon_to_flip(raw, along, largest=20.0).tolist() == [2.0, 20.0, 0.0]


def test_a_token_that_is_certain_is_not_moved() -> None:
    head = Head(torch.eye(2, dtype=torch.float32), None, None)
    found = perturbation_features(head, torch.tensor([[1000.0, 0.0]]), torch.tensor([0]))
    assert found.isfinite().all()
    named = dict(zip(token_features(RADII), found[0].tolist(), strict=True))
    assert (named["logprob"], named["jacobian"], named["pei.all"], named["kl.7"]) == (0.0, 0.0, 0.0, 0.0)


def test_sets_of_radii() -> None:
    assert [radii_of(which, (0.1, 1.0, 5.0)) for which in ("all", "small", "large")] == [(0, 1, 2), (0, 1), (1, 2)]
    assert radii_of("small", (2.0, 5.0)) == (0, 1)


# -------------------------------------------------------------------------------------------------------- the reader


@cache
def family(name: str) -> Model:
    return make_model(name)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2-window", "gpt2"])
def test_features_of_options_are_statistics_over_the_tokens_of_plain_passes(name: str) -> None:
    model, prompts = family(name), ragged_prompts()[1:4]
    head = head_of(model)
    assert (head.cap is not None) == (name == "gemma2")
    batches = run(model, prompts, readers=[PerturbationFeatures(head)])
    found = by_option(batches, [scored.readings["features"] for scored in batches]).numpy()
    names = option_features(RADII)
    for row, (context, option) in zip(found, options(prompts), strict=True):
        states = plain_states(model, context, option, Site("final", 0))[len(context) - 1 : -1]
        tokens = perturbation_features(head, states, torch.tensor(option)).double().numpy()
        expected = np.concatenate([tokens.mean(axis=0), tokens.min(axis=0), tokens.max(axis=0), tokens.std(axis=0)])
        # the log-probabilities that a lens starts from are among them
        assert row[names.index("logprob mean")] == pytest.approx(expected[0], abs=1e-4)
        np.testing.assert_allclose(row, expected, rtol=2e-3, atol=2e-3)
    assert (found[:, names.index("norm std")] == 0).any(), "an option of one token has no spread"


def test_reading_in_blocks_gives_what_reading_at_once_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    from coral_lens.methods.ccps import perturbation

    model, prompts = family("llama"), ragged_prompts()
    whole = run(model, prompts, readers=[PerturbationFeatures(head_of(model))])
    monkeypatch.setattr(perturbation, "TOKEN_ROWS", 3)
    for one, other in zip(run(model, prompts, readers=[PerturbationFeatures(head_of(model))]), whole, strict=True):
        torch.testing.assert_close(one.readings["features"], other.readings["features"], rtol=1e-4, atol=1e-5)


def test_a_head_that_is_not_linear_is_refused() -> None:
    model = make_model("llama")
    object.__setattr__(model, "head", nn.Sequential(model.head))
    with pytest.raises(CoralError, match=r"head of 'tiny-llama' is a Sequential, but CCPS needs a linear one"):
        head_of(model)
