"""More labels or more tasks? Lenses of 1 to 4 training tasks and of more and more questions, on tasks that none was fitted on.

    python bench/labels.py --data DIR --work DIR --train TASK:SPLIT=N ... --test TASK:SPLIT=N ... --sizes 300 600 1200

A lens of n questions of k tasks has n / k of each. For every k the tasks go round (of four: each alone, each with the next, and
so on), so that all take part alike; a lens that a task has too few questions for is left out, and how many took part is printed.
Differences are means over these lenses and over the tests, x 100 with paired 95 % intervals: of accuracy to the model as it is,
of Brier score and ECE to temperature scaling fitted on the same questions. The last two columns are of the plain lens, believed
everywhere: a lens of one task is believed by half at most elsewhere, so that the others compare tasks and caution at once.
States and lenses are kept in --work: give that of `trust.py`, and what is there is used again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from over_tasks import AGAINST, Row, Spread, differences, mean_of
from trust import TEST, TRAIN, lens_of, store_of

from coral_lens.data.leaks import guard_of
from coral_lens.engine.activations import ActivationStore, JoinedStore, Subset
from coral_lens.engine.loading import load_model
from coral_lens.lens.artefact import Lens
from coral_lens.lens.settings import FitSettings
from coral_lens.records import predictions_of
from coral_lens.storage.settings import parse_layers


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--train", nargs="+", default=TRAIN)
    parser.add_argument("--test", nargs="+", default=TEST)
    parser.add_argument("--sizes", nargs="+", type=int, default=[150, 300, 600, 1200, 2400])
    parser.add_argument(
        "--layers", type=parse_layers, default=None, help="layers to try, such as 12-24; by default all"
    )
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    model = load_model(args.model, dtype=args.dtype)
    stores = [store_of(model, source, args) for source in args.train]
    guard = guard_of([q for store in stores for q in store.questions])
    tested = [store_of(model, source, args) for source in args.test]
    tests = [JoinedStore([Subset(store, ~guard.find(store.questions).mask)]) for store in tested]
    print(f"On {', '.join(args.test)}")
    print("| questions | tasks | lenses | accuracy - base | Brier - T | ECE - T | plain: accuracy | plain: Brier - T |")
    print("|---|---|---|---|---|---|---|---|")
    for size in args.sizes:
        for n_tasks in range(1, len(stores) + 1):
            settings = FitSettings(layers=args.layers)
            fitted = [lens_of(train, settings, args.work) for train in mixtures(stores, n_tasks, size)]
            if fitted:
                used = over_tests(fitted, tests)
                plain = over_tests(fitted, tests, plain=True)
                means = [*used.values(), plain["accuracy"], plain["brier"]]
                print(
                    f"| {size} | {n_tasks} | {len(fitted)} | {' | '.join(str(mean_of(m)) for m in means)} |", flush=True
                )


def mixtures(stores: Sequence[ActivationStore], n_tasks: int, size: int) -> Iterator[JoinedStore]:
    """Yield the training questions of each mixture of so many tasks that has enough of them."""
    each = size // n_tasks
    for start in range(len(stores) if n_tasks < len(stores) else 1):
        chosen = [stores[(start + i) % len(stores)] for i in range(n_tasks)]
        if all(len(store.questions) >= each for store in chosen):
            yield JoinedStore([first(store, each) for store in chosen])


def first(store: ActivationStore, n: int) -> Subset:
    """Return the first n questions of a store."""
    return Subset(store, np.arange(len(store.questions)) < n)


def over_tests(lenses: Sequence[Lens], tests: Sequence[JoinedStore], *, plain: bool = False) -> dict[str, list[Spread]]:
    """Return by metric the differences of all lenses on all tests; those of one test are resampled alike."""
    found: dict[str, list[Spread]] = {metric: [] for metric in AGAINST}
    for lens in lenses:
        for seed, store in enumerate(tests):
            probs = lens.apply(store)
            method = lens.plain_method if plain else lens.method
            answers = [predictions_of(m, store, probs[m]) for m in (method, "base", "temperature")]
            for metric, spread in differences(Row(lens.name, *answers), seed=seed).items():
                found[metric].append(spread)
    return found


if __name__ == "__main__":
    main()
