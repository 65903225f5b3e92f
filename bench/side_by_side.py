"""Two ways to use several cores: whole batches side by side, each on one thread (what the engine does), or one batch after the
other, every product divided over all threads. Prints the rate of the first relative to the second.

    python bench/side_by_side.py --data DIR --task arc_challenge --questions 100 --rounds 4

They take turns in one process, with the same batches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import Style, TaskOptions
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.packing import Plan, plan_for
from coral_lens.engine.prompts import prepare
from coral_lens.engine.readers import PooledResidual
from coral_lens.engine.scoring import score
from coral_lens.records import Prompt

BUDGETS = (512, 1024, 2048)


def main() -> None:
    """Time both ways in turns and print their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="arc_challenge:validation")
    parser.add_argument("--num-fewshot", type=int, default=None)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    model = load_model("smollm2", dtype=args.dtype)
    options = TaskOptions(limit=args.questions, data_dir=args.data, num_fewshot=args.num_fewshot)
    prompts = prepare(load_questions(args.task, options), Style(), model).prompts
    print(f"{args.task}, {args.dtype}, load of the machine {os.getloadavg()[0]:.1f}")
    for budget in BUDGETS:
        plan = plan_for(prompts, token_budget=budget)
        seconds_of(model, prompts, plan, divided=False)  # warm up
        turns = [
            (seconds_of(model, prompts, plan, divided=True), seconds_of(model, prompts, plan, divided=False))
            for _ in range(args.rounds)
        ]
        ratios = [divided / beside for divided, beside in turns]
        print(
            f"{torch.get_num_threads()} batches of {budget} tokens side by side: {statistics.median(ratios):.2f} times the "
            f"rate of one at a time ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def seconds_of(model: Model, prompts: Sequence[Prompt], plan: Plan, *, divided: bool) -> float:
    """Return how long it takes to score all batches; a plan of one batch is what the engine divides."""
    plans = [replace(plan, batches=(batch,)) for batch in plan.batches] if divided else [plan]
    start = time.perf_counter()
    for part in plans:
        for _ in score(
            model, prompts, part, readers=[PooledResidual(tuple(range(model.n_layers + 1)))], divide=divided
        ):
            pass
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
