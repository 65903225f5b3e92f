"""Questions per second of our engine, of lm-eval's HFLM and of a plain loop, on the same questions in the same run.

    python bench/scoring.py --data DIR            arc_challenge, 0-shot, SmolLM2
    python bench/scoring.py --task hellaswag:validation --questions 60
    python bench/scoring.py --one-core            processor time of one thread, for a machine that others use too
    python bench/scoring.py --dtype bfloat16 --hflm-dtype bfloat16

Machines are noisy, so the contenders take turns in short rounds, the order turning round by round, and the medians of
their rates are compared. HFLM runs at the best of several batch sizes, found first; it computes every option by itself, so
that its rate can be taken from evenly spaced questions where all of them would take too long. The roofline is the time that the
machine's own matrix multiplication would need for the floating-point operations of the unique tokens, their attention and the
scored rows of the head. A machine's rate can change within seconds, so it is taken before and after every few batches, and they
are also scored without states right beside, which is what pooling is compared with.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import Style, TaskOptions
from coral_lens.engine.batches import lay_out
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.packing import Plan, plan_for
from coral_lens.engine.prompts import render, tokenize
from coral_lens.engine.readers import PooledResidual
from coral_lens.engine.scoring import TOKEN_BUDGET, score
from coral_lens.engine.trees import build_tree
from coral_lens.records import Prompt, Question, Rendered

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
AT_A_TIME = 4
"""Batches between two looks at the machine's rate: threads compute whole batches, so that each has some."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", help="our arithmetic")
    parser.add_argument("--hflm-dtype", default="float32", help="HFLM's, which takes bfloat16 for most checkpoints")
    parser.add_argument("--task", default="arc_challenge:validation")
    parser.add_argument("--num-fewshot", type=int, default=None)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-loop", action="store_true", help="leave out the plain loop, which is slow")
    parser.add_argument("--one-core", action="store_true", help="one thread, by the processor time of this process")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES, help="what HFLM may choose from")
    parser.add_argument("--hflm-questions", type=int, default=None, help="so many of the questions for HFLM")
    args = parser.parse_args()
    clock = time.perf_counter
    if args.one_core:
        torch.set_num_threads(1)
        clock = time.process_time

    model = load_model(args.model, dtype=args.dtype)
    rival = model if args.dtype == args.hflm_dtype else load_model(args.model, dtype=args.hflm_dtype)
    options = TaskOptions(limit=args.questions, data_dir=args.data, num_fewshot=args.num_fewshot)
    questions = load_questions(args.task, options)
    rendered = [render(q, Style(), model) for q in questions]
    prompts = tokenize(questions, rendered, model)
    some = spaced(rendered, args.hflm_questions or len(rendered))
    runs: dict[str, Run] = {
        "ours, all layers pooled": Run(len(questions), lambda: ours(model, questions, rendered)),
        "lm-eval HFLM": Run(len(some), hflm(rival, some, sizes=args.batch_sizes, clock=clock)),
    }
    if not args.no_loop:
        runs["one pass per option"] = Run(len(questions), lambda: plain_loop(rival, prompts))
    print(f"ours in {args.dtype}, HFLM in {args.hflm_dtype}; load of the machine {os.getloadavg()[0]:.1f}")
    print(f"{len(questions)} questions; padding: {padding(model, prompts):.1%} of the tokens computed")
    print_rates(measure(runs, rounds=args.rounds, clock=clock))
    print_limits([some_at_a_time(model, prompts, clock) for _ in range(args.rounds)])


class Run(NamedTuple):
    """A contender: how many questions it scores, and what scores them."""

    n_questions: int
    score: Callable[[], None]


