"""Where scoring time goes: the share of each operator, the matrix-multiply rate at the model's own shapes relative to that
of a large square, and the rate at several token budgets relative to the default.

python bench/profile_scoring.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from scoring import matmul_rate
from torch import nn
from torch.profiler import ProfilerActivity, profile

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import Style, TaskOptions
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.packing import plan_for
from coral_lens.engine.prompts import prepare
from coral_lens.engine.readers import PooledResidual
from coral_lens.engine.scoring import TOKEN_BUDGET, score
from coral_lens.records import Prompt

BUDGETS = (512, 1024, TOKEN_BUDGET, 4096)


def main() -> None:
    """Profile one run, then time the budgets in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="arc_challenge:validation")
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one-core", action="store_true", help="one thread, for a machine that others use too")
    args = parser.parse_args()
    if args.one_core:
        torch.set_num_threads(1)
    model = load_model("smollm2")
    prompts = prepare(load_questions(args.task, TaskOptions(limit=args.questions)), Style(), model).prompts
    run(model, prompts, TOKEN_BUDGET)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run(model, prompts, TOKEN_BUDGET)
    operators = sorted(found.key_averages(), key=lambda o: -o.self_cpu_time_total)
    total = sum(o.self_cpu_time_total for o in operators)
    for operator in operators[:12]:
        print(f"{operator.key:<50} {operator.self_cpu_time_total / total:6.1%}")
    print_shapes(model)
    ratios: dict[int, list[float]] = {budget: [] for budget in BUDGETS}
    for _ in range(args.rounds):
        times = {budget: run(model, prompts, budget) for budget in BUDGETS}
        for budget in BUDGETS:
            ratios[budget].append(times[TOKEN_BUDGET] / times[budget])
    for budget, values in ratios.items():
        print(f"{budget:5d} tokens a batch: {statistics.median(values):.2f} times the rate at {TOKEN_BUDGET}")


def print_shapes(model: Model) -> None:
    """Print the rate of each linear layer of a block on a full batch against that of 1536 x 1536 matrices."""
    shapes = {n: m.weight.shape for n, m in model.blocks[0].named_modules() if isinstance(m, nn.Linear)}
    ratios: dict[str, list[float]] = {name: [] for name in shapes}
    for _ in range(9):
        for name, (rows, columns) in shapes.items():
            own = matmul_rate(time.process_time, (TOKEN_BUDGET, columns, rows))
            ratios[name].append(own / matmul_rate(time.process_time))
    for name, values in ratios.items():
        print(
            f"{name:<20} {'x'.join(map(str, shapes[name])):>10}: {statistics.median(values):.2f} of the square's rate"
        )


def run(model: Model, prompts: Sequence[Prompt], budget: int) -> float:
    """Score all prompts with the states of all layers and return the processor time it took, that of all threads."""
    start = time.process_time()
    plan = plan_for(prompts, token_budget=budget)
    for _ in score(model, prompts, plan, readers=[PooledResidual(tuple(range(model.n_layers + 1)))]):
        pass
    return time.process_time() - start


if __name__ == "__main__":
    main()
