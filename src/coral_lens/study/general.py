"""The lens that ships: how it is fitted, calibrated, measured and written, so that everybody can make the same one.

    python -m coral_lens.study.general OUT        or `make lens`

It learns from questions of five benchmarks whose licences let it be passed on, asked as a client of `coral serve` asks: a text
and options, without the template of a task. What it is measured on was neither fitted nor calibrated on. Arithmetic, batches
and seeds are fixed, so that one machine makes the same bytes twice; another one may round otherwise, and that is then said.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool

from coral_lens.data.leaks import guard_of
from coral_lens.data.questions import load_questions
from coral_lens.data.splits import sample
from coral_lens.engine.activations import ActivationStore, JoinedStore, Subset
from coral_lens.engine.extract import extract
from coral_lens.engine.planned import Extraction, all_layers
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.lens.calibrate import calibrate_on
from coral_lens.lens.fit import fit_store
from coral_lens.lens.folder import CARD, GENERAL, RECORD, load_lens, save_lens
from coral_lens.lens.rules import temperature_on
from coral_lens.lens.settings import FitSettings, Guarantees
from coral_lens.metrics.conformal import abstains, prediction_sets
from coral_lens.metrics.scores import measure
from coral_lens.records import UNNAMED, Question, Scored, predictions_of
from coral_lens.storage.files import SEAL, read_json
from coral_lens.storage.progress import Bar, shown, silent

if TYPE_CHECKING:
    from coral_lens.engine.model import Model

SEED = 0
TOKEN_BUDGET = 1024
"""Tokens of a batch; fixed, because the timing of a machine must not decide about bytes."""
GUARANTEES = Guarantees(coverage=0.9, risk=0.4)
"""A lower risk than this was tried first, 0.3 and 0.35: the held-out questions cannot show it of so small a model."""
METHODS = {"base": "model alone", "temperature": "temperature"}
"""What stands beside the lens in its card."""


@dataclass(frozen=True)
class Source:
    """A benchmark, and how many of its questions are drawn for what."""

    name: str
    """TASK:SPLIT, of the embedded data."""
    train: int = 0
    calibrate: int = 0
    test: int = 0


SOURCES = (
    Source("commonsense_qa_cloze:validation", 800, 160, 260),
    Source("openbookqa:validation", 320, 80, 100),
    Source("piqa:validation", 600, 160, 250),
    Source("hellaswag:validation", 450, 120, 200),
    Source("mmlu:validation", 650, 160, 250),
    Source("arc_easy:validation", test=300),
    Source("arc_challenge:validation", test=299),
    Source("sciq:validation", test=250),
    Source("social_iqa:validation", test=250),
)
"""Trained on are only data under MIT, Apache-2.0 and AFL-3.0; the others, which say what it is worth elsewhere, are read only."""


@dataclass(frozen=True)
class Parts:
    """Questions by what they are for."""

    train: list[Question]
    calibrate: list[Question]
    tests: dict[str, list[Question]]
    """By the name of their source."""


# ------------------------------------------------------------------------------------------------------------ questions


def general_questions(sources: Sequence[Source] = SOURCES) -> Parts:
    """Draw the questions of each part; training questions that come again in another part are dropped."""
    train: list[Question] = []
    calibrate: list[Question] = []
    tests: dict[str, list[Question]] = {}
    for source in sources:
        questions = [q for q in map(as_asked, load_questions(source.name)) if len(set(q.options)) == len(q.options)]
        drawn = sample(questions, source.train + source.calibrate + source.test, seed=SEED)
        order = np.random.default_rng(SEED).permutation(len(drawn))
        mixed = [drawn[i] for i in order]
        tests |= {source.name: [unnamed(q) for q in mixed[: source.test]]} if source.test else {}
        calibrate += [unnamed(q) for q in mixed[source.test : source.test + source.calibrate]]
        train += mixed[source.test + source.calibrate : source.test + source.calibrate + source.train]
    others = [q for questions in (calibrate, *tests.values()) for q in questions]
    return Parts(guard_of(others).find(train).kept(train), calibrate, tests)


def as_asked(question: Question) -> Question:
    """Return a question of a benchmark as a client asks it: its text and options, for the lens's own template."""
    wording = question.wording
    task = "mmlu" if question.task.startswith("mmlu_") else question.task
    passage, _, text = wording.stem.rpartition("\nQuestion: ")
    return Question(
        question.id,
        question.id,
        text.strip(),
        tuple(option.strip() for option in wording.listed or question.options),
        question.answer,
        passage=passage.strip(),
        task=task,
        split=question.split,
    )


def unnamed(question: Question) -> Question:
    """Return a question that names no task, as those of requests: the lens is then believed as it is there."""
    return replace(question, task=UNNAMED, split="")


# ------------------------------------------------------------------------------------------------------------- the work


def make_general(model: Model, out: Path, *, sources: Sequence[Source] = SOURCES, bar: Bar = silent) -> Lens:
    """Fit, calibrate, measure and write the lens; states are kept in OUT.work, where an interrupted run goes on."""
    parts, work = general_questions(sources), out.with_name(f"{out.name}.work")

    def states(questions: Sequence[Question], name: str) -> ActivationStore:
        extraction = Extraction(all_layers(model), token_budget=TOKEN_BUDGET, packing="tree")
        with bar(name, len(questions), "questions") as advance:
            return extract(model, questions, work / name.replace(":", "-"), extraction=extraction, progress=advance)

    lens = fit_store(states(parts.train, "train"), FitSettings(seed=SEED), bar=bar)
    held_out = states(parts.calibrate, "calibrate")
    first = np.random.default_rng(SEED).permutation(len(held_out.questions)) < len(held_out.questions) // 2
    lens, _ = calibrate_on(warmed(lens, held_out, first), JoinedStore([Subset(held_out, ~first)]), GUARANTEES)
    lens = lens.public()
    save_lens(lens, out, more=measured_section(lens, parts, states))
    return lens


