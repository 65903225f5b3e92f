"""Where scoring time goes: the share of each operator, and the rate at several token budgets relative to the default.

python bench/profile_scoring.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from torch.profiler import ProfilerActivity, profile

from coral_lens.engine import TOKEN_BUDGET, PooledResidual, score
from coral_lens.layout import plan_for
from coral_lens.models import Model, load_model
from coral_lens.prompts import prepare
from coral_lens.questions import load_questions
from coral_lens.records import Prompt, Style
from coral_lens.tasks import TaskOptions

BUDGETS = (256, 512, 1024, TOKEN_BUDGET)


def main() -> None:
    """Profile one run, then time the budgets in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="arc_challenge:validation")
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = load_model("smollm2")
    prompts = prepare(load_questions(args.task, TaskOptions(limit=args.questions)), Style(), model).prompts
    run(model, prompts, TOKEN_BUDGET)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run(model, prompts, TOKEN_BUDGET)
    operators = sorted(found.key_averages(), key=lambda o: -o.self_cpu_time_total)
    total = sum(o.self_cpu_time_total for o in operators)
    for operator in operators[:12]:
        print(f"{operator.key:<50} {operator.self_cpu_time_total / total:6.1%}")
    ratios: dict[int, list[float]] = {budget: [] for budget in BUDGETS}
    for _ in range(args.rounds):
        times = {budget: run(model, prompts, budget) for budget in BUDGETS}
        for budget in BUDGETS:
            ratios[budget].append(times[TOKEN_BUDGET] / times[budget])
    for budget, values in ratios.items():
        print(f"{budget:5d} tokens a batch: {statistics.median(values):.2f} times the rate at {TOKEN_BUDGET}")


def run(model: Model, prompts: Sequence[Prompt], budget: int) -> float:
    """Score all prompts with the states of all layers and return the time it took."""
    start = time.perf_counter()
    plan = plan_for(prompts, token_budget=budget)
    for _ in score(model, prompts, plan, readers=[PooledResidual(tuple(range(model.n_layers + 1)))]):
        pass
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
