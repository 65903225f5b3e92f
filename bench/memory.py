"""Peak memory of an extraction with N and with 4N questions: it must not grow with the number of questions.

python bench/memory.py --questions 200
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Run an extraction of each size in a process of its own and print the peaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--task", default="commonsense_qa_cloze:validation")
    parser.add_argument("--questions", type=int, default=250)
    parser.add_argument("--child", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.model, args.task, args.child)
        return
    peaks = []
    for n in (args.questions, 4 * args.questions):
        command = [sys.executable, __file__, "--model", args.model, "--task", args.task, "--child", str(n)]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print(f"{n:6d} questions: peak {peaks[-1] / 1024:,.0f} MiB")
    print(f"4N / N: {peaks[1] / peaks[0]:.3f}")


def child(name: str, task: str, n: int) -> None:
    """Extract n questions and print this process's peak resident memory in KiB."""
    from coral_lens.loading import load_model
    from coral_lens.questions import load_questions
    from coral_lens.store import Extraction, all_layers, extract
    from coral_lens.tasks import TaskOptions

    model = load_model(name)
    questions = load_questions(task, TaskOptions(limit=n))
    with tempfile.TemporaryDirectory() as folder:
        extract(model, questions, Path(folder), what=Extraction(layers=all_layers(model)))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


if __name__ == "__main__":
    main()