def warmed(lens: Lens, store: Scored, mask: Bool[np.ndarray, " question"]) -> Lens:
    """Return the lens with a temperature for questions that name no task, on which its caution makes it too unsure.

    Trap: it takes the place of the one that the lens has learned, which must not have been applied already.
    """
    assert lens.trust is not None, "a listwise lens has a trust"
    bare = replace(lens, trust=replace(lens.trust, temperature=1.0))
    temperature = temperature_on(bare.apply(store)[lens.method], store.table, mask)
    return replace(lens, trust=replace(lens.trust, temperature=temperature))


def measured_section(lens: Lens, parts: Parts, states: Callable[[Sequence[Question], str], Scored]) -> str:
    """Return the part of the card that says what the lens is worth on questions that it has never seen."""
    trained = {source.split(":")[0] for source in lens.training.tasks}
    rows = []
    for name, questions in parts.tests.items():
        where = "other questions of it were trained on" if name.split(":")[0] in trained else "never trained on"
        rows.append(f"| {name}, {where} | {measured_row(lens, states(questions, name))} |")
    assert lens.sets is not None
    assert lens.abstention is not None
    return f"""
## Measured on questions that it has never seen

It comes with coral-lens as `general`: `coral predict` and `coral serve` use it where no lens is named.

Asked as a request asks, without the name of a task, so that the lens is believed as it is elsewhere. Values × 100, each for
the model alone, temperature scaling and the lens; `make lens` prints them. Sets are those of coverage {lens.sets.coverage:g};
of the questions that it does not abstain on, at most a share of {lens.abstention.risk:g} was to be answered wrongly. Both were
promised for a mixture of the benchmarks above, and hold for each of them, and elsewhere, only as far as these columns say.

| questions | number | accuracy | Brier | ECE | right option in the set | options in the set | answered | of these wrong |
|---|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}

Yes-no questions and scales are not among what it learned from: on options such as yes and no it leaves the model's own
answers, scaled by one temperature. English only. Terms: the model is Apache-2.0, the lens is given under Apache-2.0; it was
fitted on data under the terms in the first table.
"""


def measured_row(lens: Lens, store: Scored) -> str:
    """Return the cells of a test set."""
    probs, options, answers = lens.apply(store), store.table.options, store.table.answers
    methods = [*METHODS, lens.method]
    scores = [measure(predictions_of(m, store, probs[m]), n_boot=1).scores for m in methods]
    q = probs[lens.method]
    assert lens.sets is not None
    assert lens.abstention is not None
    in_set = prediction_sets(lens.sets, q, options)
    given = ~abstains(lens.abstention, options.max(q))
    wrong = options.top(q) != answers
    cells = [" / ".join(f"{100 * s[metric].value:.1f}" for s in scores) for metric in ("accuracy", "brier", "ece")]
    covered = 100 * in_set[options.row(answers)].mean()
    size = in_set.sum() / len(options)
    error = f"{100 * wrong[given].mean():.1f}" if given.any() else "none"
    return " | ".join(
        [str(len(options)), *cells, f"{covered:.1f}", f"{size:.1f} of {len(q) / len(options):.1f}",
         f"{100 * given.mean():.1f}", error]
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- is it the same?


def compared(made: Path, shipped: Path = GENERAL) -> str:
    """Say in one line whether a lens that was just made is the one that ships, to the byte."""
    if not (shipped / RECORD).exists():
        return f"There is no lens in {shipped} to compare with."
    names = sorted(path.name for path in shipped.iterdir())
    others = [n for n in names if not (made / n).exists() or (made / n).read_bytes() != (shipped / n).read_bytes()]
    if not others:
        return f"The same bytes as the lens that ships ({str(read_json(shipped / RECORD)[SEAL])[:12]})."
    if others == [CARD]:
        return "The same lens as the one that ships, to the byte; its card reads otherwise."
    one, other = load_lens(made), load_lens(shipped)
    if one.layers != other.layers:
        return f"Another lens than the one that ships: it reads layer {one.layers[0]} in place of {other.layers[0]}."
    weights = [lens.correction.folded().probe.tensors()["probe.weight"].double().numpy() for lens in (one, other)]
    apart = np.linalg.norm(weights[0] - weights[1]) / np.linalg.norm(weights[1])
    return (
        f"Not the same bytes as the lens that ships ({', '.join(others)}), whose weights it is away from by {apart:.1e} of their "
        "length: another machine or another version of a package rounds otherwise."
    )


def main(arguments: Sequence[str]) -> None:
    """Make the lens in a folder, and say whether it is the one that ships."""
    from coral_lens.engine.loading import load_model

    if len(arguments) != 1:
        raise CoralError("Give the folder to write: python -m coral_lens.study.general OUT")
    out = Path(arguments[0])
    lens = make_general(load_model("smollm2", dtype="float32", device="cpu"), out, bar=shown)
    print((out / CARD).read_text("utf-8"))
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{lens.name}: {size:,} bytes in {out}\n{compared(out)}")


if __name__ == "__main__":
    main(sys.argv[1:])
