"""Early exit against full scoring: questions per second of the same questions, in turns, in one process.

    python bench/early_exit.py --data DIR

Full scoring is what `coral predict` does with an ordinary lens of the same layer: all blocks and the vocabulary head. The early
exit runs the blocks up to the layer and no head. Both pool the states of that layer. Ratios of the time on the wall and of the
processor's own time are printed, with their least and greatest round: on a busy machine the second is the one to read.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import TaskOptions
from coral_lens.engine.extract import score_questions
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Extraction
from coral_lens.records import Question


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tasks", nargs="+", default=["arc_challenge:validation", "hellaswag:validation"])
    parser.add_argument("--layers", nargs="+", type=int, default=None, help="by default at 40 % and two thirds")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", type=Path, default=None)
    args = parser.parse_args()
    model = load_model(args.model)
    layers = args.layers or [round(0.4 * model.n_layers), round(2 * model.n_layers / 3)]
    print(f"{args.model}, {torch.get_num_threads()} threads, load of the machine {os.getloadavg()[0]:.1f}")
    for task in args.tasks:
        questions = load_questions(task, TaskOptions(limit=args.questions, data_dir=args.data))
        for layer in layers:
            show_ratio(model, task, questions, layer, args.rounds)


def show_ratio(model: Model, task: str, questions: Sequence[Question], layer: int, rounds: int) -> None:
    """Print how many times as many questions per second the exit after a layer answers."""
    timed(model, questions, layer, exits=False)  # the budget is chosen, the model is warm
    pairs = [
        (timed(model, questions, layer, exits=False), timed(model, questions, layer, exits=True)) for _ in range(rounds)
    ]
    wall, processor = ([full[i] / early[i] for full, early in pairs] for i in (0, 1))
    rate = len(questions) / statistics.median(early[0] for _, early in pairs)
    print(
        f"{task:<26} layer {layer:>2} of {model.n_layers}: {spread(wall)} times by the wall, {spread(processor)} by the "
        f"processor; {rate:.1f} questions/s"
    )


def timed(model: Model, questions: Sequence[Question], layer: int, *, exits: bool) -> tuple[float, float]:
    """Return the seconds on the wall and of the processor that scoring takes."""
    wall, processor = time.perf_counter(), time.process_time()
    with score_questions(model, questions, Extraction(layers=(layer,), exits=exits)):
        return time.perf_counter() - wall, time.process_time() - processor


def spread(values: Sequence[float]) -> str:
    """Return the median with the least and the greatest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
