"""The steps of the commands `coral sae ...`, from questions to what is on the disk. Parses nothing and prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from coral_lens.errors import CoralError
from coral_lens.fitting import check_questions
from coral_lens.joined import Scored
from coral_lens.manifest import read_json, versions, write_json
from coral_lens.progress import Bar, silent
from coral_lens.prompts import prepare
from coral_lens.records import UNKNOWN, Question, Style
from coral_lens.sae.ablating import run_ablation
from coral_lens.sae.ablation import Ablating, AblationPlace, features_of
from coral_lens.sae.autoencoder import Autoencoder, load_autoencoder
from coral_lens.sae.codes import CodeStore, collect_codes, sae_digest
from coral_lens.sae.effects import effects
from coral_lens.sae.feature_study import FeatureStudy
from coral_lens.sae.quality import Recovered, fidelity, loss_recovered
from coral_lens.sae.selection import Selection, correlate, impact, ridge_direction, select
from coral_lens.sae.states import PooledStates, StateSource, TokenStore
from coral_lens.sae.tokens import Sampling, collect
from coral_lens.sae.training import train
from coral_lens.sae.weights import TrainingSettings
from coral_lens.splits import question_keys
from coral_lens.steering import BaseRule, base_probs, residuals
from coral_lens.store import ActivationStore, Extraction, extract

if TYPE_CHECKING:
    from coral_lens.models import Model

QUALITY_QUESTIONS = 200
"""Held-out questions on which the loss of the patched model is measured."""

SAMPLES = 50
"""Questions whose codes are taken in together."""


def train_on_tokens(
    model: Model,
    questions: Sequence[Question],
    folder: Path,
    *,
    how: tuple[Sampling, TrainingSettings],
    bar: Bar = silent,
) -> dict[str, Any]:
    """Collect token states, train on them and measure on what was held out; return the record in FOLDER/quality.json."""
    sampling, settings = how
    store = collect(model, questions, folder / "tokens", what=sampling, bar=bar)
    saes = train(store, folder, settings, layer=sampling.layer, bar=bar)
    held_out = held_out_questions(model, questions, store, sampling)
    if not held_out:
        return measure(saes, store, folder)
    prompts, answers = prepare(held_out, sampling.style, model).prompts, [q.answer for q in held_out]

    def patched(sae: Autoencoder) -> Recovered:
        return loss_recovered(model, sae, prompts, answers)

    return measure(saes, store, folder, loss=(patched, [q.id for q in held_out]))


def train_on_store(
    scored: Scored, folder: Path, *, how: tuple[int, TrainingSettings], bar: Bar = silent
) -> dict[str, Any]:
    """Train on the pooled answer states of a store at a layer; no model runs, so that no patched loss is measured."""
    layer, settings = how
    source = PooledStates(scored, layer, seed=settings.seed)
    return measure(train(source, folder, settings, layer=layer, bar=bar), source, folder)


def measure(
    saes: Mapping[int, Autoencoder],
    source: StateSource,
    folder: Path,
    *,
    loss: tuple[Callable[[Autoencoder], Recovered] | None, Sequence[str]] = (None, ()),
) -> dict[str, Any]:
    """Return FOLDER/quality.json, with what it has not yet: measures on held-out states, and the loss on named questions."""
    recover, names = loss
    path = folder / "quality.json"
    known = read_json(path) if path.exists() else {}
    for expansion, sae in saes.items():
        about = {"steps": sae.about["training"], "questions": list(names)}
        if known.get(f"{expansion}x", {}).get("about") == about:
            continue
        found = fidelity(sae, source, source.held_out)
        recovered = recover(sae) if recover else None
        patched = {**asdict(recovered), "share": recovered.share} if recovered else {}
        known[f"{expansion}x"] = {"n_features": sae.n_features, **asdict(found), "loss": patched, "about": about}
        write_json(path, known)
    return known


def held_out_questions(
    model: Model, questions: Sequence[Question], store: TokenStore, sampling: Sampling
) -> list[Question]:
    """Return labelled questions whose states training has not seen."""
    asked = prepare(questions, sampling.style, model).questions
    found = [asked[i] for i in store.questions(store.held_out)]
    return [q for q in found if q.answer != UNKNOWN][:QUALITY_QUESTIONS]


# -------------------------------------------------------------------------------------------------------- selection


@dataclass(frozen=True)
class Selecting:
    """How features are selected."""

    sae: Path
    k: int = 300
    """Features by each criterion."""
    base: BaseRule = "token"
    style: Style = Style()  # noqa: RUF009  (frozen)
    layer: int | None = None
    """Of an autoencoder that does not say it."""
    num_fewshot: int | None = None
    fixed_shots: bool = False
    """How the questions were loaded; ablation and steering ask theirs in the same way."""


def select_features(
    model: Model, questions: Sequence[Question], folder: Path, what: Selecting, *, bar: Bar = silent
) -> FeatureStudy:
    """Correlate the features of an autoencoder with the residuals of labelled questions, and choose the best."""
    sae = load_autoencoder(what.sae, layer=what.layer)
    sae.check(model)
    check_questions(questions)
    extraction = Extraction(layers=(sae.layer,), style=what.style)
    with bar("scoring", len(questions), "questions") as advance:
        scored = extract(model, questions, folder / "states", what=extraction, progress=advance)
    with bar("encoding", len(questions), "questions") as advance:
        codes = collect_codes(model, questions, folder / "codes", what=(sae, what.style), progress=advance)
    table = scored.table
    r = residuals(table, base_probs(table, what.base))
    found = correlate(iter_samples(codes, scored, r), sae.n_features)
    scores = impact(sae, ridge_direction(scored, sae.layer, r), found.mean)
    chosen = select(found, scores, k=what.k)
    record = {
        "sae": str(what.sae.resolve()),
        "sae_digest": sae_digest(sae),
        "layer": sae.layer,
        "base": what.base,
        "style": asdict(what.style),
        "shots": {"num_fewshot": what.num_fewshot, "fixed_shots": what.fixed_shots},
        "model": model.name,
        "weights": model.fingerprint["weights"],
        "questions": [q.id for q in scored.questions],
        "keys": question_keys(scored.questions).tolist(),
        "selection": chosen.record(),
        "versions": versions(),
    }
    write_json(folder / "selection.json", record)
    return FeatureStudy(folder)


def iter_samples(
    codes: CodeStore, scored: ActivationStore, r: Float[np.ndarray, " row"]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the codes of the options of some questions with their residuals."""
    number = {q.id: i for i, q in enumerate(scored.questions)}
    offsets, ids = scored.table.offsets, codes.ids
    some: list[tuple[np.ndarray, np.ndarray]] = []
    for coded in codes:
        at = number.get(ids[coded.question])
        if at is not None:
            some.append((coded.dense(codes.n_features), r[offsets[at] : offsets[at + 1]]))
        if len(some) == SAMPLES:
            yield np.concatenate([c for c, _ in some]), np.concatenate([t for _, t in some])
            some = []
    if some:
        yield np.concatenate([c for c, _ in some]), np.concatenate([t for _, t in some])


