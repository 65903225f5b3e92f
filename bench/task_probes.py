"""What does a task's own probe learn from labels: what the states know, or how its options are written?

    python bench/task_probes.py --lens FOLDER --data DIR --work DIR --test TASK:SPLIT=N ... [--labels 50]

Adapts a lens by the same labels several times: with no probe beside weight and temperature, with the probe on the states that
the lens reads (what `coral adapt` does, but for its check of who answers), and, as controls, with the probe on TF-IDF of the
options' words, on that of their letters in a row, and on their lengths. Prints accuracy and the paired difference in Brier
score to temperature scaling, x 100 with 95 % intervals: means over five draws of the labels, on the questions that are left.
--work is that of `trust.py`, whose stores and lens can be used.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from answering_labels import DRAWS, whole_groups
from over_tasks import Row, differences
from pooled import together
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from trust import fresh_of

from coral_lens.engine.activations import JoinedStore
from coral_lens.engine.loading import load_model
from coral_lens.lens.adapt import inputs_of, labelled_of
from coral_lens.lens.artefact import Lens
from coral_lens.lens.folder import load_lens
from coral_lens.lens.labelled import Labelled, Prior, judge, settle
from coral_lens.metrics.scores import score
from coral_lens.records import Predictions, predictions_of

COMPONENTS = 300
"""Columns that TF-IDF is reduced to; the states of SmolLM2 have 576."""


def tfidf(store: JoinedStore, **how: object) -> np.ndarray:
    """Return TF-IDF of every option of a test set, which sees no label."""
    texts = [option for question in store.questions for option in question.options]
    weights = TfidfVectorizer(sublinear_tf=True, **how).fit_transform(texts)
    found: np.ndarray = TruncatedSVD(min(COMPONENTS, weights.shape[1] - 1), random_state=0).fit_transform(weights)
    return found


def lengths(store: JoinedStore) -> np.ndarray:
    """Return how long every option is, in characters and in words."""
    options = [option for question in store.questions for option in question.options]
    counts = np.array([[len(option), len(option.split())] for option in options], dtype=np.float64)
    return counts / counts.std(axis=0)


PROBES: dict[str, Callable[[Lens, JoinedStore], np.ndarray | None]] = {
    "none": lambda _, store: None,
    "states": inputs_of,
    "words": lambda _, store: tfidf(store, ngram_range=(1, 2)),
    "letters": lambda _, store: tfidf(store, analyzer="char_wb", ngram_range=(2, 4)),
    "lengths": lambda _, store: lengths(store),
}
"""By the name of what a probe sees: the columns of every option."""


def main() -> None:
    """Adapt and print."""
    args = arguments()
    model, lens = load_model(args.model), load_lens(args.lens)
    print("| test | probe | accuracy | Brier - T |\n|---|---|---|---|")
    for source in args.test:
        store = fresh_of(lens, model, source, args)
        for name, columns in PROBES.items():
            draws = zip(
                *(answers(lens, store, columns(lens, store), args.labels, seed) for seed in range(DRAWS)), strict=True
            )
            row = Row(name, *map(together, draws))
            cells = f"{100 * score(row.found, 'accuracy'):.1f} | {differences(row)['brier']}"
            print(f"| {Path(source.partition('=')[0]).name} | {name} | {cells} |", flush=True)


def answers(
    lens: Lens, store: JoinedStore, columns: np.ndarray | None, n_labels: int, seed: int
) -> Sequence[Predictions]:
    """Return what an adapted lens, the base and temperature say of the questions that labels have left."""
    output, options = lens.read(store), store.table.options
    z = None if columns is None else options.centre(columns)
    data = labelled_of(lens, store, output, np.ones(len(options)))._replace(z=z)
    labelled = whole_groups([q.group for q in store.questions], n_labels, seed)
    found = adapted(lens, data, labelled)
    rest = store.take(~labelled)
    rows = options.rows(~labelled)
    return [
        predictions_of(name, rest, probs[rows])
        for name, probs in (
            ("found", found),
            ("base", output.probs["base"]),
            ("temperature", output.probs["temperature"]),
        )
    ]


def adapted(lens: Lens, data: Labelled, labelled: np.ndarray) -> np.ndarray:
    """Return the probabilities of all options after some labels."""
    assert lens.trust is not None, "a lens without trust has no prior"
    few = data.take(labelled)
    prior = Prior(lens.trust.elsewhere, few.n_units, temperature=lens.trust.temperature)
    return data.probs(settle(few, prior, judge(few, prior).scale, worse=False))


def arguments() -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lens", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--test", nargs="+", required=True)
    parser.add_argument("--labels", type=int, default=50)
    return parser.parse_args()


if __name__ == "__main__":
    main()
