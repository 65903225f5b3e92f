"""How long fits take, and how that grows with the questions.

    python bench/fits.py --store STORE --sizes 500 1000 2000 --lenses listwise ridge mlp

STORE is a folder of `coral extract` with enough questions and the layers to choose from. Each fit is whole: layer, setting,
strength, shift and tempering. Time is the processor's, of all threads together, which busy neighbours change least; that on the
clock stands behind it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
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
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    store = ActivationStore(args.store)
    print(
        f"{len(store.questions)} questions, {len(store.layers)} layers, {torch.get_num_threads()} threads, load of the machine "
        f"{os.getloadavg()[0]:.1f}"
    )
    for lens in args.lenses:
        medians = []
        for size in args.sizes:
            some = JoinedStore([Subset(store, np.arange(len(store.questions)) < size)])
            rounds = [seconds_of_fit(some, lens) for _ in range(args.rounds)]
            medians.append([statistics.median(seconds) for seconds in zip(*rounds, strict=True)])
        growth = ", ".join(
            f"{n:,}: {busy:.1f} s ({busy / medians[0][0]:.1f} times; {clock:.1f} s on the clock)"
            for n, (busy, clock) in zip(args.sizes, medians, strict=True)
        )
        print(f"{lens:<10} {growth}", flush=True)


def seconds_of_fit(store: JoinedStore, lens: str) -> tuple[float, float]:
    """Return how long a whole fit takes: the processor's time, and that on the clock."""
    busy, clock = time.process_time(), time.perf_counter()
    fit_store(store, FitSettings(lens=lens))
    return time.process_time() - busy, time.perf_counter() - clock


if __name__ == "__main__":
    main()
