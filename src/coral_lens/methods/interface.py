"""What a method of a study is given, what it gives back, and how it runs the model again. Knows no method.

A method is a row (`Method`) that reads its options, looks at the questions before a model is loaded, and is fitted in a
FitContext: training and validation questions, the model, and a folder of its own. It never sees a test set before the function
that fitting returns is called with one.

A method that must run the model again, with other prompts or under edits, does it through `FitContext.score`, which keeps what is
done: a killed study goes on where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from jaxtyping import Int
from pydantic import TypeAdapter, ValidationError

from coral_lens.data.settings import Style
from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.extract import extract
from coral_lens.engine.planned import Edited, Extraction
from coral_lens.errors import CoralError, nearest
from coral_lens.lens.fit import training_data
from coral_lens.lens.settings import FitSettings
from coral_lens.lens.training_data import TrainingData
from coral_lens.methods.entry import MethodEntry
from coral_lens.records import Predictions, Question, Scored
from coral_lens.storage.files import canonical, digest, kept_record, write_record
from coral_lens.storage.progress import Bar, silent
from coral_lens.storage.settings import refuse_wrong

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


NOTES = "notes.json"


@dataclass(frozen=True)
class QuestionSet:
    """Questions that the model has scored, unsteered."""

    name: str
    states: Scored
    """Scores and pooled states, with the questions in order, but without their prompts."""
    prompted: Callable[[], tuple[Question, ...]]
    """Gives the same questions in the same order with their prompts, for a method that runs the model again."""
    adapt: Callable[[], tuple[Question, ...]] | None = None
    """Gives labelled questions of the same task that are in no test, for a method with a form that adapts; mostly None."""


@dataclass(frozen=True)
class FitContext:
    """What a method is fitted with."""

    model: Callable[[], Model]
    """Gives the model, which is loaded only if a method needs it."""
    train: QuestionSet
    """Training and validation questions; `data` has them divided."""
    common: FitSettings
    """What the methods of a study share: base, style, layers, share of validation questions, seed."""
    folder: Path
    """The folder of this method alone; an interrupted study finds again what it keeps there."""
    bar: Bar = silent
    device: str = "cpu"
    """Where networks are trained."""
    mixed: bool = False
    """Whether what was begun on another kind of device is gone on with."""

    @cached_property
    def data(self) -> TrainingData:
        """Base probabilities, residuals and states of the training questions; `data.is_validation` marks those that validate."""
        return training_data(self.train.states, self.common)[0]

    def validation(self, n: int | None = None) -> Int[np.ndarray, " question"]:
        """Return the numbers of the validation questions, in order; if they are more than n, n of them drawn under the seed."""
        numbers = np.flatnonzero(self.data.is_validation)
        if n is None or n >= len(numbers):
            return numbers
        return np.sort(np.random.default_rng(self.common.seed).choice(numbers, n, replace=False))

    @property
    def division(self) -> list[Any]:
        """What decides which questions validate, for the name of what was chosen on them."""
        # earlier versions always drew the same share of every task, and said nothing of it
        return [self.common.validation, self.common.seed, *([] if self.common.stratified else ["not stratified"])]

    def score(self, questions: Sequence[Question], name: str, *, edited: Edited | None = None) -> ActivationStore:
        """Score questions that are asked in another way, or with edits on the way; no states are kept.

        What is finished is kept in the method's folder under a name that depends on the questions and the edits.
        """
        extraction = Extraction((), self.common.style, edited=edited, neutral=self.common.base == "pmi")
        return self.extract(self.model(), questions, name, extraction=extraction)

    def extract(
        self, model: Model, questions: Sequence[Question], name: str, *, extraction: Extraction
    ) -> ActivationStore:
        """Score questions with any model, and keep the states that `extraction` names; every question must have scores."""
        # the seed is in the folder's name, and the model in the folder above
        key = digest(
            [prompts_digest(questions), list(extraction.layers), extraction.about, model.fingerprint["weights"]]
        )
        with self.bar(name, len(questions), "questions") as advance:
            folder = self.folder / "scores" / f"{name}-{key[:8]}"
            extraction = replace(extraction, mixed=self.mixed)
            store = extract(model, questions, folder, extraction=extraction, progress=advance)
        if len(store.questions) < len(questions):
            scored = {q.id for q in store.questions}
            lost = next(q.id for q in questions if q.id not in scored)
            raise CoralError(
                f"Question {lost!r} cannot be scored as {name!r} asks it (too long, or scores that are not finite); leave it "
                "out of the study, or leave this method out."
            )
        return store

    def note(self, name: str, remark: dict[str, Any]) -> None:
        """Keep a remark for the record of the run: what was chosen, how often something failed."""
        path = self.folder / NOTES
        notes = kept_record(path) or {}
        write_record(path, notes | {name: remark})


Predict = Callable[[QuestionSet], dict[str, Predictions]]
"""Gives the Predictions of a test set. The key is added to the method's name: empty, or a variant such as ` tempered`."""


