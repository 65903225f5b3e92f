"""Fit a lens: extract states, learn a probe per layer on training questions, choose layer and strength on validation.

Test questions cannot be seen here: no function takes any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float

from coral_lens.baselines.temperature import apply_temperature, fit_temperature
from coral_lens.errors import CoralError, nearest
from coral_lens.lens import METHODS, Lens, Rule
from coral_lens.listwise import centre, fit_listwise_path, tilt
from coral_lens.manifest import digest, versions
from coral_lens.metrics import METRICS, score
from coral_lens.probes import (
    PENALTIES,
    LinearProbe,
    MlpSettings,
    Probe,
    Standardiser,
    fit_mlp,
    fit_ridge_path,
    fit_standardiser,
    r_squared,
)
from coral_lens.records import UNKNOWN, OptionTable, Predictions, Question, Style, offsets_of
from coral_lens.splits import question_keys, rows_of, split_mask
from coral_lens.steering import BASE_SCORES, BaseRule, base_probs, residuals, steer
from coral_lens.store import ActivationStore, Extraction, Progress, all_layers, extract

if TYPE_CHECKING:
    from coral_lens.models import Model

GAMMAS = tuple(0.25 * k for k in range(13))
"""The paper's 0.25 to 3.0, and 0: a probe that helps nowhere then does nothing."""
SHRINKAGES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""What gamma may be under the listwise rule, whose scores already have their scale; 0 is plain temperature scaling."""
SHOWN = ("accuracy", "ece", "brier", "nll")
"""The validation scores that are kept of every layer and gamma."""
FEWEST = 20
"""Fewer labelled questions than this are refused."""
MLP_LAYERS = 3
"""The MLP is trained on the layers that are best under ridge."""
MLP_GRID = tuple(
    MlpSettings(weight_decay=decay, output_penalty=penalty) for decay, penalty in product((0.1, 1.0, 10.0), (0.0, 0.1))
)


@dataclass(frozen=True)
class FitSettings:
    """How a lens is fitted and chosen."""

    probe: str = "ridge"
    """`ridge`; `mlp`, the paper's network of four hidden layers; or `listwise`, the lens that goes beyond the paper."""
    base: BaseRule = "token"
    """Score whose softmax is the base probability: `sum`, `token` (mean per token) or `char`."""
    style: Style = Style()  # noqa: RUF009  (frozen)
    """How questions without a template of their own are asked."""
    criterion: str = "brier"
    """The validation metric by which layer and gamma are chosen."""
    layers: tuple[int, ...] | None = None
    """Layers to try; None tries all."""
    validation: float = 0.2
    """Share of the questions, by whole groups, that choose penalty, layer and gamma."""
    seed: int = 0

    def __post_init__(self) -> None:
        known = {"probe": ("ridge", "mlp", "listwise"), "base": tuple(BASE_SCORES), "criterion": tuple(METRICS)}
        for name, values in known.items():
            value = getattr(self, name)
            if value not in values:
                raise CoralError(f"Unknown {name} {value!r}; use one of {', '.join(values)}.{nearest(value, values)}")
        if not 0.0 < self.validation < 1.0:
            raise CoralError(f"The validation share must lie between 0 and 1. Got {self.validation} instead.")


def fit(
    model: Model,
    questions: Sequence[Question],
    settings: FitSettings | None = None,
    *,
    work_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Lens:
    """Fit a lens on labelled questions.

    With `work_dir` the activations are kept there, and an interrupted or repeated fit reuses them.
    """
    settings = settings or FitSettings()
    check_questions(questions)
    what = Extraction(layers=settings.layers or all_layers(model), style=settings.style)
    with TemporaryDirectory(prefix="coral-") as temporary:
        folder = Path(work_dir) if work_dir else Path(temporary)
        store = extract(model, questions, folder, what=what, progress=progress)
        return fit_store(store, settings)


def check_questions(questions: Sequence[Question]) -> None:
    """Refuse questions that nothing can be learned from."""
    unlabelled = [q.id for q in questions if q.answer == UNKNOWN]
    if unlabelled:
        raise CoralError(
            f"{len(unlabelled)} of {len(questions)} training questions have no answer, first {unlabelled[0]!r}; "
            "fitting needs the correct option of each."
        )
    if len(questions) < FEWEST:
        raise CoralError(
            f"Fitting needs at least {FEWEST} labelled questions, better a thousand. Got {len(questions)}."
        )


@dataclass(frozen=True)
class Fold:
    """The table of a store with its base probabilities, and which questions train and which validate."""

    table: OptionTable
    p: Float[np.ndarray, " row"]
    r: Float[np.ndarray, " row"]
    validation: Bool[np.ndarray, " question"]

    @property
    def train_rows(self) -> Bool[np.ndarray, " row"]:
        return rows_of(self.table.offsets, ~self.validation)

    @property
    def validation_rows(self) -> Bool[np.ndarray, " row"]:
        return rows_of(self.table.offsets, self.validation)

    def validation_scores(self, probs: Float[np.ndarray, " row"], names: Sequence[str]) -> dict[str, float]:
        """Score probabilities of the validation rows."""
        sizes = np.diff(self.table.offsets)[self.validation]
        predictions = Predictions(
            method="candidate",
            model="",
            task="validation",
            split="",
            ids=tuple(map(str, range(len(sizes)))),
            answers=self.table.answers[self.validation],
            offsets=np.concatenate([[0], np.cumsum(sizes)]),
            probs=probs,
        )
        return {name: score(predictions, name) for name in names}

    @property
    def validation_offsets(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(np.diff(self.table.offsets)[self.validation])])


