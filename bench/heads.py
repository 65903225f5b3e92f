"""Speed of training a network per attention head: in stacks, one at a time, and in two single-threaded processes, in one run.

    python bench/heads.py --store STORE              made by `coral extract ... --heads all`
    python bench/heads.py --sizes 1 9 27 54 108      stacks of other sizes

All train the same networks on the same rows for the same number of epochs, so that they end with the same R2. Sizes are timed
first on a part of the epochs, and the best is compared. What bounds it: time is set against the machine's own
matrix multiplication of the same number of operations, and against what the optimiser's traffic to memory takes alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from coral_lens.analysis.folds import Folded, divide_into_folds
from coral_lens.analysis.heads import HEAD_MLP, fold_parts
from coral_lens.analysis.stacked import StackData, fit_stack
from coral_lens.engine.activations import ActivationStore, JoinedStore, first_questions
from coral_lens.lens.probes.mlp import LayerData, MlpSettings, MlpTraining
from coral_lens.lens.probes.standardise import fit_standardiser, r_squared


def main() -> None:
    """Time the sizes, then the three ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--heads", type=int, default=54)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folds", type=int, default=5, help="so many of the five are trained")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 9, 18, 27, 54])
    parser.add_argument("--half", type=int, default=None, help="train this half of the heads one by one, and stop")
    args = parser.parse_args()
    settings = replace(HEAD_MLP, max_epochs=args.epochs, patience=10**6)
    data, states = heads_of(args.store, args.heads, args.questions)
    if args.half is not None:
        half = states[:, args.half :: 2]
        print("ready", flush=True)
        sys.stdin.readline()
        one_by_one(data, half, settings, args.folds)
        print("done", flush=True)
        return
    print(f"{states.shape[1]} heads of {states.shape[2]} columns, {len(data.fold)} questions, {len(states)} rows, "
          f"{args.epochs} epochs, {torch.get_num_threads()} threads", flush=True)  # fmt: skip
    best = time_sizes(data, states, settings, args.sizes)
    compare(data, states, settings, best, args)
    bounds(states, settings, data, best)


