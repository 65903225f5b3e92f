"""The lens: a fitted correction with all that is needed to apply it, and the fingerprints of what it was fitted on.

Its fields and what it is called are here, and the calls that people make. What stands behind these has a file each: `own_model`
refuses another model, `output` makes answers, `home` says where it is believed, `record` and `folder` keep it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from coral_lens.data.leaks import KEYS
from coral_lens.data.settings import Style
from coral_lens.engine.extract import score_questions
from coral_lens.engine.planned import Extraction
from coral_lens.engine.settings import StatePlace
from coral_lens.lens.answers import Answer, Answers, by_question
from coral_lens.lens.correction import Correction
from coral_lens.lens.home import at_home, have_keys, is_home
from coral_lens.lens.layer_view import LayerView
from coral_lens.lens.open_part import OpenPart
from coral_lens.lens.output import LensOutput, answers_on, read_store
from coral_lens.lens.own_model import adopt, check_kind, check_model, check_shapes
from coral_lens.lens.probes.ridge import LinearProbe
from coral_lens.lens.publish import public_name, training_sentence, without_paths
from coral_lens.lens.readouts import READ_OUTS
from coral_lens.lens.record import fields_of, record_of
from coral_lens.lens.rules import RULES, apply_temperature, base_probs, scale_corrected, uniform_probs
from coral_lens.lens.settings import BaseRule
from coral_lens.lens.shift import ShiftModel
from coral_lens.lens.tempering import Tempering, evidence_of
from coral_lens.lens.trace import Adaptation, Trace, Training
from coral_lens.lens.trust import Trust
from coral_lens.lens.weighing import Weighing
from coral_lens.metrics.conformal import Abstention, Conformal
from coral_lens.metrics.display import Shown, Table
from coral_lens.ragged import Options
from coral_lens.records import OptionTable, Predictions, Question, Scored, predictions_of
from coral_lens.storage.progress import Bar, Progress

if TYPE_CHECKING:
    from coral_lens.data.open_questions import OpenQuestion
    from coral_lens.engine.model import Model
    from coral_lens.lens.open_answers import OpenAnswers


@dataclass(frozen=True, repr=False)
class Lens(Shown):
    """Turns pooled states and base probabilities into steered probabilities, in this order:

        log-probabilities -> `base` rule -> `base_temperature` -> base probabilities
        states of `layers` -> `correction` at strength `gamma` -> `steered_temperature` -> steered probabilities
        task, and distance from the training questions (`shift`) -> `trust` -> steered probabilities, tempered

    `control_temperature` is no part of it: it is the control that stands beside the lens in every table.
    """

    kind: str
    """Its row in the table of lenses: ridge, mlp, listwise, ..."""
    correction: Correction
    """What it does to probabilities, but for the strength. Its scale is 1: gamma counts in units of the probe's output."""
    gamma: float
    """The strength of the correction."""
    base: BaseRule
    """The score whose softmax is the base probability."""
    base_temperature: float
    """The base probabilities are scaled by this temperature before anything else; 1 is the paper's way."""
    steered_temperature: float
    """The steered probabilities are scaled by this temperature afterwards; 1 is the paper's way."""
    style: Style
    """How it asks questions that bring no template of their own."""
    shift: ShiftModel
    """How far a question lies from those that it was fitted on."""
    tempering: Tempering | None
    """How the correction of a lens of an earlier version weakens with the shift; new ones have `trust` in its place."""
    control_temperature: float
    """The temperature of plain temperature scaling, fitted on the same validation questions: the control beside the lens."""
    model: dict[str, Any]
    """Name, dtype, fingerprints and configuration of the model it was fitted on."""
    training: Training
    """What it was fitted on and how."""
    seen: Int[np.ndarray, " question"]
    """Keys of the questions it was fitted and chosen on, which are never counted as test questions."""
    trace: Trace
    """How setting, layer and gamma were chosen."""
    sets: Conformal | None = None
    """Prediction sets of a stated coverage, from `coral calibrate`."""
    abstention: Abstention | None = None
    """The confidence below which it abstains, from `coral calibrate`."""
    calibrated_on: Int[np.ndarray, " other"] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Keys of the questions behind sets and abstention, which are never counted as test questions either."""
    adapted_on: Int[np.ndarray, " few"] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Keys of the questions whose labels adapted it, which are never counted as test questions, and never calibrate it."""
    keys: int = KEYS
    """The version of the keys of all three; see `leaks.NORMALISED`."""
    view: LayerView | None = None
    """The probes of single layers among which its own was chosen; for people, never for steering."""
    trust: Trust | None = None
    """How far it is believed at home and elsewhere; without, its correction is left as it is, as in the paper."""
    adaptation: Adaptation | None = None
    """What labels of a task have shown, from `coral adapt`."""
    task_probe: LinearProbe | None = None
    """What they have taught beside weight and temperature, over the same inputs as the correction's probe (see `labelled`)."""
    exits: bool = False
    """Whether it starts from no base probabilities, so that no block above its layers need run, nor the vocabulary head."""
    open: OpenPart | None = None
    """What a lens for open questions has beside all others; None for one that was fitted on questions with options."""
    everywhere: bool = False
    """Of a lens without trust: whether the user said that all questions are of its own kind. That changes no answer, only what
    is said of them, and is not saved."""

    def table(self) -> Table:
        """Return how it did on its validation questions, beside its controls."""
        validation = self.trace.validation
        metrics = tuple(next(iter(validation.values()), {}))
        rows = tuple((method, *(scores[m].value for m in metrics)) for method, scores in validation.items())
        promises = tuple(str(promise) for promise in (self.sets, self.abstention) if promise)
        notes = (
            training_sentence(self.training),
            "The scores are fractions, of the questions it was chosen on.",
            *promises,
        )
        return Table(f"Lens for {self.model['name']}: {self.name}", ("method", *metrics), rows, notes)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that it reads side by side; nearly always one."""
        return self.correction.layers

    @property
    def name(self) -> str:
        """What it is, in words."""
        noun = RULES[self.correction.rule].noun
        where = f"layer {self.layers[0]}" if len(self.layers) == 1 else f"layers {', '.join(map(str, self.layers))}"
        exits = f", exits after layer {max(self.layers)}" if self.exits else ""
        where += "" if self.correction.reading.name == "answer" else f" read as {self.correction.reading.name}"
        tempered = ", tempered" if self.trust else ", tempered by shift" if self.tempering else ""
        return f"{self.kind} {noun}, {where}, gamma {self.gamma:g}{tempered}{exits}"

    @property
    def plain_method(self) -> str:
        """What its untempered predictions are called."""
        return RULES[self.correction.rule].method + (" + temperature" if self.steered_temperature != 1.0 else "")

    @property
    def method(self) -> str:
        """What its predictions are called."""
        return f"{self.plain_method} tempered" if self.tempers else self.plain_method

    @property
    def tempers(self) -> bool:
        """Whether it is believed less on some questions than on others."""
        return self.tempering is not None or self.trust is not None

    @property
    def base_rule(self) -> BaseRule | Weighing:
        """The score whose softmax is the base probability: of options as they are, of candidates as they are weighed."""
        return self.open.weighing if self.open else self.base

    def base_probs(self, table: OptionTable) -> Float[np.ndarray, " row"]:
        """Return the probabilities that it starts from: all alike where it exits before there are any."""
        if self.exits:
            return uniform_probs(table.options)
        p = base_probs(table, self.base_rule)
        if self.base_temperature == 1.0:
            return p
        return apply_temperature(p, table.options, temperature=self.base_temperature)

    def steered(
        self, p: Float[np.ndarray, " row"], states: Float[np.ndarray, "row width"], options: Options
    ) -> Float[np.ndarray, " row"]:
        """Return the corrected probabilities, before tempering, from base ones and pooled states of its layers."""
        q = self.correction.apply(p, states, options, gamma=self.gamma)
        return scale_corrected(q, options, temperature=self.steered_temperature)

    def tempered(
        self, p: Float[np.ndarray, " row"], q: Float[np.ndarray, " row"], shift: Float[np.ndarray, " question"], options: Options
    ) -> Float[np.ndarray, " row"]:  # fmt: skip
        """Return the plain lens's probabilities q weakened by each question's shift, as lenses of earlier versions are."""
        if self.tempering is None:
            return q
        return self.tempering(evidence_of(self.correction.base_part(p), q, shift, options))

    def shifts(self, store: Scored) -> Float[np.ndarray, " question"]:
        """Return how far each question lies from the training questions."""
        store = self.open.states(store) if self.open else store
        return self.shift(self.correction.layer(store, self.layers[0]), store.table.options)

    def is_home(self, questions: Sequence[Question]) -> Bool[np.ndarray, " question"]:
        """Return which questions are of a task that it was fitted on, by its name, or are themselves such as it was fitted on.

        Questions of a file name no task: another file is another task, until the user says otherwise (`at_home`). A lens that was
        adapted to a task by labels is for that task, and its home is forgotten.
        """
        return is_home(self, questions)

    def at_home(self) -> Lens:
        """Return the lens for questions that the user says are of the kind that it was fitted on, whatever they are called.

        Prediction sets and abstention were calibrated for another trust, and are dropped.
        """
        return at_home(self)

    def adapt(self, model: Model, questions: Sequence[Question], *, work_dir: str | Path | None = None) -> Lens:
        """Return the lens for the task of some tens of labelled questions: how far it is believed there is learned from them."""
        from coral_lens.lens.adapt import adapt

        return adapt(self, model, questions, work_dir=work_dir)

    def read(self, store: Scored) -> LensOutput:
        """Return what it makes of the questions of a store. Each layer is read once."""
        return read_store(self, store)

    def apply(self, store: Scored) -> dict[str, Float[np.ndarray, " row"]]:
        """Return the option probabilities of each method: base, temperature, the plain lens, and the tempered one."""
        return self.read(store).probs

    @property
    def extraction(self) -> Extraction:
        """What it needs to know of questions."""
        return Extraction(
            layers=self.layers, style=self.style, exits=self.exits, read=self.places, neutral=self.base == "pmi"
        )

    @property
    def places(self) -> tuple[StatePlace, ...]:
        """Where the model is read for it."""
        return READ_OUTS[self.correction.reading.name].places

    @contextmanager
    def scored(
        self,
        model: Model,
        questions: Sequence[Question],
        *,
        work_dir: str | Path | None = None,
        progress: Progress | None = None,
    ) -> Iterator[Scored]:
        """Score questions and yield their scores and the states of this lens's layers.

        With `work_dir` they are kept there and an interrupted run goes on; without, they are thrown away afterwards.
        """
        self.check(model, questions)
        check_shapes(self, model)
        folder = Path(work_dir) if work_dir else None
        with score_questions(model, questions, self.extraction, folder=folder, progress=progress) as store:
            yield store

    def predict(
        self,
        model: Model,
        questions: Sequence[Question],
        *,
        work_dir: str | Path | None = None,
        progress: Progress | None = None,
    ) -> Answers[Answer]:
        """Answer questions; they need no labels. One that cannot be asked is left out with a warning."""
        with self.scored(model, questions, work_dir=work_dir, progress=progress) as store:
            answers = self.answers(store)
        if self.style.kind == "p-true":
            answers = by_question(answers, questions)
        return Answers(answers, questions)

    def ask(
        self,
        model: Model,
        questions: str | Sequence[str | OpenQuestion],
        *,
        work_dir: str | Path | None = None,
        bar: Bar | bool = False,
    ) -> OpenAnswers:
        """Answer open questions: the model writes candidates, and the lens, which was fitted on such, weighs them."""
        from coral_lens.lens.asking import ask

        return ask(self, model, questions, work_dir=work_dir, bar=bar)

    def answers(self, store: Scored) -> list[Answer]:
        """Answer the questions of a store."""
        return answers_on(self, store)

    def predictions(
        self,
        model: Model,
        questions: Sequence[Question],
        *,
        work_dir: str | Path | None = None,
        progress: Progress | None = None,
    ) -> dict[str, Predictions]:
        """Return the Predictions of each method on questions of one task."""
        with self.scored(model, questions, work_dir=work_dir, progress=progress) as store:
            return self.predictions_on(store)

    def predictions_on(self, store: Scored) -> dict[str, Predictions]:
        """Return the Predictions of each method on the questions of a store."""
        return {method: predictions_of(method, store, p) for method, p in self.apply(store).items()}

    def check(self, model: Model, questions: Sequence[Question] = ()) -> None:
        """Refuse a model other than the one the lens was fitted on, and prompts of another chat setting."""
        check_model(self, model, questions)

    def check_kind(self, *, is_open: bool) -> None:
        """Refuse open questions where the lens was fitted on questions with options, and the reverse."""
        check_kind(self, is_open=is_open)

    def adopted(self, model: Model) -> Lens:
        """Return the lens for a model whose fingerprints differ, with the override on record; the shapes must fit."""
        return adopt(self, model)

    def is_seen(self, questions: Sequence[Question]) -> Bool[np.ndarray, " question"]:
        """Return which questions the lens was fitted, chosen, adapted or calibrated on, by their normalised text."""
        return have_keys(self, questions, np.concatenate([self.seen, self.adapted_on, self.calibrated_on]))

    def save(self, folder: str | Path) -> None:
        """Write the lens; an older one in the same folder is replaced in one moment, and all else there stays.

        A card that was edited by hand stays too, with a warning: it tells of the older lens.
        """
        from coral_lens.lens.folder import save_lens

        save_lens(self, folder)

    def public(self) -> Lens:
        """Return the lens as others may see it: of local paths only the last part is left."""
        training = replace(self.training, overrides=tuple(map(without_paths, self.training.overrides)))
        return replace(self, model=self.model | {"name": public_name(self.model["name"])}, training=training)

    def record(self) -> dict[str, Any]:
        """Return the JSON part of the lens."""
        return record_of(self)

    @staticmethod
    def from_record(record: dict[str, Any], tensors: dict[str, torch.Tensor], view: LayerView | None) -> Lens:
        """Make a lens again from its JSON part, its tensors and its layer view."""
        return Lens(**fields_of(Lens, record, tensors), view=view)


def predict(
    lens: Lens,
    model: Model,
    questions: Sequence[Question],
    *,
    work_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Answers[Answer]:
    """Answer questions with a lens; the same as `lens.predict(model, questions)`."""
    return lens.predict(model, questions, work_dir=work_dir, progress=progress)
