"""Every lens of the table, fitted on one training mixture and measured on held-out and on transfer tasks.

    python bench/lenses.py --data DIR --work DIR

Training: 2,500 CommonsenseQA questions (asked as cloze) and all of ARC-Easy's. Test: their held-out sets, and as transfer
ARC-Challenge, OpenBookQA and 1,000 questions of HellaSwag. Prints Markdown tables: each score with its 95 % interval, and for
each lens the paired difference to temperature scaling. Networks are fitted under five seeds; their spread stands beside
them. States are kept in --work, and an interrupted run goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from coral_lens.data.leaks import question_keys
from coral_lens.data.questions import load_questions
from coral_lens.data.settings import TaskOptions
from coral_lens.data.splits import sample
from coral_lens.engine.activations import ActivationStore, JoinedStore, Subset
from coral_lens.engine.extract import extract
from coral_lens.engine.loading import load_model
from coral_lens.engine.planned import Extraction, all_layers
from coral_lens.lens.artefact import Lens
from coral_lens.lens.choose import Recipe, fit_recipe
from coral_lens.lens.fit import fit_store, training_data
from coral_lens.lens.folder import load_lens
from coral_lens.lens.settings import FitSettings
from coral_lens.metrics.comparisons import paired_difference
from coral_lens.metrics.scores import score
from coral_lens.records import Predictions
from coral_lens.storage.files import file_name
from coral_lens.storage.progress import questions_bar, shown

TRAIN = {"commonsense_qa_cloze:train": 2500, "arc_easy:train": None}
TEST = {
    "commonsense_qa_cloze:validation": None,
    "arc_easy:test": None,
    "arc_challenge:test": None,
    "openbookqa:test": None,
    "hellaswag:validation": 1000,
}
COLUMNS = ("accuracy", "ece", "brier", "nll")
SEEDS = 5


@dataclass(frozen=True)
class Row:
    """One lens of the comparison."""

    name: str
    settings: FitSettings
    seeds: int = 1


ROWS = (
    Row("CORAL, ridge", FitSettings(lens="ridge")),
    Row("CORAL, linear", FitSettings(lens="linear"), SEEDS),
    Row("CORAL, MLP (the paper's)", FitSettings(lens="mlp"), SEEDS),
    Row("CORAL, ridge, top 3 layers", FitSettings(lens="ridge", top_layers=3)),
    Row("CORAL, ridge, authors' inputs", FitSettings(lens="ridge", inputs=("centred", "rank"))),
    Row("CORAL, ridge, then temperature", FitSettings(lens="ridge", then_temperature=True)),
    Row("CORAL, ridge, on scaled base", FitSettings(lens="ridge", scale_base=True)),
    Row("listwise", FitSettings(lens="listwise")),
    Row("listwise MLP", FitSettings(lens="listwise-mlp"), SEEDS),
    Row("listwise ensemble", FitSettings(lens="ensemble")),
    Row("auto", FitSettings(lens="auto")),
)


def main() -> None:
    """Extract, fit, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--base", default="token", choices=("sum", "token", "char"))
    parser.add_argument("--rows", default="", help="only these rows, by their full names with ; between them")
    args = parser.parse_args()
    stores = {name: states(name, n, args) for name, n in (TRAIN | TEST).items()}
    train, dropped = mixture([stores[n] for n in TRAIN], [stores[n] for n in TEST])
    print(f"{len(train.questions)} training questions; {dropped} more were dropped because a test set has them too.\n")
    rows = [row for row in ROWS if not args.rows or row.name in args.rows.split(";")]
    fitted = {}
    for row in sorted(rows, key=lambda r: (r.settings.lens == "auto", r.seeds)):  # the slow ones last
        fitted[row.name] = lenses(row, train, args)
        print(f"- {row.name}: {fitted[row.name][0].name}", flush=True)
    fitted = {row.name: fitted[row.name] for row in rows}
    for name in TEST:
        print_table(name, stores[name], fitted)


def states(name: str, n: int | None, args: argparse.Namespace) -> ActivationStore:
    """Return the store of a task, extracting what is missing."""
    model = load_model("smollm2")
    questions = load_questions(name, TaskOptions(data_dir=args.data))
    questions = sample(questions, n, seed=0) if n else list(questions)
    with questions_bar(name, len(questions)) as advance:
        extraction = Extraction(layers=all_layers(model))
        return extract(model, questions, args.work / file_name(name), extraction=extraction, progress=advance)


def mixture(train: Sequence[ActivationStore], test: Sequence[ActivationStore]) -> tuple[JoinedStore, int]:
    """Join the training stores without questions that a test set has too."""
    known = np.concatenate([question_keys(s.questions) for s in test])
    parts = [Subset(s, ~np.isin(question_keys(s.questions), known)) for s in train]
    return JoinedStore(parts), sum(int((~p.keep).sum()) for p in parts)


def lenses(row: Row, train: JoinedStore, args: argparse.Namespace) -> list[Lens]:
    """Return the lens of a row, fitted before or now, and for a network the same recipe under other seeds."""
    settings = replace(row.settings, base=args.base)
    folder = args.work / "lenses" / file_name(f"{row.name} {args.base}")
    found = []
    for seed in range(row.seeds):
        at = folder / str(seed)
        if not (at / "lens.json").exists():
            lens = (
                fit_store(train, settings, journal=folder / "search.jsonl", bar=shown)
                if seed == 0
                else reseeded(found[0], train, seed)
            )
            lens.save(at)
        found.append(load_lens(at))
    return found


def reseeded(lens: Lens, train: JoinedStore, seed: int) -> Lens:
    """Fit the network of a lens again from another start, with layer, setting and gamma as they were chosen."""
    settings = FitSettings(lens=lens.kind, base=lens.base, temper=False, layers=lens.layers)
    data, _ = training_data(train, settings)
    recipe = Recipe(lens.kind, lens.layers, lens.correction.inputs, lens.trace.chosen.settings, seed)
    correction = fit_recipe(data, recipe, ~data.rounds[0], data.rounds[0])
    strength = lens.trace.chosen.gamma * correction.scale
    return replace(lens, correction=replace(correction, scale=1.0), gamma=strength)


def print_table(name: str, store: ActivationStore, fitted: dict[str, list[Lens]]) -> None:
    """Print base, temperature and every lens on one test set."""
    print(f"\n## {name}, {len(store.questions):,} questions\n")
    print("| method | accuracy | ECE | Brier | NLL |\n|---|---|---|---|---|")
    first = next(iter(fitted.values()))[0].predictions_on(store)
    for method in ("base", "temperature"):
        print_row(method, [first[method]], first["temperature"])
    for row, some in fitted.items():
        found = [lens.predictions_on(store) for lens in some]
        for method in dict.fromkeys((some[0].plain_method, some[0].method)):
            label = f"{row}, tempered" if method.endswith("tempered") else row
            print_row(label, [f[method] for f in found], first["temperature"])


def print_row(label: str, predictions: Sequence[Predictions], control: Predictions) -> None:
    """Print the mean over seeds with its spread, and the paired difference of the first seed to temperature."""
    cells = []
    for metric in COLUMNS:
        values = [100 * score(p, metric) for p in predictions]
        cell = f"{np.mean(values):.1f}"
        if len(values) > 1:
            cell += f" ± {np.std(values, ddof=1):.1f}"
        if label not in ("base", "temperature"):
            d = paired_difference(predictions[0], control, metric)
            cell += f" ({100 * d.value:+.1f}: {100 * d.low:+.1f} to {100 * d.high:+.1f})"
        cells.append(cell)
    print(f"| {label} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
