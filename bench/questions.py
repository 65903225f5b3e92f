"""How long a CSV file of questions takes to load, against pandas reading the same file, and how much memory beyond its questions.

Interleaved in one process, medians; the peak of memory by tracemalloc, in runs of their own.

python bench/questions.py --rows 100000
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from coral_lens.data.questions import load_questions

WORDS = (
    "the",
    "of",
    "and",
    "river",
    "mountain",
    "water",
    "light",
    "school",
    "green",
    "number",
    "history, of",
    "system",
)


def main() -> None:
    """Print both times, their ratio, and the memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "questions.csv"
        write_table(path, args.rows)
        times: dict[str, list[float]] = {"pandas": [], "coral-lens": []}
        for _ in range(args.repeats):
            times["pandas"].append(seconds(lambda: pd.read_csv(path)))
            times["coral-lens"].append(seconds(lambda: load_questions(path)))
        medians = {name: statistics.median(of) for name, of in times.items()}
        size = path.stat().st_size / 2**20
        print(f"{args.rows:,} rows, {size:.0f} MiB: " + ", ".join(f"{n} {1e3 * t:.0f} ms" for n, t in medians.items()))
        print(f"coral-lens / pandas: {medians['coral-lens'] / medians['pandas']:.1f}")
        for rows in (args.rows // 4, args.rows):
            write_table(path, rows)
            kept, peak = memory(path)
            print(
                f"{rows:,} rows: {kept / rows:.0f} bytes a question are kept, {(peak - kept) / rows:.0f} more at the peak"
            )


def write_table(path: Path, rows: int) -> None:
    """Write questions of four options; commas have some of their cells quoted."""
    rng = random.Random(0)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["id", "subject", "question", "A", "B", "C", "D", "answer"])
        for i in range(rows):
            options = [" ".join(rng.choices(WORDS, k=4)) for _ in range(4)]
            table.writerow(
                [f"q{i}", rng.choice(WORDS), " ".join(rng.choices(WORDS, k=14)), *options, rng.choice("ABCD")]
            )


def seconds(work: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    kept = work()
    taken = time.perf_counter() - start
    del kept
    return taken


def memory(path: Path) -> tuple[int, int]:
    """Return the bytes that the questions of a file take, and the peak on the way to them."""
    tracemalloc.start()
    questions = load_questions(path)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert questions
    return kept, peak


if __name__ == "__main__":
    main()
