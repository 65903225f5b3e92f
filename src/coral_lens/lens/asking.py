"""Open questions: fit a lens on them, and ask them. The model writes, the one engine scores, the lens weighs.

OpenQuestion -> candidates (`engine.candidates`) -> scores and states -> lens -> OpenAnswer
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from coral_lens.data.open_questions import OpenQuestion, as_open
from coral_lens.data.own_files import apart_by_file
from coral_lens.data.settings import Style
from coral_lens.engine.activations import is_store, remove_store
from coral_lens.engine.candidates import write_candidates
from coral_lens.engine.extract import score_questions
from coral_lens.engine.planned import Extraction, all_layers, refuse_layers
from coral_lens.engine.settings import Sampling
from coral_lens.engine.texts import remove_texts
from coral_lens.errors import CoralError
from coral_lens.lens.fit import fit_store
from coral_lens.lens.open_answers import OpenAnswers, open_answers
from coral_lens.lens.open_part import CandidateStates
from coral_lens.lens.settings import FEWEST_QUESTIONS, FitSettings
from coral_lens.records import Question, Scored
from coral_lens.storage.progress import Bar, bar_of, silent

if TYPE_CHECKING:
    from coral_lens.engine.model import Model
    from coral_lens.lens.artefact import Lens

TEXTS, STATES = "texts", "states"
"""In a folder of work: what the model wrote, and the scores and states of it."""


def fit_open(
    model: Model,
    questions: Sequence[OpenQuestion],
    settings: FitSettings | None = None,
    *,
    sampling: Sampling | None = None,
    work_dir: str | Path | None = None,
    bar: Bar | bool = True,
) -> Lens:
    """Fit a lens on open questions with known answers, and on what the model itself writes as answers to them.

    A candidate is right if it equals a known answer by the rule that also merges candidates; if none does, `none of these` is
    right. With `work_dir` texts and states are kept there, and an interrupted or repeated fit reuses them.

        lens = coral_lens.fit_open(model, coral_lens.load_open_questions("open.jsonl"))
    """
    settings, sampling, bar = settings or FitSettings(), sampling or Sampling(), bar_of(bar)
    questions = apart_by_file(as_open(questions))
    check_open_questions(questions, settings)
    refuse_layers(model, settings.layers or ())
    folder = Path(work_dir) if work_dir else None
    written = written_questions(model, questions, sampling, style=settings.style, folder=folder, bar=bar)
    extraction = Extraction(layers=settings.layers or all_layers(model), style=settings.style)
    with ExitStack() as stack:
        with bar("extracting", len(written), "questions") as advance:
            states = folder / STATES if folder else None
            scoring = score_questions(model, written, extraction, folder=states, progress=advance)
            store = stack.enter_context(scoring)
        journal = folder / "search.jsonl" if folder else None
        return fit_store(CandidateStates(store, sampling), settings, journal=journal, bar=bar, device=str(model.device))


def check_open_questions(questions: Sequence[OpenQuestion], settings: FitSettings) -> None:
    """Refuse questions that nothing can be learned from, and settings that open questions do not have."""
    unlabelled = [q.id for q in questions if not q.answers]
    if unlabelled:
        raise CoralError(
            f"{len(unlabelled)} of {len(questions)} training questions have no answers, first {unlabelled[0]!r}; fitting needs "
            "the right answer of each."
        )
    if len(questions) < FEWEST_QUESTIONS:
        raise CoralError(
            f"Fitting needs at least {FEWEST_QUESTIONS} labelled questions, better a thousand. Got {len(questions)}."
        )
    if settings.read != "answer" or settings.base != FitSettings.base:
        raise CoralError(
            "A lens for open questions reads candidates at their own tokens, and weighs them by their share, their entropy and "
            "their log-probability; leave --read and --base out."
        )
    if settings.exits:
        raise CoralError(
            "A lens for open questions weighs what the model says of its candidates, and cannot exit before it has said it; "
            "leave --exit and --exit-layer out."
        )


def written_questions(
    model: Model,
    questions: Sequence[OpenQuestion],
    sampling: Sampling,
    *,
    style: Style,
    folder: Path | None,
    bar: Bar = silent,
) -> tuple[Question, ...]:
    """Return open questions with the candidates that the model writes to them; with a folder, the texts are kept in it."""
    place = folder / TEXTS if folder else None
    with bar("writing", len(questions), "questions") as advance:
        return write_candidates(model, questions, sampling, style=style, place=place, progress=advance).questions


@contextmanager
def scored_open(
    lens: Lens,
    model: Model,
    questions: Sequence[OpenQuestion],
    *,
    work_dir: str | Path | None = None,
    bar: Bar = silent,
) -> Iterator[Scored]:
    """Have the model write candidates as for the lens's training questions, and yield their scores and states."""
    lens.check_kind(is_open=True)
    assert lens.open is not None, "it was checked"
    lens.check(model)
    folder = Path(work_dir) if work_dir else None
    written = written_questions(model, questions, lens.open.sampling, style=lens.style, folder=folder, bar=bar)
    with ExitStack() as stack:
        with bar("weighing", len(written), "questions") as advance:
            states = folder / STATES if folder else None
            store = stack.enter_context(lens.scored(model, written, work_dir=states, progress=advance))
        yield store


def ask(
    lens: Lens,
    model: Model,
    questions: str | Sequence[str | OpenQuestion],
    *,
    work_dir: str | Path | None = None,
    bar: Bar | bool = False,
) -> OpenAnswers:
    """Answer open questions, which may be plain texts. A question that the model writes no answer to is left out with a warning.

    With `work_dir` texts and scores are kept there, and an interrupted run can go on.

        lens.ask(model, "Which river flows through Vienna?")[0].answer
    """
    asked = as_open(questions)
    with scored_open(lens, model, asked, work_dir=work_dir, bar=bar_of(bar)) as store:
        return OpenAnswers(open_answers(lens, store), asked)


def remove_work(folder: Path) -> None:
    """Remove what asking has kept in a folder of work, and the folder unless somebody has put something else there."""
    if is_store(folder / STATES):
        remove_store(folder / STATES)
    for place in folder.glob(f"{TEXTS}-*"):
        remove_texts(place)
    with suppress(OSError):
        folder.rmdir()
