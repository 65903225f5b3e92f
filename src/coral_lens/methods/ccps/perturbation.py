"""CCPS's features: how steady the prediction of each answer token is when the state behind it is pushed (appendix B.2).

The state that is pushed is the one that the vocabulary head reads, so everything has a closed form: with z = W h + b
and u the direction, the logits at radius eps are z + eps * W u (soft-capped after, in Gemma). W h, W' g and W u are all that
is multiplied, whatever the number of radii. Full-vocabulary logits exist for a block of tokens at a time and are never kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.linalg import vecdot

from coral_lens.engine.batches import Batch
from coral_lens.engine.hooks import Site
from coral_lens.engine.readers import FINAL
from coral_lens.errors import CoralError

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


RADII = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
"""The paper's radii."""
RADIUS_SETS = ("all", "small", "large")
"""All radii; those up to 1; those from 1 on. Which set is used is chosen on validation questions."""
BORDER = 1.0

Push = Literal["down", "up"]
"""`down`: towards a lower probability of the token, as the original method pushes. `up`: the paper's sign, along the gradient of
log p; the token then becomes more probable, and PEI is 0 wherever that holds at every radius."""

STATE = ("logprob", "entropy", "margin", "norm")
SENSITIVITY = ("flip", "jacobian")
DIVERGENCES = ("kl", "js", "cosine")
STATISTICS = ("mean", "min", "max", "std")
"""Statistics of each feature over the tokens of an option."""


def radii_of(radius_set: str, radii: Sequence[float]) -> tuple[int, ...]:
    """Return the numbers of the radii that are in a set; all of them if none is."""
    inside = {
        "all": range(len(radii)),
        "small": [k for k, eps in enumerate(radii) if eps <= BORDER],
        "large": [k for k, eps in enumerate(radii) if eps >= BORDER],
    }[radius_set]
    return tuple(inside) or tuple(range(len(radii)))


def token_features(radii: Sequence[float]) -> list[str]:
    """Return the names of a token's features, in order; `kl.3` is of the radius number 3."""
    pei = [f"pei.{radius_set}" for radius_set in RADIUS_SETS]
    return [*STATE, *SENSITIVITY, *pei, *(f"{name}.{k}" for name in DIVERGENCES for k in range(len(radii)))]


def option_features(radii: Sequence[float]) -> list[str]:
    """Return the names of an option's features: every statistic of every token feature."""
    return [f"{name} {statistic}" for statistic in STATISTICS for name in token_features(radii)]


# ------------------------------------------------------------------------------------------------------ closed forms


@dataclass(frozen=True)
class Head:
    """The vocabulary head as arithmetic: logits = cap(factor (W h + b))."""

    weight: Float[Tensor, "vocabulary width"]
    bias: Float[Tensor, " vocabulary"] | None
    cap: float | None
    factor: float = 1.0

    def raw(self, states: Float[Tensor, "token width"]) -> Float[Tensor, "token vocabulary"]:
        """Return factor (W h + b), before the cap."""
        raw = nn.functional.linear(states.to(self.weight.dtype), self.weight, self.bias)
        return raw.to(working(self.weight.dtype)) * self.factor

    def along(self, directions: Float[Tensor, "token width"]) -> Float[Tensor, "token vocabulary"]:
        """Return factor W u: by how much raw logits grow for each step along a direction."""
        grown = nn.functional.linear(directions.to(self.weight.dtype), self.weight)
        return grown.to(working(self.weight.dtype)) * self.factor

    def capped(self, raw: Float[Tensor, "token vocabulary"]) -> Float[Tensor, "token vocabulary"]:
        """Return the logits."""
        return raw if self.cap is None else self.cap * torch.tanh(raw / self.cap)

    def slope(self, raw: Float[Tensor, "token vocabulary"]) -> Float[Tensor, "token vocabulary"]:
        """Return the derivative of the cap."""
        return torch.ones_like(raw) if self.cap is None else 1 - torch.tanh(raw / self.cap) ** 2


