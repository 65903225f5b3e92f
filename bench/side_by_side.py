"""Two ways to use several cores: every product divided over the threads (what the engine does), or whole batches side by
side, each on one thread. Prints the rate of the second relative to the first; see docs/log.md for why it is not used.

    python bench/side_by_side.py --data DIR --task arc_challenge --questions 100 --rounds 4

The workers' models share their weights; each has modules of its own, because hooks hang on them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import Style, TaskOptions
from coral_lens.engine.architectures import find_parts
from coral_lens.engine.batches import lay_out
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.packing import Plan, PlannedBatch, plan_for
from coral_lens.engine.prompts import prepare
from coral_lens.engine.readers import PooledResidual
from coral_lens.engine.scoring import TOKEN_BUDGET, PrefixCaches, ScoredBatch, score, score_batch
from coral_lens.records import Prompt

BUDGETS = (1024, TOKEN_BUDGET)


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
    threads = torch.get_num_threads()
    workers = [twin(model) for _ in range(threads)]
    plans = {budget: plan_for(prompts, token_budget=budget) for budget in BUDGETS}
    ratios: dict[int, list[float]] = {budget: [] for budget in BUDGETS}
    divided(model, prompts, plans[TOKEN_BUDGET])  # warm up
    for _ in range(args.rounds):
        usual = seconds(lambda: divided(model, prompts, plans[TOKEN_BUDGET]))
        for budget in BUDGETS:
            torch.set_num_threads(1)
            own = seconds(lambda plan=plans[budget]: side_by_side(workers, prompts, plan))  # type: ignore[misc]
            torch.set_num_threads(threads)
            ratios[budget].append(usual / own)
    for budget, values in ratios.items():
        print(
            f"{threads} batches of {budget} tokens side by side: {statistics.median(values):.2f} times the rate of "
            f"{TOKEN_BUDGET} tokens on {threads} threads ({min(values):.2f} to {max(values):.2f})"
        )


def seconds(run: Callable[[], None]) -> float:
    """Return how long a run takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def twin(model: Model) -> Model:
    """Return a model with modules of its own and the same weights."""
    shared = {id(tensor): tensor for tensor in (*model.hf.parameters(), *model.hf.buffers())}
    hf = deepcopy(model.hf, shared)
    return replace(model, hf=hf, **vars(find_parts(hf)))


def pooled(model: Model) -> PooledResidual:
    """Return a reader of all layers."""
    return PooledResidual(tuple(range(model.n_layers + 1)))


def divided(model: Model, prompts: Sequence[Prompt], plan: Plan) -> None:
    """Score one batch after the other."""
    for _ in score(model, prompts, plan, readers=[pooled(model)]):
        pass


def side_by_side(workers: Sequence[Model], prompts: Sequence[Prompt], plan: Plan) -> None:
    """Score as many batches at a time as there are workers, in the order of the plan and with little look-ahead."""
    free = deque((model, PrefixCaches(model)) for model in workers)

    def scored(planned: PlannedBatch) -> ScoredBatch:
        torch.set_num_threads(1)  # OpenMP counts for each thread that Python starts
        model, prefixes = free.popleft()
        try:
            batch = lay_out(prompts, planned, packing=plan.packing, joined=model.attends_in_blocks)
            return score_batch(model, batch, readers=[pooled(model)], prefixes=prefixes)
        finally:
            free.append((model, prefixes))

    waiting: deque[Future[ScoredBatch]] = deque()
    with ThreadPoolExecutor(len(workers)) as pool:
        for planned in plan.batches:
            waiting.append(pool.submit(scored, planned))
            if len(waiting) > 2 * len(workers):
                waiting.popleft().result()
        for future in waiting:
            future.result()


if __name__ == "__main__":
    main()
