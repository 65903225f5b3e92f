"""The lens: a fitted correction with all that is needed to apply it, and the fingerprints of what it was fitted on.

    lens.json           layer, gamma, base rule, prompt style, fingerprints, how it was chosen
    lens.safetensors    standardiser and probe weights
    README.md           a card for people

It refuses a model other than its own. Never pickle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors

from coral_lens.baselines.temperature import apply_temperature
from coral_lens.errors import CoralError
from coral_lens.listwise import centre, tilt
from coral_lens.manifest import digest, digest_file, fresh_folder, read_json, write_atomic, write_json
from coral_lens.probes import PROBES, Probe, Standardiser
from coral_lens.records import Predictions, Question, Style
from coral_lens.splits import question_keys
from coral_lens.steering import BaseRule, base_probs, steer
from coral_lens.store import ActivationStore, Extraction, Progress, extract

if TYPE_CHECKING:
    from coral_lens.models import Model

FORMAT = 1
Rule = Literal["residual", "listwise"]
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


@dataclass(frozen=True)
class Lens:
    """Turns pooled states and base probabilities into steered probabilities."""

    rule: Rule
    """`residual`: the paper's p + gamma * r_hat, clipped. `listwise`: softmax(base_weight * log p + gamma * score)."""
    layer: int
    gamma: float
    base_weight: float
    """Of log p under the listwise rule; the paper's rule does not use it."""
    base: BaseRule
    style: Style
    standardiser: Standardiser
    probe: Probe
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

    @property
    def name(self) -> str:
        what = f"{self.probe.kind} probe" if self.rule == "residual" else "listwise lens"
        return f"{what}, layer {self.layer}, gamma {self.gamma:g}"

    @property
    def method(self) -> str:
        return METHODS[self.rule]

    def steered(
        self, p: Float[np.ndarray, " row"], states: Float[np.ndarray, "row width"], offsets: Int[np.ndarray, " edge"]
    ) -> Float[np.ndarray, " row"]:
        """Return the corrected probabilities from base ones and pooled states of this lens's layer."""
        if self.rule == "residual":
            return steer(p, self.probe.predict(self.standardiser(states)), offsets, gamma=self.gamma)
        scores = self.probe.predict(self.standardiser(centre(states, offsets)))
        return tilt(p, scores, offsets, base_weight=self.base_weight, gamma=self.gamma)

    def apply(self, store: ActivationStore) -> dict[str, Float[np.ndarray, " row"]]:
        """Return the option probabilities of each method: base, temperature, and this lens's own."""
        table = store.table
        p = base_probs(table, self.base)
        return {
            "base": p,
            "temperature": apply_temperature(p, table.offsets, temperature=self.temperature),
            self.method: self.steered(p, store.layer(self.layer), table.offsets),
        }

    @contextmanager
    def scored(
        self,
        model: Model,
        questions: Sequence[Question],
        *,
        work_dir: Path | None = None,
        progress: Progress | None = None,
    ) -> Iterator[ActivationStore]:
        """Score questions and yield the store of this lens's layer.

        With `work_dir` it is kept there and an interrupted run goes on; without, it is thrown away afterwards.
        """
        self.check(model, questions)
        what = Extraction(layers=(self.layer,), style=self.style)
        with TemporaryDirectory(prefix="coral-") as temporary:
            yield extract(model, questions, work_dir or Path(temporary), what=what, progress=progress)

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
            asked, table, probs = store.questions, store.table, self.apply(store)
        answers = []
        for i, question in enumerate(asked):
            rows = slice(table.offsets[i], table.offsets[i + 1])
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

    def predictions_on(self, store: ActivationStore) -> dict[str, Predictions]:
        """Return the Predictions of each method on the questions of a store."""
        table, questions = store.table, store.questions
        return {
            method: Predictions(
                method=method,
                model=store.manifest["model"]["name"],
                task=questions[0].task,
                split=questions[0].split,
                ids=tuple(q.id for q in questions),
                answers=table.answers,
                offsets=table.offsets,
                probs=p,
            )
            for method, p in self.apply(store).items()
        }

    def check(self, model: Model, questions: Sequence[Question] = ()) -> None:
        """Refuse a model other than the one the lens was fitted on, and prompts of another chat setting."""
        for key in ("weights", "tokenizer"):
            if self.model[key] != model.fingerprint[key]:
                raise CoralError(
                    f"This lens was fitted on {self.model['name']!r}, whose {key} are {self.model[key][:12]}; "
                    f"{model.name!r} has {model.fingerprint[key][:12]}. Use that model, or fit a lens on this one."
                )
        for question in questions:
            if question.rendered is not None and question.rendered.chat != self.style.chat:
                have, want = ("with" if c else "without" for c in (question.rendered.chat, self.style.chat))
                raise CoralError(
                    f"Question {question.id!r} was rendered {have} the chat template, but the lens was fitted {want} it."
                )

    def is_seen(self, questions: Sequence[Question]) -> Bool[np.ndarray, " question"]:
        """Return which questions the lens was fitted or chosen on, by their normalised text."""
        return np.isin(question_keys(questions), self.seen)

    def save(self, folder: str | Path) -> None:
        """Write the lens; an older one in the same folder is replaced only when the new one is complete."""
        target = Path(folder)
        refuse_other_folder(target)
        tensors = {
            "standardiser.mean": torch.from_numpy(self.standardiser.mean),
            "standardiser.scale": torch.from_numpy(self.standardiser.scale),
            "training.seen": torch.from_numpy(self.seen),
            **self.probe.tensors(),
        }
        with fresh_folder(target) as temporary:
            write_atomic(temporary / "lens.safetensors", save_tensors(tensors))
            record = self.record() | {"tensors": digest_file(temporary / "lens.safetensors")}
            write_json(temporary / "lens.json", record | {"digest": digest(record)})
            write_atomic(temporary / "README.md", card(self).encode())

    def record(self) -> dict[str, Any]:
        """Return the JSON part of the lens."""
        return {
            "format": FORMAT,
            "rule": self.rule,
            "layer": self.layer,
            "gamma": self.gamma,
            "base_weight": self.base_weight,
            "base": self.base,
            "style": asdict(self.style),
            "probe": self.probe.kind,
            "temperature": self.temperature,
            "model": self.model,
            "training": self.training,
            "trace": self.trace,
        }


