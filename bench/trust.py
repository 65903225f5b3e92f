"""What a lens is worth on tasks that it was not fitted on: without labels, with some, and when it exits early.

    python bench/trust.py --data DIR --work DIR --train TASK:SPLIT=N ... --test TASK:SPLIT=N ...

Fits the default lens on the training questions and prints, for each test set, the accuracy of the model as it is and of the
lens, and paired differences of Brier score and ECE to temperature scaling, x 100 with 95 % intervals: the plain lens, the lens
as it is used, and the lens after `--labels` labels of the task (the mean over five draws, on the questions that are left). Test
questions that the lens was fitted on are left out. States are kept in --work, and an interrupted run goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import TaskOptions
from coral_lens.engine.activations import ActivationStore, JoinedStore, Subset
from coral_lens.engine.extract import Extraction, all_layers, extract
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.lens.adapt import adapt_on
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit_store
from coral_lens.lens.settings import FitSettings
from coral_lens.metrics.comparisons import paired_difference
from coral_lens.metrics.scores import score
from coral_lens.records import Predictions, predictions_of
from coral_lens.storage.files import file_name
from coral_lens.storage.progress import questions_bar

TRAIN = (
    "commonsense_qa_cloze:train=600",
    "arc_easy:train=600",
    "social_iqa:validation=1000",
    "hellaswag:validation=450",
)
TEST = ("arc_challenge:test=400", "openbookqa:test=400", "piqa:validation=400")
DRAWS = 5


@dataclass(frozen=True)
class Row:
    """One way to answer, with its answers and those of temperature scaling to the same questions."""

    name: str
    found: Predictions
    control: Predictions

    def difference(self, metric: str) -> str:
        """Return the difference to temperature scaling, with its interval."""
        d = paired_difference(self.found, self.control, metric)
        return f"{100 * d.value:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--train", nargs="+", default=TRAIN)
    parser.add_argument("--test", nargs="+", default=TEST)
    parser.add_argument("--labels", type=int, default=50)
    parser.add_argument("--exits", nargs="*", type=int, default=[12, 20], help="layers after which a lens exits early")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    model = load_model(args.model, dtype=args.dtype)
    train = JoinedStore([whole(store_of(model, source, args)) for source in args.train])
    lens = fit_store(train, FitSettings())
    early = [fit_store(train, FitSettings(exit_layer=layer)) for layer in args.exits]
    print(
        f"{lens.name}; weight elsewhere {lens.trust.elsewhere if lens.trust else 1:.2f}, {len(train.questions)} questions"
    )
    print("| test | answers | accuracy, base | accuracy | Brier - T | ECE - T | confidence - accuracy |")
    print("|---|---|---|---|---|---|---|")
    for source in args.test:
        store = store_of(model, source, args)
        fresh = JoinedStore([Subset(store, ~lens.is_seen(store.questions))])
        base = 100 * score(predictions_of("base", fresh, lens.apply(fresh)["base"]), "accuracy")
        for row in rows_of(lens, early, fresh, args.labels):
            accuracy = 100 * score(row.found, "accuracy")
            over = 100 * float(row.found.options.max(row.found.probs).mean()) - accuracy
            cells = (f"{base:.1f}", f"{accuracy:.1f}", row.difference("brier"), row.difference("ece"), f"{over:+.1f}")
            print(f"| {source} | {row.name} | {' | '.join(cells)} |", flush=True)


def store_of(model: Model, source: str, args: argparse.Namespace) -> ActivationStore:
    """Return the states of the first questions of a source, `TASK:SPLIT=N` or a file."""
    name, _, limit = source.partition("=")
    questions = load_questions(name, TaskOptions(limit=int(limit) if limit else None, data_dir=args.data))
    with questions_bar(name, len(questions)) as advance:
        extraction = Extraction(layers=all_layers(model))
        return extract(model, questions, args.work / file_name(source), extraction=extraction, progress=advance)


def whole(store: ActivationStore) -> Subset:
    """Return all questions of a store."""
    return Subset(store, np.ones(len(store.questions), dtype=bool))


def rows_of(lens: Lens, early: Sequence[Lens], store: JoinedStore, n_labels: int) -> Iterator[Row]:
    """Yield the answers of the lens without labels and with some, and of lenses that exit early."""
    probs = lens.apply(store)
    control = predictions_of("temperature", store, probs["temperature"])
    for name, method in (("plain lens", lens.plain_method), ("lens", lens.method)):
        yield Row(name, predictions_of(method, store, probs[method]), control)
    if len(store.questions) > 2 * n_labels:
        found, controls = zip(*(adapted_rows(lens, store, n_labels, seed) for seed in range(DRAWS)), strict=True)
        yield Row(f"lens, {n_labels} labels", joined(found), joined(controls))
    for one in early:
        row = predictions_of(one.method, store, one.apply(store)[one.method])
        yield Row(f"exit after {max(one.layers)}", row, control)


def adapted_rows(lens: Lens, store: JoinedStore, n_labels: int, seed: int) -> tuple[Predictions, Predictions]:
    """Return the answers of an adapted lens, and of temperature scaling, to the questions that did not adapt it."""
    drawn = np.random.default_rng(seed).permutation(len(store.questions)) < n_labels
    (part,) = store.parts
    places = np.flatnonzero(part.keep)
    few, rest = np.zeros_like(part.keep), np.zeros_like(part.keep)
    few[places[drawn]], rest[places[~drawn]] = True, True
    adapted, others = adapt_on(lens, JoinedStore([Subset(part.store, few)])), JoinedStore([Subset(part.store, rest)])
    probs = adapted.apply(others)
    return (
        predictions_of("adapted", others, probs[adapted.method]),
        predictions_of("temperature", others, probs["temperature"]),
    )


def joined(draws: Sequence[Predictions]) -> Predictions:
    """Return the answers of several draws as one; those to one question are a group, of which the interval knows."""
    edges = np.concatenate([[0], np.cumsum(np.concatenate([np.diff(d.offsets) for d in draws]))])
    first = draws[0]
    return Predictions(
        method=first.method,
        model=first.model,
        task=first.task,
        split=first.split,
        ids=tuple(f"{i}: {name}" for i, d in enumerate(draws) for name in d.ids),
        answers=np.concatenate([d.answers for d in draws]),
        offsets=edges,
        probs=np.concatenate([d.probs for d in draws]),
        groups=tuple(name for d in draws for name in d.ids),
    )


if __name__ == "__main__":
    main()
