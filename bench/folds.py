"""One split or five folds where labelled questions are few: which chooses the better lens?

    python bench/folds.py --data DIR --work DIR --train TASK:SPLIT=N --test TASK:SPLIT=N --sizes 200 400 800

Draws so many training questions a few times, fits the default lens on each draw by one split and by five folds, and prints the
scores on the test questions, x 100, and the paired differences of folds to split with 95 % intervals, means over the draws.
States are kept in --work, as those of `trust.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from pooled import difference_in, score_of, together
from trust import store_of, whole

from coral_lens.engine.activations import JoinedStore, Subset
from coral_lens.engine.loading import load_model
from coral_lens.lens.fit import fit_store
from coral_lens.lens.settings import FitSettings
from coral_lens.records import Predictions, predictions_of

SHOWN = ("accuracy", "ece", "brier", "nll")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--train", default="commonsense_qa_cloze:train=1000")
    parser.add_argument("--test", default="commonsense_qa_cloze:validation=500")
    parser.add_argument("--sizes", nargs="+", type=int, default=[200, 400, 800])
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    model = load_model(args.model, dtype=args.dtype)
    train, test = store_of(model, args.train, args), JoinedStore([whole(store_of(model, args.test, args))])
    print("| questions | chosen by | accuracy | - split | ECE | - split | Brier | - split | NLL | - split |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for n in args.sizes:
        drawn = [np.random.default_rng(draw).permutation(len(train.questions)) < n for draw in range(args.draws)]
        parts = [JoinedStore([Subset(train, taken)]) for taken in drawn]
        split, folds = (together([answers_of(part, test, k) for part in parts]) for k in (1, 5))
        for name, found in (("one split", split), ("five folds", folds)):
            cells = [f"{100 * score_of(found, m):.1f} | {difference(found, split, m)}" for m in SHOWN]
            print(f"| {n} | {name} | {' | '.join(cells)} |", flush=True)


def answers_of(train: JoinedStore, test: JoinedStore, n_folds: int) -> Predictions:
    """Return what a lens that so many folds have chosen answers."""
    lens = fit_store(train, FitSettings(folds=n_folds))
    return predictions_of("lens", test, lens.apply(test)[lens.method])


def difference(found: Predictions, control: Predictions, metric: str) -> str:
    """Return a paired difference with its interval."""
    d = difference_in(found, control, metric)
    return f"{100 * d.value:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]"


if __name__ == "__main__":
    main()
