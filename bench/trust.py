"""What a lens is worth on tasks that it was not fitted on: without labels, with some, and when it exits early; and at home.

    python bench/trust.py --data DIR --work DIR --train TASK:SPLIT=N ... --test TASK:SPLIT=N ... --home TASK:SPLIT=N ...

Fits the default lens on the training questions and prints, for each test set, the accuracy of the model as it is and of the
lens, and paired differences to temperature scaling of Brier score and ECE, x 100 with 95 % intervals: the plain lens, the lens
as it is used, and the lens after `--labels` labels of the task (the mean over five draws, on the questions that are left). A
second table has the mean and the worst over these tests, a third the scores at home, and the last lines say which bars are met.
With --curve, one more table has these means for other weights and temperatures elsewhere than those that the lens has learned:
what a bar costs. Test questions that the lens was fitted on are left out. States and lenses are kept in --work, and an
interrupted run goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from answering_labels import DRAWS, one_draw
from bars import Bar
from over_tasks import AGAINST, LABELLED, Row, Spread, differences, mean_of
from pooled import together

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import TaskOptions
from coral_lens.engine.activations import ActivationStore, JoinedStore, Subset
from coral_lens.engine.extract import extract
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Extraction, all_layers
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import load_or_fit
from coral_lens.lens.settings import FitSettings
from coral_lens.metrics.scores import score
from coral_lens.records import predictions_of
from coral_lens.storage.files import digest, file_name
from coral_lens.storage.progress import questions_bar

TRAIN = (
    "commonsense_qa_cloze:train=600",
    "arc_easy:train=600",
    "social_iqa:validation=1000",
    "hellaswag:validation=450",
)
TEST = ("arc_challenge:test=400", "openbookqa:test=400", "piqa:validation=400")
HOME = ("commonsense_qa_cloze:validation=1221", "arc_easy:test=1000")
LABELS = (5, 30, 50, 100)
USED = "lens"
"""The row of the lens as it is used, without labels."""
Found = dict[str, list[dict[str, Spread]]]
"""By row, the differences of each test in turn."""


def main() -> None:
    """Measure and print."""
    args = arguments()
    model = load_model(args.model, dtype=args.dtype)
    train = JoinedStore([whole(store_of(model, source, args)) for source in args.train])
    lens = lens_of(train, FitSettings(), args.work)
    early = [lens_of(train, FitSettings(exit_layer=layer), args.work) for layer in args.exits]
    weight, temperature = (lens.trust.elsewhere, lens.trust.temperature) if lens.trust else (1.0, 1.0)
    print(
        f"{lens.name}; elsewhere weight {weight:.2f}, temperature {temperature:.2f}; {len(train.questions)} questions"
    )
    found = print_tests(lens, early, model, args)
    print_over_tests(found, [source for source in args.test if not is_trained(source, args)])
    if args.curve:
        print_curve(lens, model, args)
    at_home = print_home(lens, early, model, args)
    print_bars(found, at_home)


def arguments() -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--train", nargs="+", default=TRAIN)
    parser.add_argument("--test", nargs="+", default=TEST)
    parser.add_argument("--home", nargs="*", default=HOME, help="test questions of training tasks")
    parser.add_argument("--labels", nargs="*", type=int, default=LABELS, help="numbers of labels that adapt the lens")
    parser.add_argument("--exits", nargs="*", type=int, default=[12, 20], help="layers after which a lens exits early")
    parser.add_argument(
        "--curve", action="store_true", help="also print what other weights and temperatures would give"
    )
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--work", type=Path, required=True)
    return parser.parse_args()


# ----------------------------------------------------------------------------------------------------- stores and lenses


def store_of(model: Model, source: str, args: argparse.Namespace) -> ActivationStore:
    """Return the states of the first questions of a source, `TASK:SPLIT=N` or a file."""
    name, _, limit = source.partition("=")
    questions = load_questions(name, TaskOptions(limit=int(limit) if limit else None, data_dir=args.data))
    with questions_bar(name, len(questions)) as advance:
        extraction = Extraction(layers=all_layers(model))
        return extract(model, questions, args.work / file_name(source), extraction=extraction, progress=advance)


def is_trained(source: str, args: argparse.Namespace) -> bool:
    """Whether a source is of a task that the lens was fitted on."""
    return source.partition(":")[0] in {one.partition(":")[0] for one in args.train}


def whole(store: ActivationStore) -> Subset:
    """Return all questions of a store."""
    return Subset(store, np.ones(len(store.questions), dtype=bool))


def lens_of(train: JoinedStore, settings: FitSettings, work: Path) -> Lens:
    """Return a lens of these questions; one that was fitted before is read."""
    name = f"{digest(train.manifest)[:8]}-{digest(settings.record())[:8]}"
    return load_or_fit(train, settings, work / "lenses" / name)


def fresh_of(lens: Lens, model: Model, source: str, args: argparse.Namespace) -> JoinedStore:
    """Return the questions of a source that the lens was not fitted on."""
    store = store_of(model, source, args)
    return JoinedStore([Subset(store, ~lens.is_seen(store.questions))])


def rows_of(lens: Lens, early: Sequence[Lens], store: JoinedStore, labels: Sequence[int]) -> Iterator[Row]:
    """Yield the answers of the lens without labels and with some, and of lenses that exit early."""
    probs = lens.apply(store)
    base, control = (predictions_of(method, store, probs[method]) for method in ("base", "temperature"))
    for name, method in (("plain lens", lens.plain_method), (USED, lens.method)):
        yield Row(name, predictions_of(method, store, probs[method]), base, control)
    for n in labels:
        if len(store.questions) > 2 * n:
            draws = zip(*(one_draw(lens, store, n, seed) for seed in range(DRAWS)), strict=True)
            yield Row(with_labels(n), *map(together, draws))
    for one in early:
        row = predictions_of(one.method, store, one.apply(store)[one.method])
        yield Row(f"exit after {max(one.layers)}", row, base, control)


def with_labels(n: int) -> str:
    """Return the name of the row of a lens that n labels have adapted."""
    return f"{USED}, {n} labels"


# ------------------------------------------------------------------------------------------------------------ the tables


def print_tests(lens: Lens, early: Sequence[Lens], model: Model, args: argparse.Namespace) -> Found:
    """Print a line for each way to answer each test, and return the differences on tasks that were not trained on."""
    print("| test | answers | accuracy, base | accuracy | Brier - T | ECE - T | confidence - accuracy |")
    print("|---|---|---|---|---|---|---|")
    found: Found = {}
    for seed, source in enumerate(args.test):
        for row in rows_of(lens, early, fresh_of(lens, model, source, args), args.labels):
            spreads = differences(row, seed=seed)
            if not is_trained(source, args):
                found.setdefault(row.name, []).append(spreads)
            base, accuracy = (100 * score(p, "accuracy") for p in (row.base, row.found))
            over = 100 * float(row.found.options.max(row.found.probs).mean()) - accuracy
            cells = (f"{base:.1f}", f"{accuracy:.1f}", spreads["brier"], spreads["ece"], f"{over:+.1f}")
            print(f"| {source} | {row.name} | {' | '.join(map(str, cells))} |", flush=True)
    return found


def print_over_tests(found: Found, tests: Sequence[str]) -> None:
    """Print the mean and the worst over the tests of each way to answer; a row that some test is too small for has neither."""
    if not tests:
        return
    print(f"\nOver {', '.join(tests)}: mean and worst\n")
    print("| answers | accuracy - base | worst | Brier - T | worst | ECE - T | worst |\n|---|---|---|---|---|---|---|")
    for name, by_test in found.items():
        if len(by_test) < len(tests):
            continue
        cells = []
        for metric in AGAINST:
            worst = worst_of(by_test, metric)
            cells += [str(mean_over(by_test, metric)), f"{by_test[worst][metric]}, {tests[worst].partition(':')[0]}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def mean_over(by_test: Sequence[dict[str, Spread]], metric: str) -> Spread:
    """Return the mean difference over tests."""
    return mean_of([spreads[metric] for spreads in by_test])


def worst_of(by_test: Sequence[dict[str, Spread]], metric: str) -> int:
    """Return the number of the test with the worst difference: of accuracy the lowest, of the others the highest."""
    values = [spreads[metric].value for spreads in by_test]
    return int(np.argmin(values) if metric == "accuracy" else np.argmax(values))


CURVE = [(weight, temperature) for weight in (0.2, 0.4, 0.6, 0.8, 1.0) for temperature in (1.0, 1.4, 2.0)]
"""Weights and temperatures elsewhere that are shown beside the ones that a lens has learned."""


def print_curve(lens: Lens, model: Model, args: argparse.Namespace) -> None:
    """Print means over the tests at other weights and temperatures; nothing is chosen by them."""
    assert lens.trust is not None, "the default lens has one"
    stores = [fresh_of(lens, model, source, args) for source in args.test if not is_trained(source, args)]
    print("\n| weight | temperature | accuracy - base | Brier - T | worst | ECE - T |\n|---|---|---|---|---|---|")
    for weight, temperature in [*CURVE, (lens.trust.elsewhere, lens.trust.temperature)]:
        tried = replace(lens, trust=replace(lens.trust, elsewhere=weight, temperature=temperature))
        by_test = []
        for seed, store in enumerate(stores):
            probs = tried.apply(store)
            answers = [predictions_of(m, store, probs[m]) for m in (tried.method, "base", "temperature")]
            by_test.append(differences(Row(USED, *answers), seed=seed))
        means = {metric: f"{mean_over(by_test, metric).value:+.1f}" for metric in AGAINST}
        worst = f"{max(spreads['brier'].value for spreads in by_test):+.1f}"
        cells = (f"{weight:.1f}", f"{temperature:.1f}", means["accuracy"], means["brier"], worst, means["ece"])
        print(f"| {' | '.join(cells)} |", flush=True)


def print_home(lens: Lens, early: Sequence[Lens], model: Model, args: argparse.Namespace) -> dict[str, Row]:
    """Print the scores of test questions of training tasks, and return the lens's answers by task."""
    print(
        "\nAt home\n\n| test | answers | accuracy | - base | Brier | - T | ECE | - T |\n|---|---|---|---|---|---|---|---|"
    )
    used: dict[str, Row] = {}
    for source in (one for one in args.home if is_trained(one, args)):
        for row in rows_of(lens, early, fresh_of(lens, model, source, args), ()):
            cells = []
            for metric, spread in differences(row).items():
                cells += [f"{100 * score(row.found, metric):.1f}", str(spread)]
            print(f"| {source} | {row.name} | {' | '.join(cells)} |", flush=True)
            if row.name == USED:
                used[source.partition(":")[0]] = row
    return used


