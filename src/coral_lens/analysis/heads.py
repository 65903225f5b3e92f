"""Is the signal in a few heads or in many: a small network on every attention head, all heads and folds trained in stacks.

Each head's output before the projection, at the option's last token, predicts the residual (the paper's appendix on heads).
`plan_heads` says beforehand what that will need: memory by counting, time by timing a few steps on random numbers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float

from coral_lens.analysis.files import kept_arrays
from coral_lens.analysis.folds import Folded, described, fold_parts, identity_of
from coral_lens.analysis.scores import r2_draws, scores_from
from coral_lens.analysis.stacked import Stack, StackData, fit_stack, stack_bytes
from coral_lens.errors import CoralError
from coral_lens.lens.probes.mlp import MlpSettings
from coral_lens.lens.probes.standardise import fit_standardiser
from coral_lens.metrics.scores import Score, score_of
from coral_lens.records import Scored
from coral_lens.storage.progress import Bar, silent

HEAD_MLP = MlpSettings(hidden=(256, 128, 64, 32), batch_size=64, patience=5)
"""The paper's network for a head; where it is silent, as for the probe of a layer."""
STACK = 54
"""Heads in a stack: at most so many, in whole blocks; `bench/heads.py --sizes` times other sizes."""
STOPPING = 0.2
"""Share of a fold's training questions, by whole groups, that say when to stop."""
TOP = 48
"""Heads that the paper calls a reasonable target for an intervention."""
SIGNAL = 0.8
"""Share of the positive signal that `needed` heads hold."""
ABOVE = (0.05, 0.1)
"""Values of R2 above which the paper counts heads."""
EPOCHS = 15
"""Epochs that a network is taken to train before it stops: a guess, and the estimate says so."""
STEPS = 12
"""Steps that are timed for an estimate."""


@dataclass(frozen=True)
class HeadTraining:
    """How the network of each head is trained, and where."""

    settings: MlpSettings = HEAD_MLP
    device: str = "cpu"


@runtime_checkable
class HeadStore(Scored, Protocol):
    """Scored questions with the outputs of heads."""

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks whose heads can be read."""

    def heads(self, block: int) -> Float[np.ndarray, "row head head_dim"]:
        """Return what each head of a block puts out at the options' last tokens."""


@dataclass(frozen=True)
class HeadRow:
    """One head."""

    layer: int
    """Its block, numbered by the layer that the block puts out."""
    head: int
    r2: Score
    """Out of fold."""


@dataclass(frozen=True)
class HeadAnalysis:
    """Every head that a store holds."""

    model: str
    task: str
    n_questions: int
    rows: tuple[HeadRow, ...]
    mean: Score
    highest: float
    cumulative: list[float]
    """Share of the positive R2 in the best 1, 2, 3, ... heads."""
    needed: Score
    """Heads that hold 80 % of the positive signal."""
    needed_share: Score
    top_share: Score
    """The share of the positive signal in the best 48 heads, or in all if there are fewer."""
    clear: int
    """Heads whose interval lies above 0."""
    above: dict[str, int]
    """Heads whose R2 is above each of the values that the paper counts by: `0.05` and `0.1`."""


def analyse_heads(
    store: HeadStore,
    data: Folded,
    *,
    training: HeadTraining = HeadTraining(),  # noqa: B008  (frozen)
    work: Path | None = None,
    bar: Bar = silent,
) -> HeadAnalysis:
    """Train a network on every head of a store, five folds each; with `work` a killed analysis goes on where it was."""
    blocks = blocks_of(store)
    n_heads = store.heads(blocks[0]).shape[1]
    predicted, n_networks = [], len(blocks) * n_heads * data.n_folds
    identity = [*identity_of(store, data), asdict(training.settings)]
    with kept_arrays(work, identity) as journal, bar("training heads", n_networks, "networks") as advance:
        for stack in stacks(blocks, n_heads):
            kept = journal.load(list(stack))
            if kept is None:
                kept = {"r_hat": predict_heads(store, stack, data, training, advance)}
                journal.save(list(stack), kept)
            else:
                advance(len(kept["r_hat"]) * data.n_folds)
            predicted.append(kept["r_hat"])
    names = [(block, head) for block in blocks for head in range(n_heads)]
    draws = r2_draws(data.r, np.concatenate(predicted), data.table.options, data.groups)
    return summarise(store, names, draws)


