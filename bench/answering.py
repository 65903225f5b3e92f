"""Does a lens help a model that can answer? Accuracy and trust at home, on other tasks, and by the number of labels.

    python bench/answering.py extract --model MODEL --data DIR --work DIR
    python bench/answering.py tables --work DIR [--other DIR] [--only NAME ...] [--layers 8-28]
    python bench/answering.py curve --work DIR [--layers 8-28]

`extract` keeps scores and states of every task in --work (see `answering_states.py`), and goes on where it was stopped. `tables`
fits the methods of a study on CommonsenseQA (letters) and RACE and prints a table for each task, from whatever is extracted so
far: at home CommonsenseQA and RACE, elsewhere the others. `curve` fits lenses on more and more questions of CommonsenseQA. Values
x 100; differences are paired, with 95 % intervals: of accuracy to the model as it is, of Brier score and NLL to temperature
scaling. --other is the --work of another model, whose states are then a control. Lenses and predictions are kept in --work. The
last lines say which bars the tempered lenses meet at home.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from answering_labels import adapted
from answering_states import Part, counted, extract_all, first, joined, parts_of, stored
from bars import Bar
from pooled import difference_in, score_of, together

from coral_lens.data.leaks import guard_of
from coral_lens.engine.activations import JoinedStore
from coral_lens.errors import CoralError
from coral_lens.lens.settings import FitSettings
from coral_lens.methods.controls import OtherStates, fit_disguised
from coral_lens.methods.entry import MethodEntry
from coral_lens.methods.interface import FitContext, QuestionSet
from coral_lens.methods.registry import read_method
from coral_lens.metrics.comparisons import paired_difference
from coral_lens.metrics.scores import score
from coral_lens.records import Predictions, Scored
from coral_lens.storage.files import file_name
from coral_lens.storage.settings import parse_layers
from coral_lens.study.predictions import Rows, method_folder, method_predictions

SIZES = {
    "train": (3000, "training questions of CommonsenseQA"),
    "home": (1221, "test questions of CommonsenseQA"),
    "race": (800, "training questions of RACE"),
    "test": (500, "test questions of every other task"),
    "each": (10, "test questions of each of MMLU's 57 subjects"),
    "curve": (5000, "training questions of CommonsenseQA at the end of the curve of labels"),
}
METHODS: tuple[dict[str, Any], ...] = (
    {"kind": "base"},
    {"kind": "temperature"},
    {"kind": "mlp", "name": "coral (mlp)"},
    {"kind": "ridge", "name": "coral (ridge)"},
    {"kind": "listwise"},
    {"kind": "listwise", "name": "less-letter", "read": "less-letter"},
    {"kind": "listwise", "name": "listed", "read": "listed"},
    {"kind": "listwise", "name": "context", "read": "context"},
    {"kind": "listwise", "name": "auto", "read": "auto"},
    {"kind": "listwise", "name": "early exit", "exit": "auto"},
    {"kind": "control-random", "lens": "listwise"},
    {"kind": "control-base", "lens": "listwise"},
    {"kind": "control-text", "lens": "listwise"},
)
OTHER = MethodEntry(kind="control-random", name="control-other")
"""Its states are not random: they are read from the folder of the other model."""
POINTS = (300, 600, 1200, 2400, 3600, 5000)
SMALL = 1200
"""Points of the curve up to here are means over several draws: a fit is cheap there, and chance large."""
CURVED = ("coral (ridge)", "listwise", "auto")
SHOWN = ("accuracy", "ece", "brier", "nll")
ABOVE_BASE = Bar("accuracy - base, lower end of the interval", -1.0, at_least=True)
BELOW_TEMPERATURE = {"brier": Bar("Brier - T", -2.5), "nll": Bar("NLL - T", -8.0)}
"""What a lens for a model that can answer is to reach at home."""
HEAD = "| answers | accuracy | - base | ECE | Brier | - T | NLL | - T |\n|---|---|---|---|---|---|---|---|"


def main() -> None:
    """Extract, or print tables."""
    args = arguments()
    parts = parts_of({name: getattr(args, name) for name in SIZES})
    if args.list:
        for part, new in counted(parts, args.data):
            print(f"{part.name}: {part.n} questions, {new} of them new")
    elif args.step == "extract":
        extract_all(parts, args.model, args.work, dtype=args.dtype, data=args.data)
    elif args.step == "tables":
        print_tables(args)
    else:
        print_curve(args)


def arguments() -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["extract", "tables", "curve"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--work", type=Path, required=True, help="folder of this model's states")
    parser.add_argument("--other", type=Path, default=None, help="folder of another model's states")
    parser.add_argument("--only", nargs="*", default=[], help="these methods beside base and temperature")
    parser.add_argument("--layers", type=parse_layers, default=None, help="layers to try, such as 8-28; by default all")
    parser.add_argument("--base", default="token", choices=["sum", "token", "char", "pmi"])
    parser.add_argument("--labels", type=int, default=50, help="labels that lenses are adapted by")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="networks are fitted under each")
    parser.add_argument("--draws", type=int, default=3, help="draws of the questions of a small point of the curve")
    parser.add_argument("--list", action="store_true", help="only count the questions")
    for name, (size, meaning) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"{meaning}; by default {size}")
    return parser.parse_args()


# ---------------------------------------------------------------------------------------------------------- the tables


def print_tables(args: argparse.Namespace) -> None:
    """Fit every method on what is there of CommonsenseQA and RACE, and print a table for each task that is there."""
    if args.base == "pmi":
        print("(left out: early exit, which has no base probabilities and so no pmi)")
    tests = list(test_sets(args))
    sources = [("commonsense_qa", args.train), ("race_question", args.race)]
    train = training_set(args, tests, [(task, n) for task, n in sources if n])
    named = ", ".join(f"{task} {n}" for task, n in counts(train.states).items())
    rows: Rows = {test.name: {} for test in tests}
    seeded: list[Rows] = []
    for entry in entries(args):
        for i, seed in enumerate(args.seeds if entry.kind == "mlp" else args.seeds[:1]):
            found = fitted(entry, seed, train, tests, args)
            for test in rows if i == 0 else ():
                rows[test] |= found[test]
            seeded += [found] if len(args.seeds) > 1 and entry.kind == "mlp" else []
    print(f"Fitted on {named}; base `{args.base}`.")
    for test in tests:
        print(f"\n{test.name}, {len(test.states.questions)} questions\n\n{HEAD}")
        rows[test.name] |= adapted(test, lenses(train, args), args.labels)
        for line in lines(rows[test.name]):
            print(line, flush=True)
    print_seeds(seeded, args.seeds)
    print_bars([test.name for test in tests if tasks_of(test) <= tasks_of(train)], rows, args.labels)


def test_sets(args: argparse.Namespace) -> Iterator[QuestionSet]:
    """Yield the test sets of which something is there, in the order of the parts."""
    parts = parts_of({name: getattr(args, name) for name in SIZES})
    for part in {p.name: p for p in parts if p.split != "train"}.values():
        try:
            yield question_set(part.name, stored(part, args.work))
        except CoralError as error:
            print(f"(left out: {error})")


def question_set(name: str, store: Scored) -> QuestionSet:
    """Return scored questions as a method sees them; nobody asks the model again."""

    def prompted() -> Any:
        raise CoralError("The tables are made of what was extracted; no method may run the model.")

    return QuestionSet(name, store, prompted)


def training_set(
    args: argparse.Namespace, tests: Sequence[QuestionSet], sizes: Sequence[tuple[str, int]]
) -> QuestionSet:
    """Return the training questions that are there, without those that a test holds too."""
    found = []
    for task, n in sizes:
        try:
            found.append(stored(Part(task, "train", n), args.work))
        except CoralError as error:
            print(f"(left out: {error})")
    store = joined(found)
    tested = [q for test in tests for q in test.states.questions]
    return question_set("train", store.take(~guard_of(tested).find(store.questions).mask))


def entries(args: argparse.Namespace) -> list[MethodEntry]:
    """Return the methods that are asked for."""
    every = [MethodEntry.model_validate(one) for one in METHODS] + ([OTHER] if args.other else [])
    wanted = [one for one in every if not args.only or one.row in ("base", "temperature", *args.only)]
    # a lens that exits early has no base probabilities, and is refused under pmi
    return [one for one in wanted if args.base != "pmi" or not one.options.keys() & {"exit", "exit_layer"}]


def fitted(
    entry: MethodEntry, seed: int, train: QuestionSet, tests: Sequence[QuestionSet], args: argparse.Namespace
) -> Rows:
    """Return what a method makes of every test set; what was made before is read."""
    context = context_of(entry, seed, train, args)
    if entry is not OTHER:
        return method_predictions(context, entry, read_method(entry), tests)
    predict = fit_disguised(context, FitSettings(), lambda _: lambda some: other_states(some, args.other))
    return {t.name: {f"{OTHER.row}{k}": p for k, p in predict(t).items()} for t in tests}


def context_of(entry: MethodEntry, seed: int, train: QuestionSet, args: argparse.Namespace) -> FitContext:
    """Return what a method is fitted with."""
    common = FitSettings(base=args.base, layers=args.layers, seed=seed)
    place = args.work / "methods" / f"{len(train.states.questions)}-{args.base}"
    if train.name != "train":
        place = place.with_name(f"{place.name}-{file_name(train.name)}")
    return FitContext(no_model, train, common, method_folder(place, entry, read_method(entry)) / str(seed))


def no_model() -> Any:
    """Refuse to load a model: everything was extracted before."""
    raise CoralError("The tables are made of what was extracted; no method may run the model.")


def other_states(some: QuestionSet, folder: Path) -> OtherStates:
    """Return questions with the states that another model has of them."""
    tasks = {("mmlu" if q.task.startswith("mmlu_") else q.task, q.split) for q in some.states.questions}
    others = joined([stored(Part(task, split, 10**6), folder) for task, split in sorted(tasks)])
    place = {q.id: i for i, q in enumerate(others.questions)}
    lost = [q.id for q in some.states.questions if q.id not in place]
    if lost:
        raise CoralError(f"{folder} has no states of question {lost[0]!r}; extract there as much as here.")
    rows = others.table.options.rows_of([place[q.id] for q in some.states.questions])
    return OtherStates(some.states, others.layers, lambda layer: others.layer(layer)[rows], {"other": str(folder.name)})


def lenses(train: QuestionSet, args: argparse.Namespace) -> dict[str, Path]:
    """Return where the lenses are that labels of a task adapt."""
    wanted = [one for one in entries(args) if one.row in ("listwise", "auto")]
    return {one.row: context_of(one, args.seeds[0], train, args).folder / "lens" for one in wanted}


def tasks_of(some: QuestionSet) -> set[str]:
    """Return the tasks of questions."""
    return {q.task for q in some.states.questions}


def counts(store: Scored) -> dict[str, int]:
    """Return how many questions are of each task."""
    names = [q.task for q in store.questions]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def lines(rows: dict[str, Predictions]) -> Iterator[str]:
    """Yield a line of the table for each way to answer; a row with labels is compared on the questions that are left to it."""
    for name, found in rows.items():
        base, cooled = (rows.get(f"{control} of {name}", rows[control]) for control in ("base", "temperature"))
        if " of " in name:
            continue
        cells = [f"{100 * score_of(found, 'accuracy'):.1f}", difference(found, base, "accuracy")]
        cells.append(f"{100 * score_of(found, 'ece'):.1f}")
        for metric in ("brier", "nll"):
            cells += [f"{100 * score_of(found, metric):.1f}", difference(found, cooled, metric)]
        yield f"| {name} | {' | '.join(cells)} |"


def difference(found: Predictions, control: Predictions, metric: str) -> str:
    """Return a paired difference with its interval."""
    d = difference_in(found, control, metric)
    return f"{100 * d.value:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]"


def print_seeds(seeded: Sequence[Rows], seeds: Sequence[int]) -> None:
    """Print one table of what networks give: the mean over seeds, and the lowest and the highest."""
    if not seeded:
        return
    print(f"\nNetworks, mean over the seeds {', '.join(map(str, seeds))} (lowest to highest)\n")
    print("| test | answers | accuracy | ECE | Brier | NLL |\n|---|---|---|---|---|---|")
    for test, rows in seeded[0].items():
        for row in rows:
            found = {m: [100 * score(one[test][row], m) for one in seeded] for m in SHOWN}
            cells = [f"{np.mean(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in found.values()]
            print(f"| {test} | {row} | {' | '.join(cells)} |", flush=True)


def print_bars(home: Sequence[str], rows: Rows, n_labels: int) -> None:
    """Print one line for each bar of each tempered lens at home, and what the rows with labels are there."""
    if home:
        print(f"\nAt home ({', '.join(home)}) `, {n_labels} labels` is an adapted lens: for that one task, by these")
        print(
            "labels, and it has forgotten its home. It says what labels are worth to a lens that comes from elsewhere."
        )
    for test in home:
        found = rows[test]
        for row in (name for name in found if name.endswith(" tempered") and not name.startswith("control-")):
            low = paired_difference(found[row], found["base"], "accuracy").low
            print(ABOVE_BASE.line(100 * low, of=f"{test}, {row}"))
            for metric, bar in BELOW_TEMPERATURE.items():
                d = paired_difference(found[row], found["temperature"], metric)
                print(bar.line(100 * d.value, of=f"{test}, {row}"), flush=True)


# ----------------------------------------------------------------------------------------------------------- the curve


def print_curve(args: argparse.Namespace) -> None:
    """Fit lenses on more and more questions of CommonsenseQA, and print what each gives on its test questions."""
    test = question_set("commonsense_qa:validation", stored(Part("commonsense_qa", "validation", args.home), args.work))
    everything = training_set(args, [test], [("commonsense_qa", args.curve)])
    most = len(everything.states.questions)
    print(f"Up to {SMALL} questions, means over {args.draws} draws of them; beyond that, and of all {most}, one.\n")
    print("| training questions " + HEAD.replace("\n", "\n|---"))
    for n in sorted({min(n, most) for n in POINTS}):
        several = range(args.draws if n < most and n <= SMALL else 1)
        draws = [curve_rows(drawn(everything, n, draw), test, args) for draw in several]
        for line in lines({row: together([one[row] for one in draws]) for row in draws[0]}):
            print(f"| {n} {line}", flush=True)


def drawn(everything: QuestionSet, n: int, draw: int) -> QuestionSet:
    """Return n training questions: the first ones, or those of another draw."""
    store = everything.states
    assert isinstance(store, JoinedStore)
    if draw == 0:
        return replace(everything, states=first(store, n))
    taken = np.random.default_rng(draw).permutation(len(store.questions)) < n
    return replace(everything, name=f"draw {draw}", states=store.take(taken))


def curve_rows(train: QuestionSet, test: QuestionSet, args: argparse.Namespace) -> dict[str, Predictions]:
    """Return what the lenses of the curve make of the test questions."""
    rows: dict[str, Predictions] = {}
    for entry in entries(args):
        if entry.row in ("base", "temperature", *CURVED):
            rows |= fitted(entry, args.seeds[0], train, [test], args)[test.name]
    return rows


if __name__ == "__main__":
    main()