# --------------------------------------------------------------------------------------------------------- ablation


@dataclass(frozen=True)
class AblationPlan:
    """Which features are ablated, and how."""

    by: str = "correlation"
    """The criterion whose features are ablated: `correlation` or `impact`."""
    features: int = 300
    random: int = 100
    """Further features, drawn at random from those active often enough: what chance does."""
    where: AblationPlace = "all"
    keep_error: bool = False
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.by}-{self.where}{'-error' if self.keep_error else ''}"


def ablate_features(
    model: Model, questions: Sequence[Question], study: FeatureStudy, plan: AblationPlan, *, bar: Bar = silent
) -> dict[str, Any]:
    """Ablate the selected features, and random ones, on questions; return the record in STUDY/ablation-NAME.json."""
    record, sae = study.record, study.autoencoder()
    study.check(model)
    check_questions(questions)
    chosen, random = draw_features(study.selection, plan)
    ablating = Ablating(sae, features_of([*chosen, *random]), plan.where, plan.keep_error)
    with bar(f"ablating ({plan.name})", len(questions), "questions") as advance:
        folder = study.folder / f"ablation-{plan.name}"
        style = Style(**record["style"])
        scores = run_ablation(model, questions, folder, what=(ablating, style), progress=advance)
    groups = {plan.by: range(len(chosen)), "random": range(len(chosen), len(chosen) + len(random))}
    found = effects(scores, groups, record["base"])
    result = {
        "plan": asdict(plan),
        "of": study.identity,
        "model": record["model"],
        "chosen": chosen,
        "random": random,
        "questions": list(scores.ids),
        "keys": question_keys(questions).tolist(),
        "tasks": sorted({f"{q.task}:{q.split}" if q.split else q.task for q in questions}),
        **found,
    }
    write_json(study.folder / f"ablation-{plan.name}.json", result)
    return result


def draw_features(selection: Selection, plan: AblationPlan) -> tuple[list[int], list[int]]:
    """Return the features to ablate, and random ones beside them."""
    if plan.by not in selection.chosen:
        raise CoralError(f"Features were selected by {' and '.join(selection.chosen)}, not by {plan.by!r}.")
    chosen = selection.chosen[plan.by][: plan.features]
    others = np.setdiff1d(selection.alive(), chosen)
    n = min(plan.random, len(others))
    random = np.sort(np.random.default_rng(plan.seed).choice(others, n, replace=False)) if n else others[:0]
    return chosen, [int(j) for j in random]