def heads_of(folder: Path, n_heads: int, n_questions: int) -> tuple[Folded, np.ndarray]:
    """Return questions in folds and the outputs [row, head, column] of so many heads, from blocks spread over the model."""
    store = JoinedStore([first_questions(ActivationStore(folder), n_questions)])
    per_block = store.heads(store.blocks[0]).shape[1]
    n = -(-n_heads // per_block)
    blocks = [store.blocks[i] for i in np.linspace(0, len(store.blocks) - 1, n).round().astype(int)]
    states = np.concatenate([store.heads(block) for block in blocks], axis=1)[:, :n_heads]
    return divide_into_folds(store), states


def stacked(
    data: Folded, states: np.ndarray, settings: MlpSettings, size: int, n_folds: int
) -> tuple[float, np.ndarray]:
    """Train all heads in stacks; return the seconds and what every row is predicted."""
    r_hat = np.zeros((states.shape[1], len(states)))
    start = time.perf_counter()
    for first in range(0, states.shape[1], size):
        some = states[:, first : first + size]
        for k in range(n_folds):
            rows, z = standardised(data, some, k)
            stack = StackData(torch.from_numpy(np.ascontiguousarray(z.transpose(1, 0, 2))), data.r, *rows)
            r_hat[first : first + size, rows[2]] = fit_stack(stack, settings, seed=k).r_hat
    return time.perf_counter() - start, r_hat


def one_by_one(data: Folded, states: np.ndarray, settings: MlpSettings, n_folds: int) -> tuple[float, np.ndarray]:
    """Train every head by itself, as the probe of a layer is trained."""
    r_hat = np.zeros((states.shape[1], len(states)))
    start = time.perf_counter()
    for k in range(n_folds):
        (train, stop, test), z = standardised(data, states, k)
        for head in range(states.shape[1]):
            mine = np.ascontiguousarray(z[:, head])
            training = MlpTraining(mine.shape[1], settings, seed=k)
            training.advance(LayerData(mine[train], data.r[train], mine[stop], data.r[stop]), settings.max_epochs)
            r_hat[head, test] = training.probe().predict(mine[test])
    return time.perf_counter() - start, r_hat


def standardised(data: Folded, states: np.ndarray, k: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Return the rows that train, stop and are predicted, and the states standardised by those that train."""
    rows = tuple(np.flatnonzero(data.table.options.rows(mask)) for mask in fold_parts(data, k))
    flat = states.reshape(len(states), -1)
    return rows, fit_standardiser(flat[rows[0]])(flat).reshape(states.shape)


def two_processes(args: argparse.Namespace) -> float:
    """Train half of the heads in each of two processes of one thread; return the seconds, without their start."""
    command = [sys.executable, __file__, "--store", str(args.store), "--heads", str(args.heads), "--folds", str(args.folds),
               "--questions", str(args.questions), "--epochs", str(args.epochs)]  # fmt: skip
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(
            [*command, "--half", str(i)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=alone
        )
        for i in (0, 1)
    ]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    start = time.perf_counter()
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
    seconds = time.perf_counter() - start
    assert [process.wait() for process in both] == [0, 0]
    return seconds


def time_sizes(data: Folded, states: np.ndarray, settings: MlpSettings, sizes: list[int]) -> int:
    """Time stacks of every size in turns on one fold and one epoch, and return the fastest size."""
    short = replace(settings, max_epochs=1)
    rounds = [{size: stacked(data, states, short, size, 1)[0] for size in sizes} for _ in range(3)]
    medians = {size: statistics.median(r[size] for r in rounds[1:]) for size in sizes}
    for size, seconds in medians.items():
        print(f"stacks of {size:3}: {seconds:6.2f} s for one epoch of one fold", flush=True)
    return min(medians, key=lambda size: medians[size])


def compare(data: Folded, states: np.ndarray, settings: MlpSettings, size: int, args: argparse.Namespace) -> None:
    """Train everything in the three ways and print times, ratios and mean R2."""
    in_stacks, r_hat = stacked(data, states, settings, size, args.folds)
    alone, r_alone = one_by_one(data, states, settings, args.folds)
    processes = two_processes(args)
    done = data.row_fold < args.folds
    ours, theirs = (np.mean([r_squared(data.r[done], one[done]) for one in r]) for r in (r_hat, r_alone))
    print(f"stacks of {size}: {in_stacks:.1f} s, mean R2 {ours:.4f}")
    print(
        f"one at a time: {alone:.1f} s, mean R2 {theirs:.4f} (differs by {abs(ours - theirs):.1e}): {alone / in_stacks:.2f} times"
    )
    print(f"two processes of one thread: {processes:.1f} s: {processes / in_stacks:.2f} times", flush=True)


def bounds(states: np.ndarray, settings: MlpSettings, data: Folded, size: int) -> None:
    """Print what a step of a stack takes, what its products alone would take, and what the optimiser takes."""
    width, batch = states.shape[2], settings.batch_size
    sizes = [width, *settings.hidden, 1]
    z = torch.randn(size, 4 * batch, width)
    rows = np.arange(4 * batch)
    stack = StackData(z, np.random.default_rng(0).normal(size=4 * batch) * 0.3, rows, rows[:8], rows[:8])
    step = timed(lambda: fit_stack(stack, replace(settings, max_epochs=5), seed=0)) / 20
    pairs = list(pairwise(sizes))
    inputs = [(torch.randn(size, batch, a), torch.randn(size, a, b), torch.randn(size, batch, b)) for a, b in pairs]

    def products() -> None:
        for i, (h, weight, slope) in enumerate(inputs):
            torch.bmm(h, weight)
            torch.bmm(h.transpose(1, 2), slope)
            if i:
                torch.bmm(slope, weight.transpose(1, 2))

    weights = [torch.randn(size, a + 1, b) for a, b in pairs]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimiser = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    work = 2 * size * batch * sum((3 if i else 2) * a * b for i, (a, b) in enumerate(pairs))
    one, two = torch.randn(1024, 1024), torch.randn(1024, 1024)
    speed = 2 * 1024**3 / timed(lambda: one @ two)
    moved = 7 * 4 * sum(w.numel() for w in weights)
    multiply, update = timed(products), timed(optimiser.step)
    print(f"a step of a stack of {size}: {1e3 * step:.2f} ms, the rest of it masks, tanh, gathering rows and judging")
    print(
        f"its products alone: {1e3 * multiply:.2f} ms, {work / multiply / 1e9:.0f} GFLOP/s (large ones {speed / 1e9:.0f})"
    )
    print(f"its optimiser alone: {1e3 * update:.2f} ms, {moved / update / 1e9:.1f} GB/s")


def timed(work: object) -> float:
    """Return the median seconds of seven calls."""
    assert callable(work)
    work()
    found = []
    for _ in range(7):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


if __name__ == "__main__":
    main()