@dataclass(frozen=True)
class Candidate:
    """One fitted probe at one layer, with its predictions on the validation rows."""

    layer: int
    standardiser: Standardiser
    probe: Probe
    setting: dict[str, float]
    r2: float
    r_hat: Float[np.ndarray, " row"]
    gammas: list[dict[str, float]]
    """Validation scores at every gamma."""
    rule: Rule = "residual"
    base_weight: float = 1.0

    def best(self, criterion: str) -> dict[str, float]:
        """Return the scores at the best gamma; of equal ones the smallest, which changes the model least."""
        sign = -1.0 if METRICS[criterion].higher_is_better else 1.0
        return min(self.gammas, key=lambda s: (sign * s[criterion], s["gamma"]))


def fit_store(store: ActivationStore, settings: FitSettings) -> Lens:
    """Fit a lens from an activation store of labelled questions."""
    check_questions(store.questions)
    table = store.table
    p = base_probs(table, settings.base)
    mask = split_mask(store.questions, fraction=settings.validation, seed=settings.seed)
    fold = Fold(table, p, residuals(table, p), mask)
    layers = settings.layers or store.layers
    sign = -1.0 if METRICS[settings.criterion].higher_is_better else 1.0

    def cost(candidate: Candidate) -> float:
        return sign * candidate.best(settings.criterion)[settings.criterion]

    linear = listwise_candidate if settings.probe == "listwise" else ridge_candidate
    tried = [linear(store.layer(layer), layer, fold, settings) for layer in layers]
    if settings.probe == "mlp":
        ranked = sorted(tried, key=cost)[:MLP_LAYERS]
        tried = [mlp_candidate(store.layer(c.layer), c.layer, fold, settings) for c in ranked]
    return make_lens(store, settings, fold, min(tried, key=cost), tried)


def ridge_candidate(states: Float[np.ndarray, "row width"], layer: int, fold: Fold, settings: FitSettings) -> Candidate:
    """Fit ridge probes of one layer and take the penalty with the best validation R2."""
    standardiser, z, z_val = standardised(states, fold)
    r_val = fold.r[fold.validation_rows]
    probes = fit_ridge_path(z, fold.r[fold.train_rows])
    predicted = [probe.predict(z_val) for probe in probes]
    r2s = [r_squared(r_val, r_hat) for r_hat in predicted]
    best = int(np.argmax(r2s))
    curve = gamma_curve(fold, predicted[best], settings)
    setting = {"penalty": PENALTIES[best]}
    return Candidate(layer, standardiser, probes[best], setting, r2s[best], predicted[best], curve)


def mlp_candidate(states: Float[np.ndarray, "row width"], layer: int, fold: Fold, settings: FitSettings) -> Candidate:
    """Train the paper's MLP over its grid at one layer and take the setting with the best validation R2."""
    standardiser, z, z_val = standardised(states, fold)
    train = (z, fold.r[fold.train_rows].astype(np.float32))
    validation = (z_val, fold.r[fold.validation_rows].astype(np.float32))
    found: list[tuple[float, MlpSettings, Any, np.ndarray]] = []
    for grid_point in MLP_GRID:
        probe = fit_mlp(train, validation, grid_point, seed=settings.seed)
        r_hat = probe.predict(z_val)
        found.append((r_squared(fold.r[fold.validation_rows], r_hat), grid_point, probe, r_hat))
    r2, point, probe, r_hat = max(found, key=lambda f: f[0])
    setting = {k: float(getattr(point, k)) for k in ("weight_decay", "output_penalty", "learning_rate")}
    return Candidate(layer, standardiser, probe, setting, r2, r_hat, gamma_curve(fold, r_hat, settings))


