"""What ITI and CCPS cost beside plain scoring, and what one cached context saves when many shifts are tried.

    python bench/baselines.py [--task commonsense_qa_cloze:validation] [--questions 40] [--rounds 3]

Prints processor time on one thread as ratios, the median over rounds; plain scoring, with the states of every layer pooled, is 1.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import Style, TaskOptions
from coral_lens.engine.hooks import Edit, Reader
from coral_lens.engine.loading import load_model
from coral_lens.engine.packing import plan_for
from coral_lens.engine.planned import all_layers
from coral_lens.engine.prompts import prepare
from coral_lens.engine.readers import HeadInputs, PooledResidual
from coral_lens.engine.scoring import TOKEN_BUDGET, score
from coral_lens.engine.variants import Variants, score_variants
from coral_lens.methods.ccps.perturbation import PerturbationFeatures, head_of
from coral_lens.methods.iti.method import Intervention

N_SHIFTS = 6


def seconds(work: Callable[[], object]) -> float:
    """Return the processor time that something takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="commonsense_qa_cloze:validation")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model("smollm2")
    questions = load_questions(arguments.task, TaskOptions(limit=arguments.questions))
    prompts = prepare(questions, Style(), model).prompts
    plan = plan_for(prompts, token_budget=TOKEN_BUDGET)
    rng = np.random.default_rng(0)
    dim = model.projections[0].in_features // model.n_heads
    directions = rng.normal(size=(model.n_layers, model.n_heads, dim)).astype(np.float32)
    shifts = [[Intervention(directions, alpha).edit] for alpha in np.linspace(0.01, 0.1, N_SHIFTS)]

    def scored(readers: Sequence[Reader] = (), edits: Sequence[Edit] = ()) -> None:
        for _ in score(model, prompts, plan, readers=readers, edits=edits):
            pass

    def tuned() -> None:
        with tempfile.TemporaryDirectory() as folder:
            score_variants(model, prompts, Variants(shifts, {}), Path(folder), packing="tree")

    blocks = tuple(range(1, model.n_layers + 1))
    work: dict[str, Callable[[], object]] = {
        "plain": lambda: scored([PooledResidual(all_layers(model))]),
        "heads of every block read": lambda: scored([HeadInputs(blocks, model.n_heads)]),
        "heads of every block shifted (ITI)": lambda: scored(edits=shifts[0]),
        "features read (CCPS)": lambda: scored([PerturbationFeatures(head_of(model))]),
        f"{N_SHIFTS} shifts, one pass each": lambda: [scored(edits=edits) for edits in shifts],
        f"{N_SHIFTS} shifts over one cached context": tuned,
    }
    scored()  # once to warm up
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(arguments.rounds):
        for name, one in work.items():
            times[name].append(seconds(one))
    plain = statistics.median(times["plain"])
    print(f"{len(prompts)} questions of {arguments.task}: {plain:.2f} s of processor time\n")
    print("| what | plain scoring = 1 |\n|---|---:|")
    for name, found in times.items():
        print(f"| {name} | {statistics.median(found) / plain:.2f} |")


if __name__ == "__main__":
    main()
