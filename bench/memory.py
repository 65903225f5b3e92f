"""Peak memory of an extraction with N questions and with several times as many: it must not grow with the number of questions.

The peak counts memory that has been freed and that the allocator keeps, in holes between what is in use; how much that is
differs from run to run. With glibc, both are told apart at the end.

python bench/memory.py --questions 200 --times 16
"""

from __future__ import annotations

import argparse
import ctypes
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
    parser.add_argument("--times", type=int, default=4, help="how many times as many questions the second run has")
    parser.add_argument("--child", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.model, args.task, args.child)
        return
    peaks = []
    for n in (args.questions, args.times * args.questions):
        command = [sys.executable, __file__, "--model", args.model, "--task", args.task, "--child", str(n)]
        peak, used, free = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
        peaks.append(peak)
        print(
            f"{n:6d} questions: peak {peak / 1024:,.0f} MiB; "
            f"at the end {used / 2**20:,.0f} MiB allocated and {free / 2**20:,.0f} MiB freed but kept",
            flush=True,
        )
    print(f"{args.times}N / N: {peaks[1] / peaks[0]:.3f}")


def child(name: str, task: str, n: int) -> None:
    """Extract n questions and print this process's peak resident memory in KiB, and the allocator's bytes."""
    from coral_lens.data.questions import load_questions
    from coral_lens.data.settings import TaskOptions
    from coral_lens.engine.extract import extract
    from coral_lens.engine.loading import load_model
    from coral_lens.engine.planned import Extraction, all_layers

    model = load_model(name)
    questions = load_questions(task, TaskOptions(limit=n))
    with tempfile.TemporaryDirectory() as folder:
        extract(model, questions, Path(folder), extraction=Extraction(layers=all_layers(model)))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, *allocated())


class MallInfo(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    )


def allocated() -> tuple[int, int]:
    """Return the bytes that are allocated and those that are freed but kept; zeros where the C library does not tell."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0, 0
    ask.restype = MallInfo
    found = ask()
    return found.uordblks + found.hblkhd, found.fordblks


if __name__ == "__main__":
    main()