def working(dtype: torch.dtype) -> torch.dtype:
    """Return the type that sums over the vocabulary are made in: float32 unless the model is in float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def head_of(model: Model) -> Head:
    """Return the head of a model, which must be linear."""
    if not isinstance(model.head, nn.Linear):
        raise CoralError(
            f"The vocabulary head of {model.name!r} is a {type(model.head).__name__}, but CCPS needs a linear one: "
            "its perturbations have a closed form only there."
        )
    cap = getattr(model.hf.config.get_text_config(), "final_logit_softcapping", None)
    return Head(model.head.weight, model.head.bias, cap, model.logit_factor)


def jacobians(
    head: Head, raw: Float[Tensor, "token vocabulary"], targets: Int[Tensor, " token"]
) -> Float[Tensor, "token width"]:
    """Return the gradient of log p(t) with respect to the state: W_t - sum_v p_v W_v, each times the factor and the slope."""
    weights = -head.capped(raw).softmax(dim=-1)
    weights[torch.arange(len(targets)), targets] += 1.0
    return ((weights * head.slope(raw)).to(head.weight.dtype) @ head.weight).to(raw.dtype) * head.factor


def epsilon_to_flip(
    raw: Float[Tensor, "token vocabulary"], along: Float[Tensor, "token vocabulary"], *, largest: float
) -> Float[Tensor, " token"]:
    """Return the radius at which another token overtakes the most probable one, or `largest` if none does before.

    Raw logits are lines in the radius, and the cap keeps their order: the first crossing is exact, not scanned for.
    """
    top = raw.argmax(dim=-1, keepdim=True)
    behind, gaining = raw.gather(1, top) - raw, along - along.gather(1, top)
    crossing = torch.where(gaining > 0, behind / gaining, torch.inf)
    return crossing.min(dim=-1).values.clamp(max=largest)


def perturbation_features(
    head: Head,
    states: Float[Tensor, "token width"],
    targets: Int[Tensor, " token"],
    *,
    radii: Sequence[float] = RADII,
    push: Push = "down",
) -> Float[Tensor, "token feature"]:
    """Return the features of tokens whose predicting states are given, in the order of `token_features`."""
    raw = head.raw(states)
    logp = head.capped(raw).log_softmax(dim=-1)
    target_logp = logp.gather(1, targets[:, None])[:, 0]
    gradient = jacobians(head, raw, targets)
    size = gradient.norm(dim=-1)
    # a token that is certain has no gradient: it is then not moved at all
    uphill = gradient / size.clamp(min=torch.finfo(size.dtype).tiny)[:, None]
    along = head.along(uphill if push == "up" else -uphill)
    top = logp.topk(2, dim=-1).values
    p = logp.exp()
    columns = [target_logp, -(p * logp).sum(dim=-1), top[:, 0] - top[:, 1], states.to(raw.dtype).norm(dim=-1)]
    columns += [epsilon_to_flip(raw, along, largest=max(radii)), size]
    drops, by_radius = [], []
    for eps in radii:
        logq = head.capped(torch.add(raw, along, alpha=eps)).log_softmax(dim=-1)
        drops.append((target_logp - logq.gather(1, targets[:, None])[:, 0]).clamp(min=0.0))
        by_radius.append(divergences(p, logp, logq))
    columns += [torch.stack([drops[k] for k in radii_of(name, radii)]).mean(dim=0) for name in RADIUS_SETS]
    columns += [by_radius[k][i] for i in range(len(DIVERGENCES)) for k in range(len(radii))]
    return torch.stack(columns, dim=1)


def divergences(
    p: Float[Tensor, "token vocabulary"],
    logp: Float[Tensor, "token vocabulary"],
    logq: Float[Tensor, "token vocabulary"],
) -> tuple[Float[Tensor, " token"], Float[Tensor, " token"], Float[Tensor, " token"]]:
    """Return KL(p, q), the Jensen-Shannon divergence and the cosine of p and q; rounding below 0 is cut."""
    q = logq.exp()
    kl = vecdot(p, logp - logq)
    middle = (p + q).mul_(0.5).clamp_(min=torch.finfo(p.dtype).tiny).log_()
    js = 0.5 * (vecdot(p, logp - middle) + vecdot(q, logq - middle))
    cosine = vecdot(p, q) / (vecdot(p, p) * vecdot(q, q)).sqrt()
    return kl.clamp(min=0.0), js.clamp(min=0.0), cosine


# --------------------------------------------------------------------------------------------------------- the reader

TOKEN_ROWS = 16
"""Tokens whose logits are in memory at a time: few enough that a core's cache holds a part of them."""


@dataclass
class PerturbationFeatures:
    """Reads the features of every option: an engine.Reader.

    `take` gives `features` [option, feature] in float64, in the order of `option_features`: mean, minimum, maximum and
    standard deviation (over n, so 0 for a single token) of each feature over the option's tokens.
    """

    head: Head
    radii: tuple[float, ...] = RADII
    push: Push = "down"
    _read: tuple[Tensor, Batch] | None = field(default=None, repr=False)

    @property
    def sites(self) -> tuple[Site, ...]:
        return (FINAL,)

    def fresh(self) -> PerturbationFeatures:
        return PerturbationFeatures(self.head, self.radii, self.push)

    def read(self, site: Site, states: Tensor, batch: Batch) -> None:
        positions = states.reshape(-1, states.shape[-1])
        self._read = positions[batch.before_tokens.to(states.device)], batch

    def take(self) -> dict[str, Tensor]:
        assert self._read is not None, "nothing was read"
        (states, batch), self._read = self._read, None
        targets, device = batch.targets, self.head.weight.device
        parts = []
        for start in range(0, len(targets), TOKEN_ROWS):
            rows = slice(start, start + TOKEN_ROWS)
            chunk = states[rows].to(device), targets[rows].to(device)
            parts.append(perturbation_features(self.head, *chunk, radii=self.radii, push=self.push).double().cpu())
        return {"features": over_tokens(torch.cat(parts), batch.answer_offsets.diff())}


def over_tokens(
    features: Float[Tensor, "token feature"], lengths: Int[Tensor, " option"]
) -> Float[Tensor, "option statistic"]:
    """Return the statistics of the tokens of each option, side by side."""

    def reduced(values: Tensor, statistic: str) -> Tensor:
        return torch.segment_reduce(values, statistic, lengths=lengths, axis=0)

    mean = reduced(features, "mean")
    variance = reduced((features - mean.repeat_interleave(lengths, dim=0)) ** 2, "mean")
    return torch.cat([mean, reduced(features, "min"), reduced(features, "max"), variance.sqrt()], dim=1)