def refuse_other_folder(target: Path) -> None:
    """Never replace a folder that is not a lens: a wrong --out must not delete somebody's files."""
    if target.exists() and not (target / "lens.json").exists() and (not target.is_dir() or any(target.iterdir())):
        raise CoralError(f"{target} exists and is not a lens; choose another folder for --out.")


def load_lens(folder: str | Path) -> Lens:
    """Read a lens and check that nothing in it was changed or lost."""
    source = Path(folder)
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
        rule=record["rule"],
        layer=record["layer"],
        gamma=record["gamma"],
        base_weight=record["base_weight"],
        base=record["base"],
        style=Style(**record["style"]),
        standardiser=Standardiser(tensors["standardiser.mean"].numpy(), tensors["standardiser.scale"].numpy()),
        probe=PROBES[record["probe"]](tensors),
        temperature=record["temperature"],
        model=record["model"],
        training=record["training"],
        seen=tensors["training.seen"].numpy(),
        trace=record["trace"],
    )


def card(lens: Lens) -> str:
    """Return the README of a lens folder."""
    validation = lens.trace["validation"]
    rows = "\n".join(
        f"| {m} | " + " | ".join(f"{100 * validation[m][s]:.1f}" for s in ("accuracy", "ece", "brier", "nll")) + " |"
        for m in ("base", "temperature", lens.method)
    )
    tasks = ", ".join(f"{t} ({n})" for t, n in sorted(lens.training["tasks"].items()))
    return f"""# A CORAL lens for {lens.model["name"]}

A {lens.name}. It corrects the probabilities that a frozen model gives to the options of a multiple-choice question,
from the model's own hidden states. Base probabilities: softmax of the `{lens.base}` score; prompts: `{lens.style}`.

Fitted on {lens.training["n_train"]} questions, chosen on {lens.training["n_validation"]} others: {tasks}.
Layer 0 is the embedding output, layer l the residual stream after block l, before the final norm.

Scores on the validation questions it was chosen on (percent; so these flatter it: use `coral eval` on held-out questions):

| method | accuracy | ECE | Brier | NLL |
|---|---|---|---|---|
{rows}

Limits: it works only with the model of the fingerprint in `lens.json`, it is only as good as the questions it learned from,
and on unlike questions its confidence can be worse than that of plain temperature scaling. Measure before you rely on it.
The questions' licences apply to what was learned from them.
"""