def blocks_of(store: HeadStore) -> tuple[int, ...]:
    """Return the blocks whose heads a store holds, or name the command that makes one that has them."""
    if not store.blocks:
        raise CoralError(
            "The store holds no heads; make one that does: `coral extract TASK --out NEW_FOLDER --heads all`."
        )
    return store.blocks


def stacks(blocks: Sequence[int], n_heads: int) -> Iterator[tuple[int, ...]]:
    """Yield the blocks of each stack."""
    step = max(1, STACK // n_heads)
    for start in range(0, len(blocks), step):
        yield tuple(blocks[start : start + step])


def predict_heads(
    store: HeadStore,
    blocks: Sequence[int],
    data: Folded,
    training: HeadTraining,
    advance: Callable[[int], None] = lambda _: None,
) -> Float[np.ndarray, "head row"]:
    """Return what networks on these blocks' heads predict of every row, each out of its fold."""
    states = stacked_heads(store, blocks)
    r_hat = np.zeros(states.shape[:2])
    z = np.empty_like(states)  # written anew for each fold: with the raw states, all that is held of the rows
    for k in range(data.n_folds):
        train, stop, test = (
            np.flatnonzero(data.table.options.rows(mask)) for mask in fold_parts(data, k, share=STOPPING)
        )
        for raw, out in zip(states, z, strict=True):
            fit_standardiser(raw, train)(raw, out=out)
        stack = StackData(torch.from_numpy(z).to(training.device), data.r, train, stop, test)
        r_hat[:, test] = fit_stack(stack, training.settings, seed=k, on_done=advance).r_hat
    return r_hat


def stacked_heads(store: HeadStore, blocks: Sequence[int]) -> Float[np.ndarray, "head row head_dim"]:
    """Return the outputs of these blocks' heads, head by head; beside the whole, no more than one block is held."""
    first = store.heads(blocks[0])
    rows, n_heads, width = first.shape
    states = np.empty((len(blocks) * n_heads, rows, width), np.float32)
    states[:n_heads] = first.transpose(1, 0, 2)
    del first
    for i, block in enumerate(blocks[1:], start=1):
        states[i * n_heads : (i + 1) * n_heads] = store.heads(block).transpose(1, 0, 2)
    return states


# ------------------------------------------------------------------------------------------------------------- summary


def summarise(
    store: HeadStore, names: Sequence[tuple[int, int]], draws: Float[np.ndarray, "boot head"]
) -> HeadAnalysis:
    """Say how the signal is spread, from the R2 of all heads: first of the questions as they are, then of each resample."""
    rows = tuple(HeadRow(*name, r2) for name, r2 in zip(names, scores_from(draws), strict=True))
    shares = np.stack([cumulative_share(values) for values in draws])
    needed = np.array([heads_needed(share) for share in shares], dtype=np.float64)
    return HeadAnalysis(
        **described(store),
        rows=rows,
        mean=scores_from(draws.mean(axis=1, keepdims=True))[0],
        highest=float(draws[0].max()),
        cumulative=[float(x) for x in shares[0]],
        needed=with_interval(needed),
        needed_share=with_interval(needed / len(rows)),
        top_share=with_interval(shares[:, min(TOP, len(rows)) - 1]),
        clear=sum(row.r2.low > 0 for row in rows),
        above={f"{value:g}": int((draws[0] > value).sum()) for value in ABOVE},
    )


def with_interval(draws: Float[np.ndarray, " boot"]) -> Score:
    """Return the first draw with an interval about it: noise that is cut off at 0 moves a resample's share away from it."""
    return score_of(float(draws[0]), draws[1:], kind="gap")


def heads_needed(cumulative: Float[np.ndarray, " head"]) -> int:
    """Return how many of the best heads hold most of the positive signal; 0 if there is none."""
    return int(np.searchsorted(cumulative, SIGNAL - 1e-12)) + 1 if cumulative[-1] > 0 else 0


def cumulative_share(values: Float[np.ndarray, " head"]) -> Float[np.ndarray, " head"]:
    """Return the share of the positive signal in the best 1, 2, 3, ... heads; 0 everywhere if no head has any."""
    best_first = np.maximum(np.sort(values)[::-1], 0.0)
    total = best_first.sum()
    return np.cumsum(best_first) / total if total > 0 else best_first


# ----------------------------------------------------------------------------------------- what an analysis will need


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
    if match is None or 0 in map(int, match.groups()) or rows < 100:
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
    """The networks, memory, disk and time of an analysis."""

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