def spaced(rendered: list[Rendered], n: int) -> list[Rendered]:
    """Return n of the questions, evenly spaced."""
    return [rendered[i * len(rendered) // n] for i in range(min(n, len(rendered)))]


def ours(model: Model, questions: list[Question], rendered: list[Rendered]) -> None:
    """Tokenise, plan and score, as `coral extract` does."""
    prompts = tokenize(questions, rendered, model)
    score_all(model, prompts, plan_for(prompts, token_budget=TOKEN_BUDGET), layers=True)


def score_all(model: Model, prompts: list[Prompt], plan: Plan, *, layers: bool) -> None:
    """Score the batches of a plan, with the states of all layers or with none."""
    readers = [PooledResidual(tuple(range(model.n_layers + 1)))] if layers else []
    for _ in score(model, prompts, plan, readers=readers):
        pass


def hflm(
    model: Model, rendered: list[Rendered], *, sizes: Sequence[int], clock: Callable[[], float]
) -> Callable[[], None]:
    """Return a run of lm-eval's HFLM on the same requests, at its best batch size."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    requests = [
        Instance("loglikelihood", {}, (context, continuation), i)
        for r in rendered
        for i, (context, continuation) in enumerate(zip(r.contexts, r.continuations, strict=True))
    ]
    models = {size: HFLM(pretrained=model.hf, tokenizer=model.tokenizer, batch_size=size) for size in sizes}
    some = requests[: max(1, len(requests) // 3)]
    times = {}
    for size, lm in models.items():
        start = clock()
        lm.loglikelihood(some, disable_tqdm=True)
        times[size] = clock() - start
    best = min(times, key=times.__getitem__)
    print(f"HFLM's best batch size: {best} (tried {', '.join(map(str, sizes))})")
    return lambda: models[best].loglikelihood(requests, disable_tqdm=True) and None


@torch.inference_mode()
def plain_loop(model: Model, prompts: list[Prompt]) -> None:
    """One forward pass per option with output_hidden_states, as the paper describes it."""
    for prompt in prompts:
        for context, option in zip(prompt.contexts, prompt.options, strict=True):
            ids = torch.tensor([[*context, *option]])
            out = model.hf(ids, output_hidden_states=True)
            logprobs = out.logits[0, len(context) - 1 : -1].log_softmax(dim=-1)
            logprobs.gather(1, ids[0, len(context) :, None]).sum()
            torch.stack([h[0, len(context) :].mean(dim=0) for h in out.hidden_states])


def measure(runs: dict[str, Run], *, rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return the questions per second of each contender in each round."""
    names = list(runs)
    rates: dict[str, list[float]] = {name: [] for name in names}
    runs[names[0]].score()  # warm up; the search for its batch size has done so for HFLM
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            start = clock()
            runs[name].score()
            rates[name].append(runs[name].n_questions / (clock() - start))
    return rates


class Limits(NamedTuple):
    """One walk over the batches: what they took, and what they would take at the machine's rate of that moment."""

    pooled: float
    scored: float
    possible: float
    matmul: list[float]


def some_at_a_time(model: Model, prompts: list[Prompt], clock: Callable[[], float]) -> Limits:
    """Score some batches with states and without, in turns, with the matrix multiplication timed around each pair."""
    seconds = [0.0, 0.0]
    # the roofline is that of the products, which mixed computes in bfloat16 too
    dtype = torch.float32 if model.precision == "float32" else torch.bfloat16
    possible, matmul = 0.0, [matmul_rate(clock, dtype=dtype)]
    plan = plan_for(prompts, token_budget=TOKEN_BUDGET)
    needed = list(flops(model, prompts))
    for i, start in enumerate(range(0, len(needed), AT_A_TIME)):
        part = replace(plan, batches=plan.batches[start : start + AT_A_TIME])
        for which in (i % 2, 1 - i % 2):
            begin = clock()
            score_all(model, prompts, part, layers=which == 0)
            seconds[which] += clock() - begin
        matmul.append(matmul_rate(clock, dtype=dtype))
        possible += sum(needed[start : start + AT_A_TIME]) / statistics.mean(matmul[-2:])
    return Limits(seconds[0], seconds[1], possible, matmul)


def matmul_rate(
    clock: Callable[[], float] = time.perf_counter,
    shape: tuple[int, int, int] = (1536, 1536, 1536),
    repeats: int = 6,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Return this machine's matrix-multiply rate just now at the given sizes, in FLOP/s."""
    rows, inner, columns = shape
    a, b = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype)
    torch.nn.functional.linear(a, b)  # the first one pays for the memory
    start = clock()
    for _ in range(repeats):
        torch.nn.functional.linear(a, b)
    return repeats * 2 * rows * inner * columns / (clock() - start)


def padding(model: Model, prompts: list[Prompt]) -> float:
    """Return which part of the tokens that the engine computes is padding."""
    plan = plan_for(prompts, token_budget=TOKEN_BUDGET)
    laid = [lay_out(prompts, planned, joined=model.joins_rows) for planned in plan.batches]
    return 1 - sum(int(b.lengths.sum()) for b in laid) / sum(b.input_ids.numel() for b in laid)


def flops(model: Model, prompts: list[Prompt]) -> Iterator[float]:
    """Yield for each batch the floating-point operations that it cannot do without."""
    block = sum(p.numel() for p in model.blocks[0].parameters() if p.ndim == 2)
    config = model.hf.config
    heads = config.num_attention_heads * config.head_dim
    head = sum(p.numel() for p in model.head.parameters() if p.ndim == 2)
    known = set()
    for planned in plan_for(prompts, token_budget=TOKEN_BUDGET).batches:
        total = 0.0
        for row, skip in zip(planned.rows, planned.prefixes, strict=True):
            prefix = prompts[row[0]].contexts[0][:skip]
            if prefix not in known:
                known.add(prefix)
                total += model.n_layers * (2 * block * skip + 2 * heads * skip * (skip + 1))
            for tree in (build_tree(prompts[q], skip=skip) for q in row):
                pairs = zip(tree.stems, tree.paths, strict=True)
                rows = {int(node) for stem, path in pairs for node in (stem, *path[:-1])}
                seen = float((tree.depths + 1).sum())  # keys that the tree's queries attend to
                total += model.n_layers * (2 * block * len(tree) + 4 * heads * seen) + 2 * head * len(rows)
        yield total


def print_rates(rates: dict[str, list[float]]) -> None:
    """Print medians with their spread, and what the first contender is worth against the others."""
    for name, values in rates.items():
        print(f"{name:<26} {spread(values)} questions/s")
    ours = rates["ours, all layers pooled"]
    for name in list(rates)[1:]:
        ratios = [a / b for a, b in zip(ours, rates[name], strict=True)]
        print(f"ours with states / {name:<22} {spread(ratios)}")


def print_limits(walks: list[Limits]) -> None:
    """Print how near the batches come to the machine's matrix multiplication, and what pooling adds to scoring."""
    print(f"of the roofline, with states       {spread([100 * w.possible / w.pooled for w in walks])} %")
    print(f"of the roofline, scores only       {spread([100 * w.possible / w.scored for w in walks])} %")
    print(f"with states over scores only       {spread([w.pooled / w.scored for w in walks])}")
    print(f"matrix multiply                    {spread([rate / 1e9 for w in walks for rate in w.matmul])} GFLOP/s")


def spread(values: list[float]) -> str:
    """Return the median and the range, as text."""
    return f"{statistics.median(values):7.2f}   ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
