"""What another arithmetic changes: answers, scores and a lens, on the same questions, and how much faster it is.

    python bench/precision.py --data DIR                                  SmolLM2, 1,000 questions of two tasks
    python bench/precision.py --model qwen-1.5b.gguf --tasks arc_challenge:test --precisions float32 int8

The first precision is what the others are compared with. A lens is fitted on states of the first precision and applied to the
states of each: that is what happens to a lens that is used in another arithmetic than its own. Times are those of scoring with
the states of one layer, batch by batch in turns; ratios are medians over batches with the middle half of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import Style, TaskOptions
from coral_lens.engine.activations import MemoryStore
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.packing import Plan
from coral_lens.engine.planned import Extraction, PlannedQuestions, plan_questions
from coral_lens.engine.scoring import TOKEN_BUDGET
from coral_lens.engine.shard_work import compute_shard
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit_store
from coral_lens.lens.rules import base_probs
from coral_lens.lens.settings import FitSettings
from coral_lens.metrics.scores import score
from coral_lens.records import Predictions, Question, predictions_of


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tasks", nargs="+", default=["arc_easy:test", "hellaswag:validation"])
    parser.add_argument("--train", default="arc_easy:train", help="what the lens is fitted on")
    parser.add_argument("--n-train", type=int, default=400)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--precisions", nargs="+", default=["float32", "mixed", "bfloat16", "int8"])
    parser.add_argument("--layer", type=int, default=None, help="of the lens; by default the middle one")
    parser.add_argument("--data", type=Path, default=None)
    args = parser.parse_args()

    models = {precision: load_model(args.model, dtype=precision) for precision in args.precisions}
    first = models[args.precisions[0]]
    extraction = Extraction((args.layer or first.n_layers // 2,), Style(), TOKEN_BUDGET, "tree")
    train = score_all({args.precisions[0]: first}, questions_of(args.train, args.n_train, args.data), extraction)
    lens = fit_store(train[args.precisions[0]].store, FitSettings(temper=False))
    print(f"{args.model}, {torch.get_num_threads()} threads, load of the machine {os.getloadavg()[0]:.1f}")
    for task in args.tasks:
        questions = questions_of(task, args.questions, args.data)
        scored = score_all(models, questions, extraction)
        print_task(f"{task}, {len(questions)} questions", scored, lens)


def questions_of(task: str, n: int, data: Path | None) -> list[Question]:
    """Load the first n questions of a task."""
    return load_questions(task, TaskOptions(limit=n, data_dir=data))


class Timed(NamedTuple):
    """Scores and states in one arithmetic, and the seconds that each batch took."""

    store: MemoryStore
    seconds: list[float]


def score_all(models: dict[str, Model], questions: Sequence[Question], extraction: Extraction) -> dict[str, Timed]:
    """Score questions in every arithmetic, batch by batch in turns."""
    planned = {name: plan_questions(model, questions, extraction) for name, model in models.items()}
    shards: dict[str, list[dict[str, torch.Tensor]]] = {name: [] for name in models}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    names = list(models)
    plan = next(iter(planned.values())).plan()
    for i, batch in enumerate(plan.batches):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            start = time.perf_counter()
            shards[name].append(compute_shard(planned[name], Plan((batch,), plan.packing), lambda _: None))
            seconds[name].append(time.perf_counter() - start)
    return {n: Timed(store_of(planned[n], shards[n]), seconds[n]) for n in names}


def store_of(planned: PlannedQuestions, shards: list[dict[str, torch.Tensor]]) -> MemoryStore:
    """Return what was scored as a store."""
    return MemoryStore(planned.manifest, planned.prepared.questions, shards)


def print_task(title: str, scored: dict[str, Timed], lens: Lens) -> None:
    """Print a table of what each arithmetic gives."""
    print(f"\n{title}")
    print(
        f"{'':<9} {'speed':>20} {'log-probs differ':>18} | {'base: acc':>9} {'ECE':>5} {'Brier':>6} {'flips':>5} | "
        f"{'lens: acc':>9} {'ECE':>5} {'Brier':>6} {'flips':>5} {'confidence moves':>17}"
    )
    names = list(scored)
    usual = scored[names[0]]
    usual_base, usual_lens = both(usual.store, lens)
    for name, timed in scored.items():
        ratios = [a / b for a, b in zip(usual.seconds, timed.seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        moved = np.abs(timed.store.table.logprobs - usual.store.table.logprobs)
        base, steered = both(timed.store, lens)
        confidence = np.abs(steered.options.max(steered.probs) - usual_lens.options.max(usual_lens.probs))
        print(
            f"{name:<9} {middle:5.2f} ({low:.2f} to {high:.2f}) {np.median(moved):8.3f}, {moved.max():7.3f} | "
            f"{line(base)} {flips(base, usual_base):5d} | {line(steered)} {flips(steered, usual_lens):5d} "
            f"{confidence.mean():8.4f}, {confidence.max():.3f}"
        )


def both(store: MemoryStore, lens: Lens) -> tuple[Predictions, Predictions]:
    """Return what the model says by itself, and with the lens."""
    return predictions_of("base", store, base_probs(store.table, "token")), lens.predictions_on(store)[lens.method]


def line(predictions: Predictions) -> str:
    """Return accuracy, ECE and Brier score, times 100."""
    accuracy, ece, brier = (100 * score(predictions, metric) for metric in ("accuracy", "ece", "brier"))
    return f"{accuracy:9.1f} {ece:5.1f} {brier:6.1f}"


def flips(one: Predictions, other: Predictions) -> int:
    """Return how many answers differ."""
    return int((one.options.top(one.probs) != other.options.top(other.probs)).sum())


if __name__ == "__main__":
    main()
