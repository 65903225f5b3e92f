"""The lens: a fitted correction with all that is needed to apply it, and the fingerprints of what it was fitted on.

It answers questions, refuses a model other than its own, and knows itself as a record; `lens.folder` writes and reads that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from coral_lens.data.leaks import KEYS, question_keys
from coral_lens.data.settings import Style
from coral_lens.data.shots import n_shots
from coral_lens.engine.extract import Extraction, score_questions
from coral_lens.engine.fingerprints import identity_difference
from coral_lens.engine.settings import StatePlace
from coral_lens.errors import CoralError
from coral_lens.lens.answers import Answer, Answers, answer_of, by_question
from coral_lens.lens.correction import Correction
from coral_lens.lens.layer_view import LayerView
from coral_lens.lens.open_part import OpenPart
from coral_lens.lens.publish import public_name, training_sentence, without_paths
from coral_lens.lens.readouts import READ_OUTS
from coral_lens.lens.rules import RULES, apply_temperature, base_probs, scale_corrected, uniform_probs
from coral_lens.lens.settings import BaseRule
from coral_lens.lens.shift import ShiftModel
from coral_lens.lens.tempering import Tempering, evidence_of
from coral_lens.lens.trace import Adaptation, Trace, Training
from coral_lens.lens.trust import Trust
from coral_lens.lens.weighing import Weighing
from coral_lens.metrics.conformal import Abstention, Conformal, abstains, prediction_sets
from coral_lens.metrics.display import Shown, Table
from coral_lens.ragged import Options
from coral_lens.records import UNNAMED, OptionTable, Predictions, Question, Scored, predictions_of
from coral_lens.storage.arrays import side_by_side
from coral_lens.storage.progress import Bar, Progress

if TYPE_CHECKING:
    from coral_lens.data.open_questions import OpenQuestion
    from coral_lens.engine.model import Model
    from coral_lens.lens.open_answers import OpenAnswers


FORMAT = 2
KEYS_IN_ORDER = ("format", "kind", "rule", "layers", "read", "inputs", "gamma", "base_weight", "base", "base_temperature",
                 "then_temperature", "style", "probe", "tempering", "trust", "adaptation", "exits", "temperature", "sets",
                 "abstention", "keys", "open", "model", "training", "trace")  # fmt: skip
"""The keys of lens.json. What is not of the correction is a field of the lens, as it is or by `RECORDS`."""
SAVED_AS = {"steered_temperature": "then_temperature", "control_temperature": "temperature"}
"""Fields whose key in lens.json is another word than their name, because earlier versions wrote it."""
RECORDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "style": (Style.record, lambda record: Style(**record)),
    "tempering": (asdict, lambda record: Tempering(**record)),
    "trust": (asdict, lambda record: Trust(**record)),
    "adaptation": (Adaptation.to_json, Adaptation.from_json),
    "sets": (Conformal.to_dict, Conformal.from_dict),
    "abstention": (Abstention.to_dict, Abstention.from_dict),
    "open": (OpenPart.to_json, OpenPart.from_json),
    "training": (Training.to_json, Training.from_json),
    "trace": (Trace.to_json, Trace.from_json),
}
"""How fields of a lens that are records are written as JSON and read again; None stays None."""
AS_IT_IS = (lambda value: value, lambda value: value)


class LensOutput(NamedTuple):
    """What a lens makes of the questions of a store."""

    probs: dict[str, Float[np.ndarray, " row"]]
    """The option probabilities of each method: base, temperature, the plain lens, and the tempered one."""
    shifts: Float[np.ndarray, " question"]
    """How far each question lies from the training questions."""
    weights: Float[np.ndarray, " question"] | None
    """The weight of the lens in each answer (see `trust`); None where it has no trust of its own."""


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
    keys: int = KEYS
    """The version of the keys of both; see `leaks.NORMALISED`."""
    view: LayerView | None = None
    """The probes of single layers among which its own was chosen; for people, never for steering."""
    trust: Trust | None = None
    """How far it is believed at home and elsewhere; without, its correction is left as it is, as in the paper."""
    adaptation: Adaptation | None = None
    """What labels of a task have shown, from `coral adapt`."""
    exits: bool = False
    """Whether it starts from no base probabilities, so that no block above its layers need run, nor the vocabulary head."""
    open: OpenPart | None = None
    """What a lens for open questions has beside all others; None for one that was fitted on questions with options."""

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
        if self.trust is not None and self.trust.adapted:
            return np.zeros(len(questions), dtype=bool)
        if self.trust is not None and self.trust.everywhere:
            return np.ones(len(questions), dtype=bool)
        tasks = {source.split(":")[0] for source in self.training.tasks} - {UNNAMED}
        named = np.array([q.task in tasks for q in questions], dtype=bool)
        return named | np.isin(question_keys(questions, version=self.keys), self.seen)

    def at_home(self) -> Lens:
        """Return the lens for questions that the user says are of the kind that it was fitted on, whatever they are called.

        Prediction sets and abstention were calibrated for another trust, and are dropped.
        """
        if self.trust is None or self.trust.everywhere:
            return self
        if self.sets or self.abstention:
            warnings.warn(
                "The lens was calibrated for questions of any kind; at home its sets and its abstention do not hold and are "
                "left out: run `coral calibrate --home`.",
                stacklevel=2,
            )
        if self.trust.adapted:
            raise CoralError("The lens was adapted to a task by labels of it; for its home, use the lens before that.")
        return replace(self, trust=replace(self.trust, everywhere=True), sets=None, abstention=None)

    def adapt(self, model: Model, questions: Sequence[Question], *, work_dir: str | Path | None = None) -> Lens:
        """Return the lens for the task of some tens of labelled questions: how far it is believed there is learned from them."""
        from coral_lens.lens.adapt import adapt

        return adapt(self, model, questions, work_dir=work_dir)

    def read(self, store: Scored) -> LensOutput:
        """Return what it makes of the questions of a store. Each layer is read once."""
        store = self.open.states(store) if self.open else store
        table, options = store.table, store.table.options
        raw, p = base_probs(table, self.base_rule), self.base_probs(table)
        first = self.correction.layer(store, self.layers[0])
        shifts = self.shift(first, options)
        states = side_by_side(
            lambda layer: first if layer == self.layers[0] else self.correction.layer(store, layer), self.layers
        )
        plain = self.steered(p, states, options)
        cooled = apply_temperature(raw, options, temperature=self.control_temperature)
        if self.trust:
            # what is weighed was fitted already, and is what it claims to be; it has nothing to gain from a temperature
            fallback = p if self.exits or self.open else cooled
            believed = self.trust.believed(store.questions, shifts, self.is_home(store.questions))
            weights, tempered = believed.weights, believed.blend(fallback, plain, options)
        else:
            weights, tempered = None, self.tempered(p, plain, shifts, options)
        probs = {"base": raw, "temperature": cooled, self.plain_method: plain, self.method: tempered}
        for values in (*probs.values(), shifts):
            if not np.isfinite(values).all():
                raise CoralError(
                    "The lens gives answers that are not numbers: its own numbers are too large; fit or copy it again."
                )
        return LensOutput(probs, shifts, weights)

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
        self._check_shapes(model)
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
        options, (probs, shifts, weights) = store.table.options, self.read(store)
        q = probs[self.method]
        in_set = prediction_sets(self.sets, q, options) if self.sets else None
        unsure = abstains(self.abstention, options.max(q)) if self.abstention else None
        base = probs["base"] if not self.exits else np.zeros(0)
        answers = []
        for i, question in enumerate(store.questions):
            rows = options.of(i)
            answers.append(
                replace(
                    answer_of(question, q[rows], base[rows] if len(base) else base, float(shifts[i])),
                    options_in_set=None if in_set is None else tuple(map(int, np.flatnonzero(in_set[rows]))),
                    abstain=None if unsure is None else bool(unsure[i]),
                    trust=None if weights is None else float(weights[i]),
                )
            )
        return answers

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
        if difference := identity_difference(self.model, model.identity):
            raise CoralError(
                f"This lens was fitted on {self.model['name']!r}, and {model.name!r} is another model ({difference}). Use the "
                "model it was fitted on, fit a lens on this one, or, if you know that they are alike, override the check "
                "(--other-model), which is recorded."
            )
        if "config" not in self.model:
            warnings.warn(
                "This lens was fitted by an earlier version, which did not record the model's configuration: only weights and "
                "tokenizer are known to be the same.",
                stacklevel=3,
            )
        for is_open in {q.is_open for q in questions}:
            self.check_kind(is_open=is_open)
        fitted_in, computes_in = str(self.model.get("dtype", "")).removeprefix("torch."), model.precision
        if fitted_in and fitted_in != computes_in:
            warnings.warn(
                f"The lens was fitted on states computed in {fitted_in}, and {model.name!r} computes in {computes_in}: answers "
                f"differ a little from those that it was measured with; load the model with dtype={fitted_in!r} for the same.",
                stacklevel=3,
            )
        for question in questions:
            if question.rendered is not None and question.rendered.chat != self.style.chat:
                have, want = ("with" if c else "without" for c in (question.rendered.chat, self.style.chat))
                raise CoralError(
                    f"Question {question.id!r} was rendered {have} the chat template, but the lens was fitted {want} it."
                )
            if question.rendered is None and n_shots(question) != self.training.shots:
                raise CoralError(
                    f"Question {question.id!r} is asked with {n_shots(question)} worked examples, but the lens was fitted with "
                    f"{self.training.shots}; give --num-fewshot {self.training.shots} and --fewshot-from FILE."
                )

    def check_kind(self, *, is_open: bool) -> None:
        """Refuse open questions where the lens was fitted on questions with options, and the reverse."""
        if is_open and self.open is None:
            raise CoralError(
                "This lens was fitted on questions with options, and cannot weigh what the model writes; use it with `coral "
                "predict`, or fit one with `coral fit --open FILE`."
            )
        if not is_open and self.open is not None:
            raise CoralError(
                "This lens was fitted on open questions, and these questions come with options; ask them without (`coral ask`), "
                "or fit a lens on such questions with `coral fit --train FILE`."
            )

    def _check_shapes(self, model: Model) -> None:
        """Refuse a model that has not the layers, or not the width, that it reads."""
        width = int(model.hf.config.get_text_config().hidden_size)
        wanted = len(self.shift.standardiser.mean) - (1 if self.open else 0)  # of open questions there is an intercept
        if max(self.layers) > model.n_layers or width != wanted:
            raise CoralError(
                f"The lens reads layer {max(self.layers)} of width {wanted}, but {model.name!r} has {model.n_layers} layers of "
                f"width {width}: it cannot be used there."
            )

    def adopted(self, model: Model) -> Lens:
        """Return the lens for a model whose fingerprints differ, with the override on record; the shapes must fit."""
        self._check_shapes(model)
        given = model.identity
        changed = [key for key, value in given.items() if identity_difference({key: self.model.get(key, value)}, given)]
        if not changed:
            return self
        note = f"fitted on {self.model['name']}, used on {model.name} in spite of other {' and '.join(changed)}"
        training = replace(self.training, overrides=(*self.training.overrides, note))
        return replace(self, model={**self.model, "name": model.name, **given}, training=training)

    def is_seen(self, questions: Sequence[Question]) -> Bool[np.ndarray, " question"]:
        """Return which questions the lens was fitted, chosen or calibrated on, by their normalised text."""
        return np.isin(question_keys(questions, version=self.keys), np.union1d(self.seen, self.calibrated_on))

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
        record = {"format": FORMAT} | self.correction.to_json()
        for name, key in keys_of_fields().items():
            value, (write, _) = getattr(self, name), RECORDS.get(name, AS_IT_IS)
            record[key] = None if value is None else write(value)
        return {key: record[key] for key in KEYS_IN_ORDER if key in record}

    @staticmethod
    def from_record(record: dict[str, Any], tensors: dict[str, torch.Tensor], view: LayerView | None) -> Lens:
        """Make a lens again from its JSON part, its tensors and its layer view."""
        values: dict[str, Any] = {}
        for name, key in keys_of_fields().items():
            value, (_, read) = record[key], RECORDS.get(name, AS_IT_IS)
            values[name] = None if value is None else read(value)
        correction = Correction.from_json(record, tensors)
        if (part := values["open"]) is not None:
            reference = dict(zip(correction.layers, tensors["open.reference"].numpy(), strict=True))
            values["open"] = replace(part, reference=reference)
        return Lens(
            correction=correction,
            shift=ShiftModel.from_tensors(tensors),
            seen=tensors["training.seen"].numpy(),
            # lenses of older versions have the keys of both among those seen
            calibrated_on=tensors.get("training.calibrated_on", torch.zeros(0, dtype=torch.int64)).numpy(),
            view=view,
            **values,
        )


def keys_of_fields() -> dict[str, str]:
    """Return the key in lens.json of each field that is there; the other fields are tensors, or have a file of their own."""
    keys = {field.name: SAVED_AS.get(field.name, field.name) for field in fields(Lens)}
    return {name: key for name, key in keys.items() if key in KEYS_IN_ORDER}


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
