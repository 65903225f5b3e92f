"""Many small networks trained as one: weights side by side in a third dimension, one batched product for all of them.

Networks of a stack share rows, order, dropout masks and initial weights and differ in what they read: each ends as
`mlp.MlpTraining` would leave it alone, whatever stands beside it. One that has stopped is taken out. The gradient is written
out by hand: a product, a mask and a product back per layer need no graph, and their memory is used again. All of it happens
on the device of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from coral_lens.lens.probes.mlp import MlpSettings, adamw, initial_mlp

PREDICTED_ROWS = 1024
"""Rows that are predicted at a time."""


@dataclass(frozen=True)
class StackData:
    """What each network of a stack reads, row by row, and the residuals that all of them predict."""

    z: Float[Tensor, "member row width"]
    """Used up by a fit: members that go on move to the place of those that have stopped, without a copy of all."""
    r: Float[np.ndarray, " row"]
    train: Int[np.ndarray, " train"]
    stop: Int[np.ndarray, " stop"]
    """Rows whose loss says when to stop."""
    test: Int[np.ndarray, " test"]


@dataclass(frozen=True)
class StackFit:
    """Where each network was best by the rows that stop it."""

    r_hat: Float[np.ndarray, "member test"]
    epochs: Int[np.ndarray, " member"]
    """Epochs until it stopped."""


def fit_stack(
    data: StackData, settings: MlpSettings, *, seed: int, on_done: Callable[[int], None] | None = None
) -> StackFit:
    """Train a network for every member, each until its own loss on the rows that stop it has not fallen for a while."""
    n = len(data.z)
    stack = Stack(data.z, settings, seed=seed)
    best, stale = np.full(n, math.inf), np.zeros(n, dtype=np.int64)
    fit = StackFit(np.zeros((n, len(data.test))), np.zeros(n, dtype=np.int64))
    judged = np.concatenate([data.stop, data.test])
    target = data.r[data.stop]
    for epoch in range(settings.max_epochs):
        stack.train_epoch(data.r, data.train, np.random.default_rng([seed, epoch]))
        r_hat = stack.predict(judged)
        shown = r_hat[:, : len(target)]
        loss = ((target - shown) ** 2).mean(axis=1) + settings.output_penalty * (shown**2).mean(axis=1)
        alive = stack.alive
        better = loss < best[alive]
        best[alive[better]], stale[alive] = loss[better], np.where(better, 0, stale[alive] + 1)
        fit.r_hat[alive[better]] = r_hat[better, len(target) :]
        fit.epochs[alive] = epoch + 1
        going = np.isfinite(loss) & (stale[alive] < settings.patience)
        if on_done:
            on_done(int((~going).sum()))
        if not going.any():
            break
        stack.keep(going)
    else:
        if on_done:
            on_done(len(stack.alive))
    return fit


class Stack:
    """The networks that are still trained: `alive` numbers them among all."""

    def __init__(self, z: Float[Tensor, "member row width"], settings: MlpSettings, *, seed: int) -> None:
        self.settings, self.z, self.alive = settings, z, np.arange(len(z))
        network = initial_mlp(z.shape[2], settings, seed=seed).to(z.device)
        linear = [module for module in network if isinstance(module, nn.Linear)]
        # [member, in, out]: a batch of rows is then multiplied without a transpose
        self.weights = [m.weight.detach().T.repeat(len(z), 1, 1) for m in linear]
        self.biases = [m.bias.detach().repeat(len(z), 1, 1) for m in linear]
        self.optimiser = adamw([*self.weights, *self.biases], settings, z.device)
        self.start_gradients()

    def start_gradients(self) -> None:
        """Give every parameter the memory for its gradient."""
        for parameter in (*self.weights, *self.biases):
            parameter.grad = torch.empty_like(parameter)

    @torch.no_grad()
    def train_epoch(
        self, r: Float[np.ndarray, " row"], train: Int[np.ndarray, " train"], rng: np.random.Generator
    ) -> None:
        """Go once through the rows, in the order and under the masks that a network alone would draw."""
        order = rng.permutation(len(train))
        target = torch.from_numpy(r.astype(np.float32)).to(self.z.device)
        for start in range(0, len(order), self.settings.batch_size):
            rows = torch.from_numpy(train[order[start : start + self.settings.batch_size]]).to(self.z.device)
            self.backward(self.forward(self.z.index_select(1, rows), rng), target[rows])
            self.optimiser.step()

    def forward(self, h: Float[Tensor, "member batch width"], rng: np.random.Generator) -> list[Tensor]:
        """Return the input of every layer and the output, under one dropout mask for all members."""
        inputs = [h]
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            h = torch.baddbmm(bias, h, weight).relu_()
            if self.settings.dropout:
                draws = rng.integers(0, 2**16, size=tuple(h.shape[1:]), dtype=np.uint16)
                kept = (draws >= round(self.settings.dropout * 2**16)) * np.float32(self.scale)
                h.mul_(torch.from_numpy(kept).to(h.device))
            inputs.append(h)
        inputs.append(torch.baddbmm(self.biases[-1], h, self.weights[-1]).tanh_())
        return inputs

    @property
    def scale(self) -> float:
        """What dropout multiplies the values by that it keeps."""
        return 1.0 / (1.0 - self.settings.dropout)

    def backward(self, inputs: list[Tensor], target: Float[Tensor, " batch"]) -> None:
        """Write the gradient of each member's own loss (the paper's Eq. 3) to its parameters."""
        out = inputs[-1]
        penalty = self.settings.output_penalty
        slope = (2.0 / len(target)) * ((1.0 + penalty) * out - target[:, None]) * (1.0 - out**2)
        for i in range(len(self.weights) - 1, -1, -1):
            weight, bias, h = self.weights[i], self.biases[i], inputs[i]
            assert weight.grad is not None
            assert bias.grad is not None
            torch.bmm(h.transpose(1, 2), slope, out=weight.grad)
            torch.sum(slope, dim=1, keepdim=True, out=bias.grad)
            if i:
                # a value that ReLU or dropout put to 0 passes nothing on
                slope = torch.ops.aten.threshold_backward(torch.bmm(slope, weight.transpose(1, 2)), h, 0.0)
                if self.settings.dropout:
                    slope.mul_(self.scale)

    @torch.no_grad()
    def predict(self, rows: Int[np.ndarray, " chosen"]) -> Float[np.ndarray, "member chosen"]:
        """Return what each member predicts of these rows, without dropout."""
        chunks = []
        for start in range(0, len(rows), PREDICTED_ROWS):
            h = self.z.index_select(1, torch.from_numpy(rows[start : start + PREDICTED_ROWS]).to(self.z.device))
            for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
                h = torch.baddbmm(bias, h, weight).relu_()
            chunks.append(torch.baddbmm(self.biases[-1], h, self.weights[-1]).tanh_()[:, :, 0])
        return torch.cat(chunks, dim=1).cpu().double().numpy()

    def keep(self, going: np.ndarray) -> None:
        """Take out the members that have stopped."""
        if going.all():
            return
        at = torch.from_numpy(np.flatnonzero(going)).to(self.z.device)
        for i, j in enumerate(at.tolist()):
            if i < j:
                self.z[i].copy_(self.z[j])
        self.alive, self.z = self.alive[going], self.z[: len(at)]
        for parameter in (*self.weights, *self.biases):
            state = self.optimiser.state[parameter]
            parameter.data = parameter.data[at]
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name][at]
        self.start_gradients()


def stack_bytes(n: int, rows: int, width: int, settings: MlpSettings) -> int:
    """Return the memory of a stack: its rows twice (raw and standardised), its weights with gradients and two moments."""
    sizes = [width, *settings.hidden, 1]
    parameters = sum((before + 1) * after for before, after in pairwise(sizes))
    activations = max(settings.batch_size * 2, PREDICTED_ROWS) * 2 * max(sizes)
    return 4 * n * (2 * rows * width + 4 * parameters + activations)
