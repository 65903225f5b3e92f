"""`coral sae steer`: number of features and gamma by validation questions, then measured once on test questions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from coral_lens.errors import CoralError
from coral_lens.manifest import digest, write_json
from coral_lens.metrics import Score, evaluate
from coral_lens.progress import Bar, silent
from coral_lens.records import Question, Style
from coral_lens.sae.autoencoder import Autoencoder
from coral_lens.sae.feature_study import FeatureStudy, without_known
from coral_lens.sae.steering import GAMMAS, TOP, SteerFeatures, Steering, Weighing, settings_of, steering_of
from coral_lens.sae.sweep import Sweep, best_of, run_sweep, scores_by
from coral_lens.splits import question_keys
from coral_lens.stats import Difference, paired_difference

if TYPE_CHECKING:
    from coral_lens.models import Model

SHOWN = ("accuracy", "ece", "brier", "nll")


@dataclass(frozen=True)
class SteerPlan:
    """What is tried."""

    ablation: str = "correlation-all"
    """The ablation whose effects are the weights: criterion and place."""
    weighing: Weighing = Weighing()  # noqa: RUF009  (frozen)
    top: tuple[int, ...] = TOP
    gammas: tuple[float, ...] = GAMMAS
    criterion: str = "brier"


def steer_by_features(
    model: Model,
    validation: Sequence[Question],
    test: Sequence[Question],
    study: FeatureStudy,
    *,
    how: tuple[SteerPlan, Bar] = (SteerPlan(), silent),
) -> dict[str, Any]:
    """Choose a setting on validation questions and measure it on test questions; return STUDY/steering.json."""
    plan, bar = how
    record, sae = study.record, study.autoencoder()
    study.check(model)
    test = refuse_shared(study, validation, test)
    steering = steering_from(study, plan)
    settings = settings_of(len(steering.features), plan.top, plan.gammas)
    rule, style = record["base"], Style(**record["style"])

    def swept(name: str, questions: Sequence[Question], some: Sequence[tuple[int, float]]) -> Any:
        what = sweep_of(sae, steering, some, style)
        with bar(f"steering ({name})", len(questions), "questions") as advance:
            folder = study.folder / f"steering-{name}-{digest(list(what.about))[:8]}"
            return run_sweep(model, questions, folder, what=what, progress=advance)

    shown = tuple(dict.fromkeys((*SHOWN, plan.criterion)))
    tried = scores_by(swept("validation", validation, settings), rule, shown)
    values = [t[plan.criterion] for t in tried]
    chosen = best_of(values, plan.criterion)
    kept = [chosen, *best_by_size(settings, values, plan.criterion)]
    kept = list(dict.fromkeys([0, *kept]))  # gamma 0 first: what the others are compared with
    scores = swept("test", test, [settings[i] for i in kept])
    base, *_ = predictions = [scores.predictions(row, rule) for row in scores.ablated]
    rows = [
        {
            "features": settings[i][0],
            "gamma": settings[i][1],
            "chosen": i == chosen,
            "test": intervals({m: s for m, s in evaluate(found, n_boot=500).scores.items() if m in shown}),
            "less base": intervals({m: paired_difference(found, base, m) for m in shown}) if i else {},
        }
        for i, found in zip(kept, predictions, strict=True)
    ]
    result = {
        "ablation": plan.ablation,
        "criterion": plan.criterion,
        "n_beneficial": len(steering.features),
        "n_validation": len(validation),
        "n_test": len(scores.ids),
        "validation": [{"features": n, "gamma": g, **t} for (n, g), t in zip(settings, tried, strict=True)],
        "rows": rows,
    }
    write_json(study.folder / "steering.json", result)
    return result


def intervals(found: Mapping[str, Score | Difference]) -> dict[str, dict[str, float]]:
    """Return value and interval of scores or differences; one that does not exist is left out, since JSON has no nan."""
    return {
        name: {"value": float(one.value), "low": float(one.low), "high": float(one.high)}
        for name, one in found.items()
        if not np.isnan(one.value)
    }


def steering_from(study: FeatureStudy, plan: SteerPlan) -> Steering:
    """Return the weights that an ablation of the study gives; random features are not steered by."""
    found = study.ablation(plan.ablation)
    effects = {int(j): e for j, e in found["features"].items() if int(j) in set(found["chosen"])}
    changes = [{j: e[m]["value"] for j, e in effects.items()} for m in ("accuracy", "ece")]
    return steering_of(changes[0], changes[1], plan.weighing)


def sweep_of(sae: Autoencoder, steering: Steering, settings: Sequence[tuple[int, float]], style: Style) -> Sweep:
    """Return the edits of settings (number of features, gamma)."""
    edits = [SteerFeatures(sae, steering.top(n) if n else steering, gamma) for n, gamma in settings]
    return Sweep(sae.layer, edits, [e.about for e in edits], style)


def best_by_size(settings: Sequence[tuple[int, float]], values: Sequence[float], criterion: str) -> list[int]:
    """Return, for each number of features, the setting of the best gamma other than 0."""
    found = []
    for size in dict.fromkeys(n for n, _ in settings if n):
        some = [i for i, (n, _) in enumerate(settings) if n == size]
        found.append(some[best_of([values[i] for i in some], criterion)])
    return found


def refuse_shared(study: FeatureStudy, validation: Sequence[Question], test: Sequence[Question]) -> list[Question]:
    """Return the test questions that nothing was chosen on; refuse validation questions that features were weighed on."""
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
