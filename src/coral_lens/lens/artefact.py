"""The lens: a fitted correction with all that is needed to apply it, and the fingerprints of what it was fitted on.

    lens.json           layers, gamma, base rule, prompt style, fingerprints, how it was chosen
    lens.safetensors    standardiser, probe and shift model
    README.md           a card for people
    layers.safetensors  optional: what each layer would say, for people to look at (see `layer_view`)

It refuses a model other than its own. Never pickle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors

from coral_lens.data.leaks import KEYS, question_keys
from coral_lens.data.settings import Style
from coral_lens.engine.extract import Extraction, score_questions
from coral_lens.errors import CoralError
from coral_lens.lens.features import build_inputs
from coral_lens.lens.layer_view import LayerView, load_view
from coral_lens.lens.probes.listwise import tilt
from coral_lens.lens.probes.registry import PROBES
from coral_lens.lens.probes.standardise import Probe, Standardiser, predict_states
from coral_lens.lens.publish import card, local_folder, public_name, without_paths
from coral_lens.lens.rules import Rule, apply_temperature, base_probs, steer
from coral_lens.lens.settings import BaseRule
from coral_lens.lens.shift import ShiftModel
from coral_lens.lens.tempering import SMALLEST, Tempering, evidence_of
from coral_lens.metrics.conformal import Abstention, Conformal, abstains, prediction_sets
from coral_lens.progress import Progress
from coral_lens.ragged import Options
from coral_lens.records import OptionTable, Predictions, Question, Scored, predictions_of
from coral_lens.storage.arrays import side_by_side
from coral_lens.storage.files import digest, digest_file, fresh_folder, read_json, write_atomic, write_json

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


FORMAT = 2
METHODS: dict[Rule, str] = {"residual": "coral", "listwise": "listwise"}
"""What a lens's predictions are called: the paper's correction, and the lens that goes beyond it."""


@dataclass(frozen=True)
class Answer:
    """One answered question, for people: the chosen option and what the model thought before and after steering."""

    id: str
    answer: int
    """Index of the chosen option."""
    option: str
    confidence: float
    """Steered probability of the chosen option."""
    probs: tuple[float, ...]
    base_probs: tuple[float, ...]
    shift: float
    """How far the question lies from those that the lens was fitted on: 1 is typical of them, 1.5 and beyond is far."""
    options_in_set: tuple[int, ...] | None = None
    """The prediction set at the stated coverage, if the lens was calibrated for one."""
    abstain: bool | None = None
    """Whether the answer is too uncertain for the stated risk, if the lens was calibrated for one."""


@dataclass(frozen=True)
class Lens:
    """Turns pooled states and base probabilities into steered probabilities."""

    kind: str
    """Its row in the table of lenses: ridge, mlp, listwise, ..."""
    rule: Rule
    layers: tuple[int, ...]
    """The layers that it reads side by side; nearly always one."""
    inputs: tuple[str, ...]
    """What the probe sees beyond plain states: `centred`, `rank`."""
    gamma: float
    base_weight: float
    """Of log p under the listwise rule; the paper's rule does not use it."""
    base: BaseRule
    base_temperature: float
    """The base probabilities are scaled by this before anything else; 1 is the paper's way."""
    then_temperature: float
    """The steered probabilities are scaled by this afterwards; 1 is the paper's way."""
    style: Style
    standardiser: Standardiser
    probe: Probe
    shift: ShiftModel
    tempering: Tempering | None
    """How the correction weakens with the shift; None leaves it as it is, as in the paper."""
    temperature: float
    """Of plain temperature scaling, fitted on the same validation questions: the control that stands beside the lens."""
    model: dict[str, str]
    """Name, dtype and fingerprints of the model it was fitted on."""
    training: dict[str, Any]
    """What it was fitted on and how: tasks, numbers of questions, digests, settings, versions."""
    seen: Int[np.ndarray, " question"]
    """Keys of the questions it was fitted and chosen on, so that they are never counted as test questions."""
    trace: dict[str, Any]
    """How layer and gamma were chosen: validation scores of every layer and every gamma."""
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

    @property
    def name(self) -> str:
        what = {"residual": f"{self.kind} probe", "listwise": f"{self.kind} lens"}[self.rule]
        where = f"layer {self.layers[0]}" if len(self.layers) == 1 else f"layers {', '.join(map(str, self.layers))}"
        return f"{what}, {where}, gamma {self.gamma:g}" + (", tempered by shift" if self.tempering else "")

    @property
    def plain_method(self) -> str:
        """What its untempered predictions are called."""
        return METHODS[self.rule] + (" + temperature" if self.then_temperature != 1.0 else "")

    @property
    def method(self) -> str:
        return f"{self.plain_method} tempered" if self.tempering else self.plain_method

    def base_probs(self, table: OptionTable) -> Float[np.ndarray, " row"]:
        """Return the probabilities that it starts from."""
        p = base_probs(table, self.base)
        if self.base_temperature == 1.0:
            return p
        return apply_temperature(p, table.options, temperature=self.base_temperature)

    def steered(
        self, p: Float[np.ndarray, " row"], states: Float[np.ndarray, "row width"], options: Options
    ) -> Float[np.ndarray, " row"]:
        """Return the corrected probabilities, before tempering, from base ones and pooled states of its layers."""
        scores = predict_states(self.probe, self.standardiser, build_inputs(states, p, options, self.inputs))
        if self.rule == "residual":
            q = steer(p, scores, options, gamma=self.gamma)
        else:
            q = tilt(p, scores, options, base_weight=self.base_weight, gamma=self.gamma)
        return q if self.then_temperature == 1.0 else cooled(q, options, temperature=self.then_temperature)

    def tempered(
        self,
        p: Float[np.ndarray, " row"],
        q: Float[np.ndarray, " row"],
        shift: Float[np.ndarray, " question"],
        options: Options,
    ) -> Float[np.ndarray, " row"]:
        """Return the plain lens's probabilities q weakened by each question's shift."""
        if self.tempering is None:
            return q
        weight = self.base_weight if self.rule == "listwise" else 1.0
        return self.tempering(evidence_of(weight * np.log(np.maximum(p, 1e-300)), q, shift, options))

    def states(self, store: Scored) -> Float[np.ndarray, "row width"]:
        """Return the states of its layers, side by side."""
        return side_by_side(store.layer, self.layers)

    def shifts(self, store: Scored) -> Float[np.ndarray, " question"]:
        """Return how far each question lies from the training questions."""
        return self.shift(store.layer(self.layers[0]), store.table.options)

    def apply(self, store: Scored) -> dict[str, Float[np.ndarray, " row"]]:
        """Return the option probabilities of each method: base, temperature, the plain lens, and the tempered one."""
        table = store.table
        raw, p = base_probs(table, self.base), self.base_probs(table)
        plain = self.steered(p, self.states(store), table.options)
        return {
            "base": raw,
            "temperature": apply_temperature(raw, table.options, temperature=self.temperature),
            self.plain_method: plain,
            self.method: self.tempered(p, plain, self.shifts(store), table.options),
        }

    @property
    def extraction(self) -> Extraction:
        """What it needs to know of questions."""
        return Extraction(layers=self.layers, style=self.style)

    @contextmanager
    def scored(
        self,
        model: Model,
        questions: Sequence[Question],
        *,
        work_dir: Path | None = None,
        progress: Progress | None = None,
    ) -> Iterator[Scored]:
        """Score questions and yield their scores and the states of this lens's layers.

        With `work_dir` they are kept there and an interrupted run goes on; without, they are thrown away afterwards.
        """
        self.check(model, questions)
        with score_questions(model, questions, self.extraction, folder=work_dir, progress=progress) as store:
            yield store

    def predict(
        self,
        model: Model,
        questions: Sequence[Question],
        *,
        work_dir: Path | None = None,
        progress: Progress | None = None,
    ) -> list[Answer]:
        """Answer questions; they need no labels. One that cannot be asked is left out with a warning."""
        with self.scored(model, questions, work_dir=work_dir, progress=progress) as store:
            return self.answers(store)

    def answers(self, store: Scored) -> list[Answer]:
        """Answer the questions of a store."""
        table, probs, shifts = store.table, self.apply(store), self.shifts(store)
        surest = table.options.max(probs[self.method])
        in_set = prediction_sets(self.sets, probs[self.method], table.options) if self.sets else None
        unsure = abstains(self.abstention, surest) if self.abstention else None
        answers = []
        for i, question in enumerate(store.questions):
            rows = table.options.of(i)
            steered, base = probs[self.method][rows], probs["base"][rows]
            best = int(steered.argmax())
            answers.append(
                Answer(
                    question.id,
                    best,
                    question.options[best],
                    float(steered[best]),
                    tuple(map(float, steered)),
                    tuple(map(float, base)),
                    float(shifts[i]),
                    None if in_set is None else tuple(map(int, np.flatnonzero(in_set[rows]))),
                    None if unsure is None else bool(unsure[i]),
                )
            )
        return answers

    def predictions(
        self,
        model: Model,
        questions: Sequence[Question],
        *,
        work_dir: Path | None = None,
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
        for key in ("weights", "tokenizer"):
            if self.model[key] != model.fingerprint[key]:
                raise CoralError(
                    f"This lens was fitted on {self.model['name']!r}, whose {key} are {self.model[key][:12]}; "
                    f"{model.name!r} has {model.fingerprint[key][:12]}. Use that model, fit a lens on this one, or, if you "
                    "know that they are alike, override the check (--other-model), which is recorded."
                )
        for question in questions:
            if question.rendered is not None and question.rendered.chat != self.style.chat:
                have, want = ("with" if c else "without" for c in (question.rendered.chat, self.style.chat))
                raise CoralError(
                    f"Question {question.id!r} was rendered {have} the chat template, but the lens was fitted {want} it."
                )

    def adopted(self, model: Model) -> Lens:
        """Return the lens for a model whose fingerprints differ, with the override on record; the shapes must fit."""
        width, wanted = int(model.hf.config.get_text_config().hidden_size), len(self.shift.standardiser.mean)
        if max(self.layers) > model.n_layers or width != wanted:
            raise CoralError(
                f"The lens reads layer {max(self.layers)} of width {wanted}, but {model.name!r} has {model.n_layers} layers of "
                f"width {width}: it cannot be used there."
            )
        changed = {k: v for k, v in self.model.items() if k in ("weights", "tokenizer") and v != model.fingerprint[k]}
        if not changed:
            return self
        note = f"fitted on {self.model['name']}, used on {model.name} in spite of other {' and '.join(changed)}"
        overrides = [*self.training.get("overrides", []), note]
        identity = {**self.model, "name": model.name, **{k: model.fingerprint[k] for k in changed}}
        return replace(self, model=identity, training={**self.training, "overrides": overrides})

    def is_seen(self, questions: Sequence[Question]) -> Bool[np.ndarray, " question"]:
        """Return which questions the lens was fitted, chosen or calibrated on, by their normalised text."""
        return np.isin(question_keys(questions, version=self.keys), np.union1d(self.seen, self.calibrated_on))

    def save(self, folder: str | Path) -> None:
        """Write the lens; an older one in the same folder is replaced only when the new one is complete."""
        target = Path(folder)
        refuse_other_folder(target)
        tensors = {
            "standardiser.mean": torch.from_numpy(self.standardiser.mean),
            "standardiser.scale": torch.from_numpy(self.standardiser.scale),
            "training.seen": torch.from_numpy(self.seen),
            "training.calibrated_on": torch.from_numpy(self.calibrated_on),
            **self.probe.tensors(),
            **self.shift.tensors(),
        }
        with fresh_folder(target) as temporary:
            write_atomic(temporary / "lens.safetensors", save_tensors(tensors))
            record = self.record() | {"tensors": digest_file(temporary / "lens.safetensors")}
            write_json(temporary / "lens.json", record | {"digest": digest(record)})
            if self.view:
                self.view.save(temporary)
            write_atomic(temporary / "README.md", card(self.record(), name=self.name).encode())

    def public(self) -> Lens:
        """Return the lens as others may see it: of local paths only the last part is left."""
        training = dict(self.training)
        if "overrides" in training:
            training["overrides"] = [without_paths(note) for note in training["overrides"]]
        return replace(self, model=self.model | {"name": public_name(self.model["name"])}, training=training)

    def record(self) -> dict[str, Any]:
        """Return the JSON part of the lens."""
        return {
            "format": FORMAT,
            "kind": self.kind,
            "rule": self.rule,
            "layers": list(self.layers),
            "inputs": list(self.inputs),
            "gamma": self.gamma,
            "base_weight": self.base_weight,
            "base": self.base,
            "base_temperature": self.base_temperature,
            "then_temperature": self.then_temperature,
            "style": asdict(self.style),
            "probe": self.probe.kind,
            "tempering": asdict(self.tempering) if self.tempering else None,
            "temperature": self.temperature,
            "sets": self.sets.to_dict() if self.sets else None,
            "abstention": self.abstention.to_dict() if self.abstention else None,
            "keys": self.keys,
            "model": self.model,
            "training": self.training,
            "trace": self.trace,
        }


def cooled(q: Float[np.ndarray, " row"], options: Options, *, temperature: float) -> Float[np.ndarray, " row"]:
    """Scale steered probabilities by a temperature.

    Trap: the paper's rule clips at 0. If that counted as 0 here, one right option among them would ask for a temperature
    without end.
    """
    return apply_temperature(np.maximum(q, SMALLEST), options, temperature=temperature)


def refuse_other_folder(target: Path) -> None:
    """Never replace a folder that is not a lens: a wrong --out must not delete somebody's files."""
    if target.exists() and not (target / "lens.json").exists() and (not target.is_dir() or any(target.iterdir())):
        raise CoralError(f"{target} exists and is not a lens; choose another folder for --out.")


def load_lens(folder: str | Path) -> Lens:
    """Read a lens from a folder, or from the hub if it is an id like `owner/name`, and check that nothing was changed or lost."""
    source = local_folder(folder)
    if not (source / "lens.json").exists():
        raise CoralError(f"{source} is not a lens: it has no lens.json; make one with `coral fit --out {source}`.")
    record = read_json(source / "lens.json")
    if record.get("format") != FORMAT:
        raise CoralError(f"{source} has lens format {record.get('format')!r}, but this version reads {FORMAT}.")
    claimed = record.pop("digest", None)
    path = source / "lens.safetensors"
    try:
        if digest(record) != claimed or digest_file(path) != record["tensors"]:
            raise CoralError(f"{source} is damaged: its content does not match its digests; fit or copy it again.")
        tensors = load_file(path)
    except (OSError, ValueError, SafetensorError) as error:  # ValueError: a number that is no number any more
        raise CoralError(f"{source} cannot be read ({error}); fit or copy the lens again.") from None
    return Lens(
        kind=record["kind"],
        rule=record["rule"],
        layers=tuple(record["layers"]),
        inputs=tuple(record["inputs"]),
        gamma=record["gamma"],
        base_weight=record["base_weight"],
        base=record["base"],
        base_temperature=record["base_temperature"],
        then_temperature=record["then_temperature"],
        style=Style(**record["style"]),
        standardiser=Standardiser(tensors["standardiser.mean"].numpy(), tensors["standardiser.scale"].numpy()),
        probe=PROBES[record["probe"]](tensors),
        shift=ShiftModel.from_tensors(tensors),
        tempering=Tempering(**record["tempering"]) if record["tempering"] else None,
        temperature=record["temperature"],
        model=record["model"],
        training=record["training"],
        seen=tensors["training.seen"].numpy(),
        trace=record["trace"],
        sets=Conformal.from_dict(record["sets"]) if record["sets"] else None,
        abstention=Abstention.from_dict(record["abstention"]) if record["abstention"] else None,
        # lenses of older versions have the keys of both among those seen
        calibrated_on=tensors.get("training.calibrated_on", torch.zeros(0, dtype=torch.int64)).numpy(),
        keys=record.get("keys", 1),
        view=load_view(source),
    )
