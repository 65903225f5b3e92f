"""What a feature responds to: the questions and options that activate it most, its correlation and its ablation effects."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coral_lens.engine.activations import ActivationStore
from coral_lens.errors import CoralError
from coral_lens.sae.codes import CodeStore
from coral_lens.sae.folder import FeatureStudy

SHOWN = 12
"""Features on a page, unless some are asked for."""
EXAMPLES = 8
"""Options that are shown of a feature."""
PLACES = {"all": "all positions", "answer": "answer tokens"}


def ablation_phrase(plan: Mapping[str, Any]) -> str:
    """Return in words which features were taken out, and where."""
    error = ", error kept" if plan["keep_error"] else ""
    return f"chosen by {plan['by']}, {PLACES[plan['where']]}{error}"


def top_options(study: FeatureStudy, features: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """Return the options that activate each feature most, of the questions that it was selected on; one pass."""
    codes, scored = CodeStore(study.folder / "codes"), ActivationStore(study.folder / "states")
    by_id = {q.id: q for q in scored.questions}
    best: dict[int, list[tuple[float, str, int]]] = {j: [] for j in features}
    for coded in codes:
        name = codes.ids[coded.question]
        for at in np.flatnonzero(np.isin(coded.index, features)):
            heap = best[int(coded.index[at])]
            heapq.heappush(heap, (float(coded.value[at]), name, int(coded.option[at])))
            if len(heap) > EXAMPLES:
                heapq.heappop(heap)
    return {
        j: [
            {
                "text": by_id[name].text,
                "option": by_id[name].options[i],
                "is_answer": by_id[name].answer == i,
                "value": value,
            }
            for value, name, i in sorted(heap, reverse=True)
            if name in by_id
        ]
        for j, heap in best.items()
    }


def ablations_of(study: FeatureStudy) -> dict[str, dict[str, Any]]:
    """Return the records of the study's ablations by name."""
    return {name: study.ablation(name) for name in study.ablations()}


def dashboard_of(study: FeatureStudy, features: Sequence[int] = ()) -> dict[str, Any]:
    """Return what the page says of features: of those asked for, or of the first that were selected."""
    record, selection, ablations = study.record, study.selection, ablations_of(study)
    chosen = list(features) or selection.chosen["correlation"][:SHOWN]
    unknown = [j for j in chosen if not 0 <= j < len(selection.r)]
    if unknown:
        raise CoralError(
            f"Feature {unknown[0]} does not exist: the autoencoder has features 0 to {len(selection.r) - 1}."
        )
    examples = top_options(study, chosen)
    lead = [
        f"{len(selection.r):,} features of layer {record['layer']}; {len(selection.alive()):,} are active often enough to be "
        f"looked at, on {len(record['questions']):,} questions."
    ]
    for ablation in ablations.values():
        mean = ablation["groups"].get(ablation["plan"]["by"], {}).get("ece", {}).get("mean")
        if mean:
            lead.append(
                f"Taking out one feature ({ablation_phrase(ablation['plan'])}) changes ECE by {mean['value']:+.2e} on average "
                f"(95 % interval {mean['low']:+.2e} to {mean['high']:+.2e})."
            )
    shown = [
        {
            "feature": j,
            "r": float(selection.r[j]),
            "frequency": float(selection.n_active[j]) / selection.n_samples,
            "effects": [(n, a["features"][str(j)]) for n, a in ablations.items() if str(j) in a["features"]],
            "top": examples[j],
        }
        for j in chosen
    ]
    names = {name: ablation_phrase(ablation["plan"]) for name, ablation in ablations.items()}
    return {"title": f"{record['model']}: features of layer {record['layer']}", "lead": lead, "features": shown, "names": names,
            "foot": f"Autoencoder {record['sae_digest'][:12]}, base {record['base']}."}  # fmt: skip
