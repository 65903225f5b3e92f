"""Scoring alone and beside a busy program, with waiting threads that sleep (our default) and that spin (OpenMP's own).

    python bench/neighbours.py --data DIR

Each way of waiting has a process of its own with the model loaded; they take turns, alone and beside a program that keeps one
core busy. All rates are relative to what one thread does alone: that is what the free core of two allows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

WORKER = """
import sys, time
from pathlib import Path
import torch
import coral_lens
from coral_lens.engine.packing import plan_for
from coral_lens.engine.prompts import prepare
from coral_lens.engine.readers import PooledResidual
from coral_lens.engine.scoring import score

task, n, data, dtype, threads = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
torch.set_num_threads(threads)
model = coral_lens.load_model("smollm2", dtype=dtype)
questions = coral_lens.load_questions(task, coral_lens.TaskOptions(limit=n, data_dir=Path(data) if data else None))
prompts = prepare(questions, coral_lens.Style(), model).prompts
plan, reader = plan_for(prompts, token_budget=1024), PooledResidual(tuple(range(model.n_layers + 1)))

def round_():
    start = time.perf_counter()
    for _ in score(model, prompts, plan, readers=[reader]):
        pass
    return time.perf_counter() - start

round_()
print("ready", flush=True)
for _ in sys.stdin:
    print(round_(), flush=True)
"""
BUSY = "import numpy as np\na = np.random.rand(500, 500)\nwhile True:\n    a @ a"
WAYS = {"one thread": ("PASSIVE", 1), "threads that sleep": ("PASSIVE", 0), "threads that spin": ("ACTIVE", 0)}


class Worker:
    """A process that scores when it is told to."""

    def __init__(self, policy: str, arguments: list[str]) -> None:
        environment = {**os.environ, "OMP_WAIT_POLICY": policy}
        command = [sys.executable, "-c", WORKER, *arguments]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.read()

    def read(self) -> str:
        """Return the next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def seconds(self) -> float:
        """Let it score once."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.read())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="arc_challenge:validation")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--data", default="")
    args = parser.parse_args()
    cores = os.cpu_count() or 1
    print(f"{cores} cores, {args.dtype}, load of the machine {os.getloadavg()[0]:.1f}")
    workers = {
        name: Worker(policy, [args.task, str(args.questions), args.data, args.dtype, str(threads or cores)])
        for name, (policy, threads) in WAYS.items()
    }
    rates: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.rounds):
        alone = workers["one thread"].seconds()
        for place in ("alone", "beside a busy program"):
            busy = (
                subprocess.Popen([sys.executable, "-c", BUSY], env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
                if place != "alone"
                else None
            )
            for name, worker in workers.items():
                rates.setdefault((name, place), []).append(alone / worker.seconds())
            if busy:
                busy.kill()
                busy.wait()
    for (name, place), values in sorted(rates.items(), key=lambda item: item[0][1]):
        print(f"{name:<20} {place:<22} {statistics.median(values):5.2f} ({min(values):.2f} to {max(values):.2f})")
    for worker in workers.values():
        worker.process.kill()


if __name__ == "__main__":
    main()
