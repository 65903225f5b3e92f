"""How much faster ablating features is than our own packed, batched full pass per feature, on the same questions.

    python bench/sae.py --data DIR                        features that are active at every position: the worst case
    python bench/sae.py --data DIR --where answer         the same, patched at the answer tokens only
    python bench/sae.py --data DIR --study FOLDER         the features that `coral sae select` chose
    python bench/sae.py --one-core                        processor time of one thread, for a machine that others use too

Without a study the autoencoder is random and has 16 features per dimension; a few of them are made active everywhere, so that
every position of every question changes. The incremental time includes the pass with the reconstruction that it starts from;
the full pass is that of `engine.score`, with the reconstruction less one feature as an edit. Both take turns. The ratio of their
floating-point operations, as PyTorch counts them, says what could be won at most if all of them took the same time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import Style, TaskOptions
from coral_lens.engine.batches import lay_out
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.packing import plan_for
from coral_lens.engine.prompts import prepare
from coral_lens.engine.scoring import TOKEN_BUDGET, score
from coral_lens.records import Prompt
from coral_lens.sae.ablate import Ablation, WithoutFeature, ablate_batch, feature_tensor
from coral_lens.sae.autoencoder import Autoencoder
from coral_lens.sae.folder import FeatureStudy


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="commonsense_qa_cloze:validation")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--layer", type=int, default=20)
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--where", choices=["all", "answer"], default="all", help="positions that are patched")
    parser.add_argument("--features", type=int, default=32, help="active everywhere, where there is no study")
    parser.add_argument("--study", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one-core", action="store_true", help="one thread, by the processor time of this process")
    args = parser.parse_args()
    clock = time.perf_counter
    if args.one_core:
        torch.set_num_threads(1)
        clock = time.process_time
    model = load_model("smollm2")
    questions = load_questions(args.task, TaskOptions(limit=args.questions, data_dir=args.data))
    prompts = prepare(questions, Style(), model).prompts
    if args.study:
        study = FeatureStudy(args.study)
        what = Ablation(study.autoencoder(), feature_tensor(study.selection.chosen["correlation"][:300]), args.where)
        print(f"{len(what.features)} selected features, layer {what.sae.layer}")
    else:
        sae = always_active(model, args.layer, args.features)
        what = Ablation(sae, feature_tensor(range(args.features)), args.where)
        print(f"{args.features} features active at every position, layer {args.layer}")
    compare(model, prompts, what, rounds=args.rounds, clock=clock)


def always_active(model: Model, layer: int, n: int) -> Autoencoder:
    """Return a random autoencoder of 16 features per dimension whose first n features are active whatever the state is."""
    rng = torch.Generator().manual_seed(0)
    n_features = 16 * model.width
    w_enc = torch.randn(model.width, n_features, generator=rng) / model.width**0.5
    w_enc[:, :n] = 0.0
    b_enc = torch.full((n_features,), -2.0)
    b_enc[:n] = 1.0
    w_dec = torch.randn(n_features, model.width, generator=rng) / model.width**0.5
    return Autoencoder(w_enc, b_enc, w_dec, torch.zeros(model.width), layer)


def compare(
    model: Model, prompts: Sequence[Prompt], what: Ablation, *, rounds: int, clock: Callable[[], float]
) -> None:
    """Time both in turns, and print the ratio of the times for all features."""
    plan = plan_for(prompts, token_budget=TOKEN_BUDGET)
    batches = [lay_out(prompts, planned) for planned in plan.batches]

    def incremental() -> int:
        return sum(ablate_batch(model, batch, what).n_computed for batch in batches)

    def full(feature: int) -> None:
        for _ in score(model, prompts, plan, edits=[WithoutFeature(what, feature)]):
            pass

    full(0)
    n_rows = sum(len(batch.input_ids) for batch in batches)
    print(f"{incremental() / (n_rows * len(what.features)):.1%} of the pairs of a feature and a row are computed")
    operations = n_operations(lambda: full(0)) * len(what.features) / n_operations(incremental)
    print(f"floating-point operations, full / incremental {operations:.2f}")
    times: dict[str, list[float]] = {"full": [], "incremental": []}
    for r in range(rounds):
        start = clock()
        full(r % len(what.features))
        times["full"].append((clock() - start) * len(what.features))
        start = clock()
        incremental()
        times["incremental"].append(clock() - start)
    for name, values in times.items():
        print(f"{name:<12} {statistics.median(values):8.2f} s for {len(what.features)} features")
    ratios = [a / b for a, b in zip(times["full"], times["incremental"], strict=True)]
    print(f"full / incremental {statistics.median(ratios):.2f}   ({min(ratios):.2f} to {max(ratios):.2f})")


def n_operations(run: Callable[[], object]) -> int:
    """Return the floating-point operations of matrix products and attention in a run."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


if __name__ == "__main__":
    main()
