"""Open answers: what a lens is worth beside the known ways to tell a right answer from a wrong one, and what it costs.

    python bench/ask.py --work DIR --model MODEL --train 600 --test 500

Questions are TriviaQA's and NQ-open's, from the embedded data, divided under a fixed seed. For each set a lens is fitted on the
training questions and what the model itself writes to them, and measured on the test questions: at home, and on the other set
(transfer). Prints Markdown, which is also in WORK/table.md: accuracy, ECE with its floor, Brier score of "the answer is right",
AUROC and the risk at 50 % coverage, times 100; paired differences with 95 % intervals; whether the bars are met; and what a
question costs beside one greedy answer. A question to which the model writes no candidate is a wrong answer of every method.
Texts, scores and states are kept in WORK, and an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from coral_lens.data.assets import embedded_data
from coral_lens.data.open_questions import OpenQuestion
from coral_lens.data.same_answer import answer_key
from coral_lens.engine.activations import ScoredShards
from coral_lens.engine.candidates import STOP, as_choice, write_candidates
from coral_lens.engine.extract import extract
from coral_lens.engine.generation import generate_answers
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Extraction, all_layers
from coral_lens.engine.prompts import render
from coral_lens.engine.settings import GenerationSettings, Sampling
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.lens.asking import STATES, TEXTS, ask
from coral_lens.lens.fit import load_or_fit
from coral_lens.lens.open_part import CandidateStates
from coral_lens.lens.rules import base_probs
from coral_lens.lens.settings import FitSettings
from coral_lens.methods.open_answers import (
    SIMPLE,
    Platt,
    SureAnswers,
    answers_of_lens,
    by_p_true,
    fit_platt,
    predictions_of_answers,
)
from coral_lens.metrics.answered import answered
from coral_lens.metrics.comparisons import paired_difference
from coral_lens.metrics.scores import measure
from coral_lens.records import Predictions
from coral_lens.storage.progress import questions_bar, shown

SEED = 0
METRICS = ("accuracy", "ece", "brier_top1", "auroc", "risk_half")
HEADS = ("accuracy ↑", "ECE ↓ (floor)", "Brier ↓", "AUROC ↑", "risk at 50 % ↓")
AUROC_BAR, ECE_BAR = 0.03, 0.06
TIMED = 32
"""Questions whose cost is measured."""
Rows = dict[str, Predictions]


# ------------------------------------------------------------------------------------------------------------ questions


def triviaqa(row: dict[str, Any]) -> list[str]:
    """Return the right answers of a row of TriviaQA."""
    return [row["answer"]["value"], *row["answer"]["aliases"]]


def nq_open(row: dict[str, Any]) -> list[str]:
    """Return the right answers of a row of NQ-open."""
    return list(row["answer"])


SETS: dict[str, tuple[str, Callable[[dict[str, Any]], list[str]]]] = {
    "triviaqa": ("trivia_qa/rc.wikipedia.nocontext/validation", triviaqa),
    "nq_open": ("nq_open/none/validation", nq_open),
}


def questions_of(name: str, n: int) -> list[OpenQuestion]:
    """Return n questions of a set, drawn under the seed; a question that comes again is left out."""
    from datasets import load_from_disk

    folder, answers = SETS[name]
    if (data := embedded_data()) is None:
        raise CoralError("The embedded data are not there; run `coral assets`.")
    rows = {answer_key(row["question"]): row for row in load_from_disk(str(data / folder))}
    order = np.random.default_rng(SEED).permutation(len(rows))[:n]
    chosen = [list(rows.values())[i] for i in order]
    if len(chosen) < n:
        raise CoralError(f"{name} has {len(chosen)} questions, and {n} are asked for.")
    return [
        OpenQuestion(f"{name}-{i}", row["question"], tuple(a for a in answers(row) if answer_key(a)), task=name)
        for i, row in zip(order, chosen, strict=True)
    ]


# ------------------------------------------------------------------------------------------------------------ one set


@dataclass(frozen=True)
class Part:
    """The training or the test questions of a set, written and scored."""

    store: ScoredShards
    left_out: tuple[str, ...]
    """Ids of questions without a candidate."""
    p_true: SureAnswers

    @property
    def methods(self) -> list[SureAnswers]:
        """The answers of all baselines."""
        return [*(answer(self.store) for answer in SIMPLE), self.p_true]

    def predictions(self, answers: SureAnswers, platt: Platt | None = None) -> Predictions:
        """Return answers as Predictions; questions without a candidate are wrong answers that nobody believes."""
        known = predictions_of_answers(answers, self.store, platt)
        lost = answered(known.method, self.left_out, np.zeros(len(self.left_out)), np.zeros(len(self.left_out), bool))
        return replace(
            known,
            ids=known.ids + lost.ids,
            answers=np.concatenate([known.answers, lost.answers]),
            offsets=np.concatenate([known.offsets, known.offsets[-1] + lost.offsets[1:]]),
            probs=np.concatenate([known.probs, lost.probs]),
        )


def part_of(model: Model, questions: Sequence[OpenQuestion], sampling: Sampling, folder: Path) -> Part:
    """Have the model write, score what it wrote, and ask it whether its most frequent answers are right."""
    with questions_bar(f"{folder.name}: writing", len(questions)) as advance:
        written = write_candidates(model, questions, sampling, place=folder / TEXTS, progress=advance)
    with questions_bar(f"{folder.name}: scoring", len(written.questions)) as advance:
        extraction = Extraction(layers=all_layers(model))
        store = extract(model, written.questions, folder / STATES, extraction=extraction, progress=advance)
    with questions_bar(f"{folder.name}: P(True)", len(store.questions)) as advance:
        p_true = by_p_true(model, store, folder=folder / "p-true", progress=advance)
    scored = {q.id for q in store.questions}
    return Part(store, tuple(q.id for q in questions if q.id not in scored), p_true)


def rows_of(train: Part, test: Part, lens: Lens) -> Rows:
    """Return the answers of every method on test questions; what is fitted was fitted on the training questions."""
    rows: list[Predictions] = []
    for fitted, answers in zip(train.methods, test.methods, strict=True):
        rows += [test.predictions(answers), test.predictions(answers, fit_platt(fitted))]
    weighed = base_probs(test.store.table, lens.base_rule)
    rows.append(test.predictions(answers_of_lens("weighing, without states", weighed, test.store)))
    probs = lens.apply(test.store)
    rows.append(test.predictions(answers_of_lens("lens", probs[lens.method], test.store)))
    return {row.method: row for row in rows}


# ------------------------------------------------------------------------------------------------------------- tables


def table_of(title: str, rows: Rows) -> list[str]:
    """Return the scores of every method, times 100, with 95 % intervals, and the paired differences of the lens."""
    lines = [f"\n### {title}\n", f"| | {' | '.join(HEADS)} |", f"|---|{'---|' * len(HEADS)}"]
    for name, row in rows.items():
        found = measure(row, more=("risk_half",))
        cells = []
        for metric in METRICS:
            s = found.scores[metric]
            floor = f" ({100 * found.ece_floor:.1f})" if metric == "ece" else ""
            cells.append(f"{100 * s.value:.1f}{floor} [{100 * s.low:.1f}, {100 * s.high:.1f}]")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, *differences(rows), *bars(rows)]


def differences(rows: Rows) -> list[str]:
    """Return the lens against the best baseline in AUROC, and against the most frequent candidate."""
    lines = []
    for other in dict.fromkeys((best_baseline(rows), "frequency + temperature", "weighing, without states")):
        cells = []
        for metric in METRICS:
            d = paired_difference(rows["lens"], rows[other], metric)
            cells.append(f"{100 * d.value:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]")
        lines.append(f"| lens − {other} | {' | '.join(cells)} |")
    return lines


def best_baseline(rows: Rows) -> str:
    """Return the baseline with the highest AUROC, on these very questions: the hardest to beat."""
    names = [name for name in rows if name not in ("lens", "weighing, without states")]
    return max(names, key=lambda name: measure(rows[name], n_boot=1).scores["auroc"].value)


def bars(rows: Rows) -> list[str]:
    """Say of each bar whether it is met."""
    best = best_baseline(rows)
    auroc = paired_difference(rows["lens"], rows[best], "auroc").value
    ece = measure(rows["lens"], n_boot=1).scores["ece"].value
    behind = paired_difference(rows["lens"], rows["frequency"], "accuracy")
    verdicts = (
        (f"AUROC {100 * auroc:+.1f} against the best baseline, {best} (wanted: +3.0)", auroc >= AUROC_BAR),
        (f"ECE {100 * ece:.1f} (wanted: at most 6.0)", ece <= ECE_BAR),
        (f"accuracy {100 * behind.value:+.1f} against the most frequent candidate", behind.high >= 0),
    )
    return ["", *(f"- {'met' if met else 'MISSED'}: {what}" for what, met in verdicts)]


def cost_lines(model: Model, lens: Lens, questions: Sequence[OpenQuestion], sampling: Sampling) -> list[str]:
    """Return what a question costs: one greedy answer, writing the candidates, and the whole of `ask`."""
    prompts = [render(as_choice(q, ("?",), (0, 0), sampling), lens.style, model).contexts[0] for q in questions]
    greedy = GenerationSettings(max_new_tokens=sampling.max_tokens)
    seconds = {
        "one greedy answer": timed(lambda: generate_answers(model, prompts, settings=greedy, stop=STOP)),
        f"{sampling.candidates} candidates": timed(
            lambda: generate_answers(model, prompts, settings=sampling.generation(), stop=STOP)
        ),
        "ask: candidates, scores, lens": timed(lambda: ask(lens, model, questions)),
    }
    first = next(iter(seconds.values()))
    lines = [
        f"\n### Cost of a question, {len(questions)} of them at a time\n",
        "| | seconds | times |",
        "|---|---|---|",
    ]
    return [*lines, *(f"| {name} | {s / len(questions):.2f} | {s / first:.1f} |" for name, s in seconds.items())]


def timed(work: Callable[[], object]) -> float:
    """Return how long something takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# --------------------------------------------------------------------------------------------------------------- main


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--train", type=int, default=600, help="training questions of each set")
    parser.add_argument("--test", type=int, default=500, help="test questions of each set")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--candidates", type=int, default=Sampling.candidates)
    parser.add_argument("--temperature", type=float, default=Sampling.temperature)
    parser.add_argument("--lens", default="listwise", help="the kind of lens, as of `coral fit --lens`")
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    sampling = Sampling(candidates=args.candidates, temperature=args.temperature)
    model = load_model(args.model, dtype=args.dtype)
    questions = {name: questions_of(name, args.train + args.test) for name in args.sets}

    @cache
    def part(name: str, use: str) -> Part:
        chosen = questions[name][: args.train] if use == "train" else questions[name][args.train :]
        return part_of(model, chosen, sampling, args.work / f"{name}-{use}")

    @cache
    def lens(name: str) -> Lens:
        store = CandidateStates(part(name, "train").store, sampling)
        return load_or_fit(store, FitSettings(lens=args.lens), args.work / f"{name}-{args.lens}" / "lens", bar=shown)

    lines = [
        f"{args.model}, {args.train} training and {args.test} test questions of each set, {sampling.candidates} candidates "
        f"at temperature {sampling.temperature:g}; times 100, 95 % intervals."
    ]
    for home in args.sets:
        for name in args.sets:
            train, test = part(home, "train"), part(name, "test")
            rows = rows_of(train, test, lens(home))
            kind = "at home" if name == home else f"the lens and all temperatures fitted on {home}"
            lost = f", {len(test.left_out)} without a candidate" if test.left_out else ""
            lines += [*table_of(f"{name}, {kind}{lost}", rows), f"- {lens(home).name}"]
            write(args.work, lines)
    first = args.sets[0]
    lines += cost_lines(model, lens(first), questions[first][args.train :][:TIMED], sampling)
    write(args.work, lines)
    print("\n".join(lines))


def write(work: Path, lines: Sequence[str]) -> None:
    """Keep what is known so far."""
    (work / "table.md").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
