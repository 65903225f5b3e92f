"""Is the signal in a few heads or in many: a small network on every attention head, all heads and folds trained in stacks.

Each head's output before the projection, at the option's last token, predicts the residual (the paper's appendix on heads).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load, save

from coral_lens.analysis.folds import Folded
from coral_lens.analysis.scores import r2_scores
from coral_lens.analysis.stacked import StackData, fit_stack
from coral_lens.errors import CoralError
from coral_lens.joined import Scored
from coral_lens.manifest import digest, digest_bytes, write_atomic
from coral_lens.metrics import Score
from coral_lens.mlp import MlpSettings
from coral_lens.probes import fit_standardiser
from coral_lens.progress import Bar, silent
from coral_lens.splits import rows_of, split_mask


@runtime_checkable
class HeadStore(Scored, Protocol):
    """Scored questions with the outputs of heads."""

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks whose heads can be read."""

    def heads(self, block: int) -> Float[np.ndarray, "row head head_dim"]:
        """Return what each head of a block puts out at the options' last tokens."""


HEAD_MLP = MlpSettings(hidden=(256, 128, 64, 32), batch_size=64, patience=5)
"""The paper's network for a head; where it is silent, as for the probe of a layer."""
STACK = 54
"""Heads in a stack: at most so many, in whole blocks; `bench/heads.py --sizes` times other sizes."""
STOPPING = 0.2
"""Share of a fold's training questions, by whole groups, that say when to stop."""
TOP = 48
"""Heads that the paper calls a reasonable target for an intervention."""
SIGNAL = 0.8


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
    mean: float
    highest: float
    cumulative: list[float]
    """Share of the positive R2 in the best 1, 2, 3, ... heads."""
    needed: int
    """Heads that hold 80 % of the positive signal."""
    needed_share: float
    top_share: float
    """Of the positive signal, in the best 48 heads, or in all if there are fewer."""
    clear: int
    """Heads whose interval lies above 0."""


def analyse_heads(
    store: HeadStore,
    data: Folded,
    *,
    settings: MlpSettings = HEAD_MLP,
    work: Path | None = None,
    bar: Bar = silent,
) -> HeadAnalysis:
    """Train a network on every head of a store, five folds each; with `work` a killed analysis goes on where it was."""
    blocks = blocks_of(store)
    n_heads = store.heads(blocks[0]).shape[1]
    found = []
    with bar("training heads", len(blocks) * n_heads * data.n_folds, "networks") as advance:
        for some in stacks(blocks, n_heads):
            kept = Kept(work, store, data, settings, some) if work else None
            r_hat = kept.load() if kept else None
            if r_hat is None:
                r_hat = predict_heads(store, some, data, settings, advance)
                if kept:
                    kept.save(r_hat)
            else:
                advance(len(r_hat) * data.n_folds)
            found.append(r_hat)
    names = [(block, head) for block in blocks for head in range(n_heads)]
    scores = r2_scores(data.r, np.concatenate(found), data.table.offsets)
    rows = tuple(HeadRow(layer, head, s) for (layer, head), s in zip(names, scores, strict=True))
    return summarise(store, rows)


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
    settings: MlpSettings,
    advance: Callable[[int], None] = lambda _: None,
) -> Float[np.ndarray, "head row"]:
    """Return what networks on these blocks' heads predict of every row, each out of its fold."""
    states = np.concatenate([store.heads(block) for block in blocks], axis=1)
    flat = states.reshape(len(states), -1)
    r_hat = np.zeros((states.shape[1], len(states)))
    for k in range(data.n_folds):
        train, stop, test = (rows_of(data.table.offsets, mask) for mask in fold_parts(data, k))
        z = fit_standardiser(flat[train])(flat).reshape(states.shape)
        stack = StackData(
            z=torch.from_numpy(np.ascontiguousarray(z.transpose(1, 0, 2))),
            r=data.r,
            train=np.flatnonzero(train),
            stop=np.flatnonzero(stop),
            test=np.flatnonzero(test),
        )
        r_hat[:, test] = fit_stack(stack, settings, seed=k, on_done=advance).r_hat
    return r_hat


def fold_parts(data: Folded, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which questions train, which say when to stop and which are predicted when fold k is held out."""
    others = np.flatnonzero(data.fold != k).tolist()
    stop = np.zeros(len(data.fold), dtype=bool)
    stop[others] = split_mask([data.questions[i] for i in others], fraction=STOPPING, seed=k)
    return (data.fold != k) & ~stop, stop, data.fold == k


class Kept:
    """The predictions of one stack on the disk, under a name that says all that they depend on."""

    def __init__(
        self, folder: Path, store: HeadStore, data: Folded, settings: MlpSettings, blocks: tuple[int, ...]
    ) -> None:
        inputs = [digest(store.manifest), digest_bytes(data.r.tobytes() + data.fold.tobytes()), asdict(settings)]
        self.path = folder / f"heads-{digest([*inputs, list(blocks)])[:16]}.safetensors"

    def load(self) -> Float[np.ndarray, "head row"] | None:
        """Return the predictions, or None if they are not there or damaged."""
        try:
            tensors = load(self.path.read_bytes())
            intact = digest_bytes(tensors["r_hat"].numpy().tobytes()) == bytes(tensors["sha256"].tolist()).decode()
        except (OSError, SafetensorError, KeyError, ValueError):
            return None
        return tensors["r_hat"].numpy() if intact else None

    def save(self, r_hat: Float[np.ndarray, "head row"]) -> None:
        """Write the predictions with their digest."""
        name = torch.tensor(list(digest_bytes(r_hat.tobytes()).encode()), dtype=torch.uint8)
        write_atomic(self.path, save({"r_hat": torch.from_numpy(r_hat), "sha256": name}))


# ------------------------------------------------------------------------------------------------------------- summary


def summarise(store: HeadStore, rows: tuple[HeadRow, ...]) -> HeadAnalysis:
    """Say how the signal is spread."""
    values = np.array([row.r2.value for row in rows])
    cumulative = cumulative_share(values)
    needed = int(np.searchsorted(cumulative, SIGNAL - 1e-12)) + 1 if cumulative[-1] > 0 else 0
    return HeadAnalysis(
        model=store.manifest["model"]["name"],
        task=" ".join(sorted({q.task for q in store.questions})),
        n_questions=len(store.questions),
        rows=rows,
        mean=float(values.mean()),
        highest=float(values.max()),
        cumulative=[float(x) for x in cumulative],
        needed=needed,
        needed_share=needed / len(rows),
        top_share=float(cumulative[min(TOP, len(rows)) - 1]),
        clear=sum(row.r2.low > 0 for row in rows),
    )


def cumulative_share(values: Float[np.ndarray, " head"]) -> Float[np.ndarray, " head"]:
    """Return the share of the positive signal in the best 1, 2, 3, ... heads; 0 everywhere if no head has any."""
    best_first = np.maximum(np.sort(values)[::-1], 0.0)
    total = best_first.sum()
    return np.cumsum(best_first) / total if total > 0 else best_first
