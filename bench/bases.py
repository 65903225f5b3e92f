"""Which score makes the best base probability: the sum, the mean per token or per character, or pmi?

    python bench/bases.py --data DIR TASK:SPLIT=N ...

Prints for each set and rule the accuracy and the Brier score, each rule by the temperature that suits it on these very questions
(one number), x 100, and paired differences to `token` with 95 % intervals. No state is kept.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import TaskOptions
from coral_lens.engine.activations import ScoredShards
from coral_lens.engine.extract import score_questions
from coral_lens.engine.loading import load_model
from coral_lens.engine.planned import Extraction
from coral_lens.lens.rules import BASE_SCORES, apply_temperature, base_probs, temperature_on
from coral_lens.metrics.comparisons import paired_difference
from coral_lens.metrics.scores import score
from coral_lens.records import Predictions, predictions_of

SETS = (
    "arc_challenge:test=500",
    "openbookqa:test=500",
    "hellaswag:validation=300",
    "commonsense_qa_cloze:validation=500",
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", default=SETS)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--data", type=Path, default=None)
    args = parser.parse_args()
    model = load_model(args.model, dtype=args.dtype)
    print("| set | base | accuracy | accuracy - token | Brier | Brier - token |\n|---|---|---|---|---|---|")
    for source in args.sets:
        name, _, limit = source.partition("=")
        questions = load_questions(name, TaskOptions(limit=int(limit) if limit else None, data_dir=args.data))
        with score_questions(model, questions, Extraction(layers=(), neutral=True)) as store:
            rows = {rule: scaled(store, rule) for rule in BASE_SCORES}
        for rule, found in rows.items():
            cells = [
                f"{100 * score(found, m):.1f} | {difference(found, rows['token'], m)}" for m in ("accuracy", "brier")
            ]
            print(f"| {source} | {rule} | {' | '.join(cells)} |", flush=True)


def scaled(store: ScoredShards, rule: str) -> Predictions:
    """Return the base probabilities of a rule, by temperature."""
    p, table = base_probs(store.table, rule), store.table
    temperature = temperature_on(p, table, np.ones(len(table), dtype=bool))
    return predictions_of(rule, store, apply_temperature(p, table.options, temperature=temperature))


def difference(found: Predictions, control: Predictions, metric: str) -> str:
    """Return a paired difference with its interval."""
    d = paired_difference(found, control, metric)
    return f"{100 * d.value:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]"


if __name__ == "__main__":
    main()