# -------------------------------------------------------------------------------------------------------------- the bars

NO_LABELS = (Bar("no labels, mean accuracy - base", 8.0, at_least=True), Bar("no labels, mean Brier - T", -2.5))
NO_LABELS_WORST = Bar("no labels, worst task's Brier - T", 1.0)
NO_LABELS_ECE = Bar("no labels, mean ECE - T, upper end of the interval", 2.0)
FIFTY = (Bar("50 labels, mean Brier - T", -3.5), Bar("50 labels, worst task's Brier - T", 0.5))
FIVE = Bar("5 labels, mean Brier - that without labels", 0.0)
AT_HOME = {
    ("commonsense_qa_cloze", "brier"): Bar("home, Brier of CommonsenseQA", 68.3),
    ("arc_easy", "brier"): Bar("home, Brier of ARC-Easy", 51.6),
    ("arc_easy", "ece"): Bar("home, ECE of ARC-Easy", 8.0),
}


def print_bars(found: Found, at_home: dict[str, Row]) -> None:
    """Print a line for each bar of which something was measured."""
    print()
    for (task, metric), bar in AT_HOME.items():
        if task in at_home:
            print(bar.line(100 * score(at_home[task].found, metric)))
    if not (without := found.get(USED)):
        return
    print(NO_LABELS[0].line(mean_over(without, "accuracy").value))
    print(NO_LABELS[1].line(mean_over(without, "brier").value))
    print(NO_LABELS_WORST.line(max(spreads["brier"].value for spreads in without)))
    print(NO_LABELS_ECE.line(mean_over(without, "ece").interval[1]))
    fifty, five = found.get(with_labels(50), []), found.get(with_labels(5), [])
    if len(fifty) == len(without):
        print(FIFTY[0].line(mean_over(fifty, "brier").value))
        print(FIFTY[1].line(max(spreads["brier"].value for spreads in fifty)))
    if len(five) == len(without):
        print(FIVE.line(mean_over(five, LABELLED).value))


if __name__ == "__main__":
    main()