def listwise_candidate(
    states: Float[np.ndarray, "row width"], layer: int, fold: Fold, settings: FitSettings
) -> Candidate:
    """Fit listwise lenses of one layer and take the weight decay with the best validation score."""
    standardiser, z, z_val = standardised(centre(states, fold.table.offsets), fold)
    p_val, offsets = fold.p[fold.validation_rows], fold.validation_offsets
    train_sizes = np.diff(fold.table.offsets)[~fold.validation]
    fits = fit_listwise_path(
        z, fold.p[fold.train_rows], offsets_of(train_sizes.tolist()), fold.table.answers[~fold.validation]
    )
    names = tuple(dict.fromkeys((*SHOWN, settings.criterion)))
    sign = -1.0 if METRICS[settings.criterion].higher_is_better else 1.0
    found = []
    for one in fits:
        scores = z_val.astype(np.float64) @ one.weight
        tilted = [tilt(p_val, scores, offsets, base_weight=one.base_weight, gamma=g) for g in SHRINKAGES]
        curve = [
            {"gamma": g, **fold.validation_scores(probs, names)} for g, probs in zip(SHRINKAGES, tilted, strict=True)
        ]
        found.append((sign * curve[-1][settings.criterion], one, curve, tilted[-1]))
    _, one, curve, probs = min(found, key=lambda f: f[0])
    moved = probs - p_val
    r2 = r_squared(fold.r[fold.validation_rows], moved)
    setting = {"weight_decay": one.decay, "base_weight": one.base_weight}
    return Candidate(
        layer, standardiser, LinearProbe(one.weight, 0.0), setting, r2, moved, curve, "listwise", one.base_weight
    )


def standardised(
    states: Float[np.ndarray, "row width"], fold: Fold
) -> tuple[Standardiser, Float[np.ndarray, "train width"], Float[np.ndarray, "validation width"]]:
    """Standardise with training statistics only."""
    train = states[fold.train_rows]
    standardiser = fit_standardiser(train)
    return standardiser, standardiser(train), standardiser(states[fold.validation_rows])


def gamma_curve(fold: Fold, r_hat: Float[np.ndarray, " row"], settings: FitSettings) -> list[dict[str, float]]:
    """Return the validation scores at every gamma."""
    names = tuple(dict.fromkeys((*SHOWN, settings.criterion)))
    p = fold.p[fold.validation_rows]
    curve = [
        {"gamma": gamma, **fold.validation_scores(steer(p, r_hat, fold.validation_offsets, gamma=gamma), names)}
        for gamma in GAMMAS
    ]
    if any(np.isnan(point[settings.criterion]) for point in curve):
        raise CoralError(
            f"{settings.criterion} does not exist on the validation questions, because all are answered right or all "
            "wrong; choose by brier, or give more questions."
        )
    return curve


def make_lens(
    store: ActivationStore, settings: FitSettings, fold: Fold, chosen: Candidate, tried: Sequence[Candidate]
) -> Lens:
    """Put the chosen candidate together with its controls and its provenance."""
    best = chosen.best(settings.criterion)
    p_val, offsets = fold.p[fold.validation_rows], fold.validation_offsets
    temperature = fit_temperature(p_val, offsets, fold.table.answers[fold.validation])
    cooled = apply_temperature(p_val, offsets, temperature=temperature)
    trace = {
        "criterion": settings.criterion,
        "chosen": {"layer": chosen.layer, "r2": chosen.r2, **chosen.setting},
        "layers": [
            {"layer": c.layer, "r2": c.r2, **c.setting, "best": c.best(settings.criterion), "at_one": at(c.gammas, 1.0)}
            for c in tried
        ],
        "gammas": chosen.gammas,
        "validation": {
            "base": fold.validation_scores(p_val, SHOWN),
            "temperature": fold.validation_scores(cooled, SHOWN),
            METHODS[chosen.rule]: {name: best[name] for name in SHOWN},
        },
    }
    questions = store.questions
    training = {
        "tasks": dict(Counter(f"{q.task}:{q.split}" if q.split else q.task for q in questions)),
        "n_train": int((~fold.validation).sum()),
        "n_validation": int(fold.validation.sum()),
        "settings": asdict(replace(settings, layers=settings.layers or store.layers)),
        "store": digest(store.manifest),
        "questions": store.manifest["questions"],
        "versions": versions(),
    }
    identity = {k: store.manifest["model"][k] for k in ("name", "weights", "tokenizer", "dtype")}
    return Lens(
        rule=chosen.rule,
        layer=chosen.layer,
        gamma=best["gamma"],
        base_weight=chosen.base_weight,
        base=settings.base,
        style=settings.style,
        standardiser=chosen.standardiser,
        probe=chosen.probe,
        temperature=temperature,
        model=identity,
        training=training,
        seen=np.unique(question_keys(questions)),
        trace=trace,
    )


def at(curve: Sequence[dict[str, float]], gamma: float) -> dict[str, float]:
    """Return the scores of a curve at one gamma."""
    return next(point for point in curve if point["gamma"] == gamma)
