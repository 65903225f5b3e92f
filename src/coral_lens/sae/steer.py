"""Steer by features (appendix A.1): weights from ablations, and an edit that amplifies what a weighted feature adds.

h' = h + gamma * sum_j f_j w_j d_j * sigma, with f_j the feature's own activation in that very state. Number of features and
gamma are chosen on validation questions, and measured once on test questions; gamma = 0 is the unsteered model, to the bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from coral_lens.data.leaks import question_keys
from coral_lens.data.settings import Style
from coral_lens.engine.batches import Batch
from coral_lens.engine.edits import EditPlace, edited_positions, replaced
from coral_lens.engine.hooks import Site
from coral_lens.errors import CoralError
from coral_lens.metrics.comparisons import Difference, paired_difference
from coral_lens.metrics.scores import Score, measure
from coral_lens.records import Predictions, Question
from coral_lens.sae.autoencoder import CHUNK, Autoencoder
from coral_lens.sae.effects import AblationScores
from coral_lens.sae.folder import FeatureStudy, without_known
from coral_lens.sae.settings import STEERING_GAMMAS, STEERING_SIZES, SteerPlan, Weighing
from coral_lens.sae.sweep import Sweep, best_of, run_sweep, scores_by
from coral_lens.storage.files import digest, write_record
from coral_lens.storage.outputs import has_word, refuse_replacing
from coral_lens.storage.progress import Bar, silent

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


@dataclass(frozen=True)
class Steering:
    """Features with weights that sum to 1, the heaviest first."""

    features: Int[Tensor, " feature"]
    weights: Float[Tensor, " feature"]

    def top(self, n: int) -> Steering:
        """Return the n heaviest, normalised anew."""
        heaviest = self.weights[:n]
        return Steering(self.features[:n], heaviest / heaviest.sum())


def steering_of(
    d_accuracy: Mapping[int, float], d_ece: Mapping[int, float], weighing: Weighing | None = None
) -> Steering:
    """Return the beneficial features: those whose ablation lowers accuracy or raises ECE, weighted by how much."""
    worth = weighing or Weighing()
    weights = {
        j: worth.accuracy * max(-d_accuracy[j], 0.0) + worth.calibration * max(d_ece[j], 0.0)
        for j in sorted(d_accuracy)
    }
    beneficial = sorted((j for j, w in weights.items() if w > 0), key=lambda j: (-weights[j], j))
    if not beneficial:
        raise CoralError(
            f"None of the {len(weights)} ablated features is beneficial: taking out none of them lowers accuracy or raises "
            "ECE, so there is nothing to steer by. Ablate others, or on more questions."
        )
    values = torch.tensor([weights[j] for j in beneficial], dtype=torch.float64)
    return Steering(torch.tensor(beneficial), (values / values.sum()).float())


@dataclass(frozen=True)
class SteerFeatures:
    """An Edit that adds gamma * sum_j f_j w_j d_j, in the units of the states."""

    sae: Autoencoder
    steering: Steering
    gamma: float
    where: EditPlace = "all"

    @property
    def sites(self) -> tuple[Site, ...]:
        return (Site("residual", self.sae.layer),)

    def edit(self, site: Site, states: Tensor, batch: Batch) -> Tensor:
        if self.gamma == 0:
            return states
        return replaced(states, edited_positions(batch, self.where), self._steer)

    def _steer(self, states: Float[Tensor, "position width"]) -> Float[Tensor, "position width"]:
        features, sae = self.steering.features.to(states.device), self.sae.on(states.device)
        directions = self.gamma * self.steering.weights.to(states.device)[:, None] * sae.w_dec[features]
        parts = [chunk + sae.encode_some(chunk, features) @ directions for chunk in states.split(CHUNK)]
        return torch.cat(parts)

    @property
    def about(self) -> dict[str, Any]:
        """What the edit depends on beside the autoencoder."""
        return {
            "features": self.steering.features.tolist(),
            "weights": [float(w) for w in np.round(self.steering.weights.double().numpy(), 9)],
            "gamma": self.gamma,
            "where": self.where,
        }


def settings_of(
    n_beneficial: int, top: Sequence[int] = STEERING_SIZES, gammas: Sequence[float] = STEERING_GAMMAS
) -> list[tuple[int, float]]:
    """Return the settings to try: gamma 0 once, and each number of features that there are with each other gamma."""
    sizes = list(dict.fromkeys(min(n, n_beneficial) for n in top))
    return [(0, 0.0), *((n, g) for n in sizes for g in gammas if g != 0.0)]


# -------------------------------------------------------------------------------------------------- coral sae steer

SHOWN = ("accuracy", "ece", "brier", "nll")


@dataclass(frozen=True)
class SteerQuestions:
    """Questions that a steering is chosen on, and others that it is measured on."""

    validation: Sequence[Question]
    test: Sequence[Question]


def steer_by_features(
    model: Model,
    questions: SteerQuestions,
    study: FeatureStudy,
    plan: SteerPlan = SteerPlan(),  # noqa: B008  (frozen)
    *,
    bar: Bar = silent,
) -> dict[str, Any]:
    """Choose a setting on validation questions and measure it on test questions; return STUDY/steering.json."""
    sae, rule = study.autoencoder(), study.record["base"]
    refuse_replacing(study.folder, ["steering.json"], is_ours=lambda path: has_word(path, '"n_beneficial"'))
    study.check(model)
    test = refuse_shared(study, questions)
    sweeps = FeatureSweeps(model, study, sae, steering_from(study, plan), bar)
    settings = settings_of(len(sweeps.steering.features), plan.top, plan.gammas)
    shown = tuple(dict.fromkeys((*SHOWN, plan.criterion)))
    tried = scores_by(sweeps.run("validation", questions.validation, settings), rule, shown)
    values = [scores[plan.criterion] for scores in tried]
    chosen = best_of(values, plan.criterion)
    # gamma 0 comes first: the others are compared with it
    tested = list(dict.fromkeys([0, chosen, *best_by_size(settings, values, plan.criterion)]))
    scores = sweeps.run("test", test, [settings[i] for i in tested])
    base, *_ = predictions = [scores.predictions(row, rule) for row in scores.ablated]
    result = {
        "ablation": plan.ablation,
        "criterion": plan.criterion,
        "n_beneficial": len(sweeps.steering.features),
        "n_validation": len(questions.validation),
        "n_test": len(scores.ids),
        "validation": [{"features": n, "gamma": g, **s} for (n, g), s in zip(settings, tried, strict=True)],
        "rows": [
            {"features": settings[i][0], "gamma": settings[i][1], "chosen": i == chosen}
            | measured(steered, base if i else None, shown)
            for i, steered in zip(tested, predictions, strict=True)
        ],
    }
    write_record(study.folder / "steering.json", result)
    return result


@dataclass(frozen=True)
class FeatureSweeps:
    """Scores of questions under several settings of one steering, kept in the folder of its features."""

    model: Model
    study: FeatureStudy
    sae: Autoencoder
    steering: Steering
    bar: Bar

    def run(self, name: str, questions: Sequence[Question], settings: Sequence[tuple[int, float]]) -> AblationScores:
        """Return the scores under each setting (number of features, gamma)."""
        sweep = sweep_of(self.sae, self.steering, settings, Style(**self.study.record["style"]))
        folder = self.study.folder / f"steering-{name}-{digest(list(sweep.about))[:8]}"
        with self.bar(f"steering ({name})", len(questions), "questions") as advance:
            return run_sweep(self.model, questions, folder, sweep, progress=advance)


def measured(predictions: Predictions, base: Predictions | None, metrics: Sequence[str]) -> dict[str, Any]:
    """Return the test scores of a steering, and how much they are above those of the unsteered model, if it is given."""
    scores = {name: score for name, score in measure(predictions, n_boot=500).scores.items() if name in metrics}
    differences = {name: paired_difference(predictions, base, name) for name in metrics} if base else {}
    return {"test": intervals(scores), "less base": intervals(differences)}


def intervals(scores: Mapping[str, Score | Difference]) -> dict[str, dict[str, float]]:
    """Return value and interval of scores or differences; one that does not exist is left out, since JSON has no nan."""
    return {
        name: {"value": float(score.value), "low": float(score.low), "high": float(score.high)}
        for name, score in scores.items()
        if not np.isnan(score.value)
    }


def steering_from(study: FeatureStudy, plan: SteerPlan) -> Steering:
    """Return the weights that an ablation of the study gives; random features are not steered by."""
    ablation = study.ablation(plan.ablation)
    effects = {int(j): e for j, e in ablation["features"].items() if int(j) in set(ablation["chosen"])}
    changes = [{j: e[m]["value"] for j, e in effects.items()} for m in ("accuracy", "ece")]
    return steering_of(changes[0], changes[1], plan.weighing)


def sweep_of(sae: Autoencoder, steering: Steering, settings: Sequence[tuple[int, float]], style: Style) -> Sweep:
    """Return the edits of settings (number of features, gamma)."""
    edits = [SteerFeatures(sae, steering.top(n) if n else steering, gamma) for n, gamma in settings]
    return Sweep(sae.layer, edits, [e.about for e in edits], style)


def best_by_size(settings: Sequence[tuple[int, float]], values: Sequence[float], criterion: str) -> list[int]:
    """Return, for each number of features, the setting of the best gamma other than 0."""
    best = []
    for size in dict.fromkeys(n for n, _ in settings if n):
        places = [i for i, (n, _) in enumerate(settings) if n == size]
        best.append(places[best_of([values[i] for i in places], criterion)])
    return best


def refuse_shared(study: FeatureStudy, questions: SteerQuestions) -> list[Question]:
    """Return the test questions that nothing was chosen on; refuse validation questions that features were weighed on."""
    validation, test = questions.validation, questions.test
    if not validation:
        raise CoralError("There are no validation questions; give others than selection and ablation used.")
    n_known = len(validation) - len(without_known(validation, study.seen))
    if n_known:
        raise CoralError(f"{n_known} of the {len(validation)} validation questions were used before; give others.")
    fresh = without_known(test, study.seen | set(question_keys(validation).tolist()))
    if not fresh:
        raise CoralError(f"All {len(test)} test questions were used before, to choose something; give others.")
    if len(fresh) < len(test):
        warnings.warn(
            f"{len(test) - len(fresh)} of the {len(test)} test questions were used before and are left out.",
            stacklevel=3,
        )
    return fresh
