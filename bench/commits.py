"""Questions per second of this checkout relative to another one, in one run: python bench/commits.py --old DIR [--data DIR]

Each checkout has a process of its own with the model loaded. They take turns round by round, the order turning too, while the
other waits, and extract the states of all layers of the same questions into a folder of their own. Printed are the ratio of
each round (this one to the other) and their median.

    git worktree add /somewhere/old COMMIT
    python bench/commits.py --old /somewhere/old --task arc_challenge:validation --questions 100 --rounds 7
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import IO

WORKER = """
import inspect, sys, tempfile, time
from pathlib import Path
import coral_lens

task, n, data = sys.argv[1], int(sys.argv[2]), sys.argv[3]
model = coral_lens.load_model("smollm2")
questions = coral_lens.load_questions(task, coral_lens.TaskOptions(limit=n, data_dir=Path(data) if data else None))
extraction = coral_lens.Extraction(layers=tuple(range(model.n_layers + 1)))
# release 0.1 called it `what`
name = "what" if "what" in inspect.signature(coral_lens.extract).parameters else "extraction"

def round_():
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        coral_lens.extract(model, questions, Path(folder) / "store", **{name: extraction})
        return time.perf_counter() - start

round_()  # chooses the packing and the token budget
print("ready", flush=True)
for _ in sys.stdin:
    print(round_(), flush=True)
"""


class Worker:
    """A checkout that scores when it is told to."""

    def __init__(self, checkout: Path, arguments: list[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")}
        command = [sys.executable, "-c", WORKER, *arguments]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.out.readline().strip() == "ready"

    @property
    def out(self) -> IO[str]:
        """What it prints."""
        assert self.process.stdout is not None
        return self.process.stdout

    def seconds(self) -> float:
        """Return the time of one round."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return float(self.out.readline())


def main() -> None:
    """Take turns and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="another checkout of the project")
    parser.add_argument("--task", default="arc_challenge:validation")
    parser.add_argument("--data", default="")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    arguments = [args.task, str(args.questions), args.data]
    workers = {"old": Worker(args.old, arguments), "new": Worker(Path(__file__).parents[1], arguments)}
    ratios = []
    for i in range(args.rounds):
        order = ("old", "new") if i % 2 else ("new", "old")
        seconds = {name: workers[name].seconds() for name in order}
        ratios.append(seconds["old"] / seconds["new"])
        print(f"round {i + 1}: this checkout scores {ratios[-1]:.3f} times as many questions a second")
    print(
        f"median {statistics.median(ratios):.3f}, range {min(ratios):.3f} to {max(ratios):.3f}; load {os.getloadavg()}"
    )
    for worker in workers.values():
        worker.process.kill()


if __name__ == "__main__":
    main()
