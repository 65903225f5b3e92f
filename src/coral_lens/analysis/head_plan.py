"""What an analysis of heads will need, before it starts: memory by counting, time by timing a few steps on random numbers."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import numpy as np
import torch

from coral_lens.analysis.heads import HEAD_MLP, STACK, STOPPING, HeadStore, blocks_of
from coral_lens.analysis.stacked import Stack, stack_bytes
from coral_lens.errors import CoralError
from coral_lens.mlp import MlpSettings

EPOCHS = 15
"""That a network is taken to train before it stops: a guess, and the estimate says so."""
STEPS = 12
"""That are timed."""


@dataclass(frozen=True)
class HeadShape:
    """How many heads of which size, and how many rows."""

    blocks: int
    heads: int
    head_dim: int
    rows: int
    """Options of all questions."""
    n_folds: int = 5

    @property
    def stack(self) -> int:
        """Heads in a stack: whole blocks."""
        return min(self.blocks, max(1, STACK // self.heads)) * self.heads


def shape_of(text: str, rows: int) -> HeadShape:
    """Return the shape of `30x32x128`: 30 blocks of 32 heads of 128 columns."""
    match = re.fullmatch(r"(\d{1,4})x(\d{1,4})x(\d{1,5})", text, re.ASCII)
    if match is None or "0" in match.groups() or rows < 100:
        raise CoralError(f"--shape must look like 30x32x128, with 100 rows or more. Got {text!r} and {rows} rows.")
    blocks, heads, head_dim = map(int, match.groups())
    return HeadShape(blocks, heads, head_dim, rows)


def shape_of_store(store: HeadStore) -> HeadShape:
    """Return the shape of the heads that a store holds."""
    blocks = blocks_of(store)
    rows, heads, head_dim = store.heads(blocks[0]).shape
    return HeadShape(len(blocks), heads, head_dim, rows)


@dataclass(frozen=True)
class HeadPlan:
    """What it will need."""

    networks: int
    stack: int
    memory: int
    """Bytes while a stack is trained."""
    disk: int
    """Bytes of a store with these heads, in half precision."""
    step: float
    """Seconds for one step of one network."""
    seconds: float
    most_seconds: float
    """If no network stopped before its last epoch."""


def plan_heads(shape: HeadShape, settings: MlpSettings = HEAD_MLP) -> HeadPlan:
    """Estimate memory and time on this machine, as busy as it is now."""
    networks = shape.blocks * shape.heads * shape.n_folds
    train = shape.rows * (1 - 1 / shape.n_folds) * (1 - STOPPING)
    step = time_step(shape, settings)
    epoch = networks * train / settings.batch_size * step
    return HeadPlan(
        networks=networks,
        stack=shape.stack,
        memory=stack_bytes(shape.stack, shape.rows, shape.head_dim, settings),
        disk=2 * shape.blocks * shape.heads * shape.head_dim * shape.rows,
        step=step,
        seconds=EPOCHS * epoch,
        most_seconds=settings.max_epochs * epoch,
    )


def time_step(shape: HeadShape, settings: MlpSettings) -> float:
    """Return the seconds that one step takes a network of a full stack."""
    rows = 4 * settings.batch_size
    rng = np.random.default_rng(0)
    z = torch.from_numpy(rng.normal(size=(shape.stack, rows, shape.head_dim)).astype(np.float32))
    stack = Stack(z, settings, seed=0)
    r = rng.normal(size=rows)
    stack.train_epoch(r, np.arange(rows), rng)  # the first steps also make their memory
    start = time.perf_counter()
    for _ in range(STEPS // 4):
        stack.train_epoch(r, np.arange(rows), rng)
    return (time.perf_counter() - start) / STEPS / shape.stack
