"""How long fits take, and how that grows with the questions.

    python bench/fits.py --store STORE --sizes 500 1000 2000 --lenses listwise ridge mlp

STORE is a folder of `coral extract` with enough questions and the layers to choose from. Each fit is whole: layer, setting,
strength, shift and tempering. Lenses and sizes take turns, round by round. Time is the processor's, of all threads together,
which busy neighbours change least; medians with their range, and that on the clock behind it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from coral_lens.engine.activations import ActivationStore, JoinedStore, Subset
from coral_lens.lens.fit import fit_store
from coral_lens.lens.settings import FitSettings


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[500, 1000, 2000])
    parser.add_argument("--lenses", nargs="+", default=["listwise", "ridge", "mlp"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    store = ActivationStore(args.store)
    print(
        f"{len(store.questions)} questions, {len(store.layers)} layers, {torch.get_num_threads()} threads, load of the machine "
        f"{os.getloadavg()[0]:.1f}"
    )
    parts = {n: JoinedStore([Subset(store, np.arange(len(store.questions)) < n)]) for n in args.sizes}
    taken: dict[tuple[str, int], list[tuple[float, float]]] = {(lens, n): [] for lens in args.lenses for n in parts}
    for _ in range(args.rounds):
        for (lens, n), rounds in taken.items():
            rounds.append(seconds_of_fit(parts[n], lens))
    print("| lens | questions | processor, s | times the first | on the clock, s |\n|---|---|---|---|---|")
    for (lens, n), rounds in taken.items():
        busy, clock = zip(*rounds, strict=True)
        first = statistics.median(b for b, _ in taken[lens, args.sizes[0]])
        print(f"| {lens} | {n:,} | {ranged(busy)} | {statistics.median(busy) / first:.1f} | {ranged(clock)} |")


def ranged(seconds: Sequence[float]) -> str:
    """Return the median with the least and the greatest."""
    return f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"


def seconds_of_fit(store: JoinedStore, lens: str) -> tuple[float, float]:
    """Return how long a whole fit takes: the processor's time, and that on the clock."""
    busy, clock = time.process_time(), time.perf_counter()
    fit_store(store, FitSettings(lens=lens))
    return time.process_time() - busy, time.perf_counter() - clock


if __name__ == "__main__":
    main()