def nothing_else(_: Any) -> list[str]:
    """Return no digests: what a method predicts depends on settings and questions alone."""
    return []


def accept(_: Sequence[Question], __: Style, ___: Any) -> None:
    """Accept all questions."""


def accept_training(_: Sequence[Question], __: Any) -> None:
    """Accept all questions of a mixture."""


@dataclass(frozen=True)
class Method:
    """One row of the table of methods."""

    read: Callable[[MethodEntry], Any]
    """Makes settings of what the study says, before any model is loaded, and refuses what it does not know."""
    fit: Callable[[FitContext, Any], Predict]
    check: Callable[[Sequence[Question], Style, Any], None] = accept
    """Refuses questions of a mixture or a test, given with prompts, that it cannot be used on; before a model is loaded."""
    check_training: Callable[[Sequence[Question], Any], None] = accept_training
    """Refuses questions of a mixture, tests left out, that it cannot be trained on; before a model is loaded."""
    from_scores: bool = True
    """Whether it starts from the scores and states that all methods share, which its cost per question then includes. A
    method that asks or scores in its own way, and needs no others, says False."""
    depends: Callable[[Any], list[str]] = nothing_else
    """Gives digests of the files that settings name: predictions belong to their content, and not to their names."""


# -------------------------------------------------------------------------------------------------------- options

MethodSettings = TypeVar("MethodSettings")


def no_options(entry: MethodEntry) -> None:
    """Refuse any option."""
    refuse_unknown(entry, ())


def options_of(settings: type[MethodSettings]) -> Callable[[MethodEntry], MethodSettings]:
    """Return a function that reads the fields of a dataclass from a study, with their types checked."""

    def read(entry: MethodEntry) -> MethodSettings:
        refuse_unknown(entry, [f.name for f in fields(settings)])  # type: ignore[arg-type]
        return validated(settings, entry, entry.options)

    return read


def validated(settings: type[MethodSettings], entry: MethodEntry, options: dict[str, Any]) -> MethodSettings:
    """Return settings made of a study's options; a wrong value is refused in the same sentence as in Python and by commands."""
    try:
        refuse_wrong(settings, options)
        return TypeAdapter(settings).validate_python(options)
    except CoralError as error:
        raise CoralError(f"Method {entry.row!r}: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "an option"
        raise CoralError(f"Method {entry.row!r}: {where} cannot be used: {first['msg']}.") from None


def refuse_unknown(entry: MethodEntry, known: Sequence[str]) -> None:
    """Refuse an option that a method does not have."""
    for key in entry.options:
        if key not in known:
            raise CoralError(
                f"Method {entry.row!r}: there is no option {key!r}.{nearest(key, known)} "
                f"Known: {', '.join(['kind', 'name', *known])}."
            )


def prompts_digest(questions: Sequence[Question]) -> str:
    """Return a digest of the questions as they are asked."""
    sha256 = hashlib.sha256()
    for q in questions:
        prompt = [sorted(set(q.rendered.contexts)), q.rendered.continuations] if q.rendered else [q.passage, q.text]
        sha256.update(canonical([q.id, q.group, q.answer, q.options, *prompt]).encode())
    return sha256.hexdigest()
