"""The vocabulary head: log-probabilities of tokens without the logits of all the others ever existing as a whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

BLOCK = 2048
"""Words of the vocabulary whose logits are computed at a time: they are summed up while they are in the cache."""


@dataclass(frozen=True, slots=True)
class VocabularyHead:
    """The last layer of a model, which leads from normed states to logits."""

    layer: nn.Module
    cap: float | None
    """Beyond which no logit goes, for families that bend them towards it."""
    factor: float = 1.0
    """What the layer's output is multiplied by before that, in families that scale their logits."""

    def logits(self, states: Float[Tensor, "row width"]) -> Float[Tensor, "row token"]:
        """Return all logits, in float32."""
        return self._finished(self.layer(states).float())

    def log_probs(
        self, states: Float[Tensor, "row width"], rows: Int[Tensor, " target"], targets: Int[Tensor, " target"]
    ) -> Float[Tensor, " target"]:
        """Return the log-probability of each target token after the state of its row, in float32."""
        layer = self.layer
        if not isinstance(layer, nn.Linear):
            logits = self.logits(states)
            return logits[rows, targets] - logits.logsumexp(dim=-1)[rows]
        sums = [self._sum_block(layer, states, start) for start in range(0, layer.out_features, BLOCK)]
        return self._exact(layer, states, rows, targets) - torch.stack(sums).logsumexp(dim=0)[rows]

    def _sum_block(self, layer: nn.Linear, states: Tensor, start: int) -> Float[Tensor, " row"]:
        """Return the log of the summed exponentials of a block of logits.

        In half precision a logit of 20 is rounded by up to 0.06. That matters for the largest ones only, and a logit that
        outweighs all others is the largest of its block: that one is computed again, exactly.
        """
        weight, block = layer.weight, slice(start, start + BLOCK)
        bias = None if layer.bias is None else layer.bias[block].to(weight.dtype)
        logits = self._finished(nn.functional.linear(states.to(weight.dtype), weight[block], bias).float())
        if weight.dtype == torch.float32:
            return logits.logsumexp(dim=-1)
        largest, which = logits.max(dim=-1)
        total = logits.sub_(largest[:, None]).exp_().sum(dim=-1)
        exact = self._exact(layer, states, torch.arange(len(states), device=states.device), which + start)
        return largest + (total - 1 + (exact - largest).exp()).log()

    def _exact(self, layer: nn.Linear, states: Tensor, rows: Tensor, tokens: Tensor) -> Float[Tensor, " target"]:
        """Return the logits of tokens after the states of rows, one of each, added up in float32."""
        logits = (states[rows].float() * layer.weight[tokens].float()).sum(dim=-1)
        return self._finished(logits if layer.bias is None else logits + layer.bias[tokens].float())

    def _finished(self, logits: Tensor) -> Tensor:
        """Return the logits that the model makes of its layer's output."""
        logits = logits if self.factor == 1.0 else logits * self.factor
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)
