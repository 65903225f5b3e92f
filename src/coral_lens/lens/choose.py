"""Choose a lens's setting, layer and gamma on validation questions only, and fit it again on any part of the training data.

A recipe says how a correction is fitted; a candidate is a recipe with what its fits predict on validation questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from coral_lens.errors import CoralError
from coral_lens.lens.correction import Correction, average
from coral_lens.lens.probes.grid import grid_of
from coral_lens.lens.probes.mlp import LayerData
from coral_lens.lens.probes.registry import LENSES, LensKind, Setting, setting_of
from coral_lens.lens.probes.search import BUDGETS, Search, planned_epochs, search_mlp
from coral_lens.lens.probes.standardise import Standardiser, r_squared
from coral_lens.lens.rules import RULES, ProbeScores, Rule, log_of
from coral_lens.lens.settings import FitSettings
from coral_lens.lens.trace import GammaPoint
from coral_lens.lens.training_data import TrainingData
from coral_lens.metrics.scores import METRICS
from coral_lens.storage.files import digest, digest_bytes
from coral_lens.storage.progress import Bar, silent

SHOWN = ("accuracy", "ece", "brier", "nll")
"""The validation scores that are kept of every layer and gamma."""
SCREENED_LAYERS = 2
"""A network that is screened for is trained on so many layers, the best under the lens that screens."""


@dataclass(frozen=True)
class Work:
    """How a long choice is carried out, which changes nothing in its outcome."""

    journal: Path | None = None
    """Where the search for a network keeps what it has done."""
    bar: Bar = silent
    """Shows how far the choice is."""


AT_ONCE = Work()
"""Nothing is kept and nothing is shown."""


@dataclass(frozen=True)
class Recipe:
    """How to fit a lens again on other questions."""

    kind: str
    layers: tuple[int, ...]
    inputs: tuple[str, ...]
    settings: tuple[Setting, ...]
    """One setting, or one per layer where probes of single layers are averaged."""
    seed: int

    @property
    def rule(self) -> Rule:
        """How its scores correct probabilities."""
        return RULES[LENSES[self.kind].rule]


@dataclass(frozen=True)
class Candidate:
    """A recipe with what it predicts on the validation questions, each from a fit that did not see it."""

    recipe: Recipe
    r2: float
    predicted: ProbeScores
    """The scores of every row; only those of validation questions mean anything."""
    gammas: tuple[GammaPoint, ...]
    """Validation scores at every strength of its rule."""
    correction: Correction | None = field(repr=False, default=None)
    """The fit itself where there is one round only; of a network that of the first round."""

    def best(self, criterion: str) -> GammaPoint:
        """Return the best gamma with its scores; among equal ones the smallest, which changes the model least."""
        sign = -1.0 if METRICS[criterion].higher_is_better else 1.0
        return min(self.gammas, key=lambda point: (sign * point.scores[criterion], point.gamma))

    def at(self, gamma: float) -> GammaPoint:
        """Return the scores at one of its gammas."""
        return next(point for point in self.gammas if point.gamma == gamma)

    def cost(self, criterion: str) -> float:
        """Return what is minimised."""
        value = self.best(criterion).scores[criterion]
        return -value if METRICS[criterion].higher_is_better else value

    def layer_cost(self, settings: FitSettings) -> float:
        """Return what is minimised where layers are compared."""
        return -self.r2 if settings.layer_by == "r2" else self.cost(settings.criterion)

    def probs(self, gamma: float) -> Float[np.ndarray, " row"]:
        """Return the corrected probabilities of every row; only those of validation questions mean anything."""
        return self.recipe.rule.correct(self.predicted, gamma)


# ----------------------------------------------------------------------------------------------------------- the choice


def choose_candidate(
    data: TrainingData, name: str, settings: FitSettings, work: Work = AT_ONCE, tried: list[Candidate] | None = None
) -> tuple[Candidate, list[Candidate]]:
    """Return the best candidate of one kind of lens, and its own of single layers.

    `tried` are the candidates of single layers of its closed form, if they are there already.
    """
    kind = LENSES[name]
    if kind.network:
        return choose_network(data, name, settings, work)
    if kind.average > 1:
        # the members would each have ranks of their own, but side by side they share one set of inputs
        settings = replace(settings, inputs=tuple(i for i in settings.inputs if i != "rank"))
    singles = tried if tried is not None else try_singles(data, single_lens(name), settings, work.bar)
    ranked = sorted(singles, key=lambda c: c.layer_cost(settings))
    if kind.average > 1:
        return choose_ensemble(data, name, ranked[: kind.average], settings), singles
    if settings.top_layers > 1:
        return try_layers(data, name, top_layers(ranked, settings), settings), singles
    return ranked[0], singles


def single_lens(name: str) -> str:
    """Return the lens of closed form whose single layers are tried for this one."""
    return "listwise" if LENSES[name].average > 1 else name


def top_layers(ranked: Sequence[Candidate], settings: FitSettings) -> tuple[int, ...]:
    """Return the best layers, in their order."""
    return tuple(sorted(c.recipe.layers[0] for c in ranked[: settings.top_layers]))


def inputs_of(kind: LensKind, settings: FitSettings) -> tuple[str, ...]:
    """Return the inputs asked for and those that the lens always has."""
    return tuple(dict.fromkeys((*kind.inputs, *settings.inputs)))


def candidate_of(
    data: TrainingData, recipe: Recipe, predicted: ProbeScores, criterion: str, correction: Correction | None
) -> Candidate:
    """Score a recipe's validation predictions at every gamma."""
    names = tuple(dict.fromkeys((*SHOWN, criterion)))
    rule, rows = recipe.rule, data.options.rows(data.is_validation)
    gammas = tuple(GammaPoint(gamma, data.scores(rule.correct(predicted, gamma), names)) for gamma in rule.gammas)
    if any(np.isnan(point.scores[criterion]) for point in gammas):
        raise CoralError(
            f"{criterion} does not exist on the validation questions, because all are answered right or all "
            "wrong; choose by brier, or give more questions."
        )
    r2 = r_squared(data.r[rows], rule.change(predicted)[rows])
    return Candidate(recipe, r2, predicted, gammas, correction)


# ------------------------------------------------------------------------------------------------ lenses of closed form


def try_singles(data: TrainingData, name: str, settings: FitSettings, bar: Bar) -> list[Candidate]:
    """Try a lens of closed form on each layer by itself."""
    assert settings.layers is not None, "the caller says which layers there are"
    candidates = []
    with bar(f"fitting {name}", len(settings.layers), "layers") as advance:
        for layer in settings.layers:
            candidates.append(try_layers(data, name, (layer,), settings))
            advance(1)
    return candidates


def try_layers(data: TrainingData, name: str, layers: tuple[int, ...], settings: FitSettings) -> Candidate:
    """Fit a lens of closed form that reads these layers side by side, and take the setting that validates best."""
    kind = LENSES[name]
    recipe = Recipe(name, layers, inputs_of(kind, settings), kind.settings, settings.seed)
    features = data.features(layers, recipe.inputs)
    if kind.fit_folds and len(data.rounds) > 1:
        predicted, corrections = predict_folds(data, kind, features), None
    else:
        predicted, corrections = predict_settings(data, recipe, features)
    best = choose_setting(data, kind, predicted, settings.criterion)
    recipe = replace(recipe, settings=(kind.settings[best],))
    return candidate_of(data, recipe, predicted[best], settings.criterion, corrections[best] if corrections else None)


def predict_settings(
    data: TrainingData, recipe: Recipe, features: Float[np.ndarray, "row feature"]
) -> tuple[list[ProbeScores], list[Correction] | None]:
    """Predict the validation questions of every round for every setting; also return the fits if there is one round only."""
    kind, n = LENSES[recipe.kind], len(recipe.settings)
    scores, base = np.zeros((n, len(data.p))), np.tile(log_of(data.p), (n, 1))
    for mask in data.rounds:
        standardiser = data.standardiser(features, ~mask)
        train, validation = (data.sample(features, m, standardiser) for m in (~mask, mask))
        fits = kind.fit(train, validation, recipe.settings, recipe.seed)
        rows = data.options.rows(mask)
        for i, fit in enumerate(fits):
            scores[i, rows] = fit.scale * fit.probe.predict(validation.z)
            base[i, rows] *= fit.base_weight
    predicted = [ProbeScores(data.p, b, s, data.options) for b, s in zip(base, scores, strict=True)]
    if len(data.rounds) > 1:
        return predicted, None
    return predicted, [Correction(kind.rule, recipe.layers, recipe.inputs, standardiser, *fit) for fit in fits]


def predict_folds(data: TrainingData, kind: LensKind, features: Float[np.ndarray, "row feature"]) -> list[ProbeScores]:
    """Predict every question from the other folds, all folds at once, where a lens has a closed form for that."""
    assert kind.fit_folds is not None, "asked for by the caller"
    fold = np.argmax(data.rounds, axis=0)
    scores, base = kind.fit_folds(features, data.r, data.options.spread(fold), kind.settings), log_of(data.p)
    return [ProbeScores(data.p, base, s, data.options) for s in scores]


def choose_setting(data: TrainingData, kind: LensKind, predicted: Sequence[ProbeScores], criterion: str) -> int:
    """Return the number of the best setting."""
    if kind.chosen_by == "r2":
        rows = data.options.rows(data.is_validation)
        return int(np.argmax([r_squared(data.r[rows], p.scores[rows]) for p in predicted]))
    sign = -1.0 if METRICS[criterion].higher_is_better else 1.0
    full = [RULES[kind.rule].correct(p, 1.0) for p in predicted]
    return int(np.argmin([sign * data.scores(probs, [criterion])[criterion] for probs in full]))


def choose_ensemble(data: TrainingData, name: str, members: Sequence[Candidate], settings: FitSettings) -> Candidate:
    """Average linear probes of single layers: together they are one linear probe of the layers side by side."""
    members = sorted(members, key=lambda c: c.recipe.layers)
    base = np.mean([m.predicted.base for m in members], axis=0)
    scores = np.mean([m.predicted.scores for m in members], axis=0)
    layers = tuple(m.recipe.layers[0] for m in members)
    recipe = Recipe(name, layers, members[0].recipe.inputs, tuple(m.recipe.settings[0] for m in members), settings.seed)
    fits = [m.correction for m in members if m.correction is not None]
    correction = average(fits) if len(fits) == len(members) else None
    predicted = ProbeScores(data.p, base, scores, data.options)
    return candidate_of(data, recipe, predicted, settings.criterion, correction)


# ------------------------------------------------------------------------------------------------------------- networks


def choose_network(
    data: TrainingData, name: str, settings: FitSettings, work: Work
) -> tuple[Candidate, list[Candidate]]:
    """Choose a network's setting and layer in the first round, then predict the other rounds with that choice.

    As for every lens, each layer has its best setting, and the layers are compared by what steering with them does. The
    candidates of single layers are those of the network itself, in the first round.
    """
    assert settings.layers is not None, "the caller says which layers there are"
    fit = fit_screened if LENSES[name].screened_by else search_networks
    singles = fit(data, name, [(layer,) for layer in settings.layers], settings, work)
    ranked = sorted(singles, key=lambda c: c.layer_cost(settings))
    chosen = ranked[0]
    if settings.top_layers > 1:
        # a network that is screened for knows two layers of its own; which are the best, its screening lens says
        names = ranked if len(ranked) >= settings.top_layers else screened(data, name, settings, work)
        (chosen,) = fit(data, name, [top_layers(names, settings)], settings, work)
    return predict_rounds(data, chosen.recipe, settings.criterion, known=chosen.correction), singles


def screened(data: TrainingData, name: str, settings: FitSettings, work: Work) -> list[Candidate]:
    """Return the candidates of the lens that screens for a network, best first."""
    singles = try_singles(data, LENSES[name].screened_by, settings, work.bar)
    return sorted(singles, key=lambda c: c.layer_cost(settings))


def fit_screened(
    data: TrainingData, name: str, groups: Sequence[tuple[int, ...]], settings: FitSettings, work: Work
) -> list[Candidate]:
    """Fit a network at every setting on the groups of layers that are best under its screening lens; return the best of each."""
    kind, candidates = LENSES[name], []
    if len(groups) > SCREENED_LAYERS:
        groups = [c.recipe.layers for c in screened(data, name, settings, work)[:SCREENED_LAYERS]]
    for group in sorted(groups):
        recipe = Recipe(name, group, inputs_of(kind, settings), (), settings.seed)
        tried = [
            predict_rounds(data, replace(recipe, settings=(s,)), settings.criterion, n_rounds=1) for s in kind.settings
        ]
        candidates.append(min(tried, key=lambda c: c.cost(settings.criterion)))
    return candidates


def search_networks(
    data: TrainingData, name: str, groups: Sequence[tuple[int, ...]], settings: FitSettings, work: Work
) -> list[Candidate]:
    """Search the grid for the network with the best validation R2 (the paper's rule) on each group of layers.

    All are trained to their end, also where the search drops the layer early: they are compared by steering, and shown.
    """
    kind = LENSES[name]
    inputs = inputs_of(kind, settings)
    standardisers: dict[int, Standardiser] = {}

    def layer_data(i: int) -> LayerData:
        features = data.features(groups[i], inputs)
        standardisers[i] = data.standardiser(features, ~data.rounds[0])
        train, validation = (data.sample(features, m, standardisers[i]) for m in (~data.rounds[0], data.rounds[0]))
        return LayerData(train.z, train.r, validation.z, validation.r, data.device)

    grid = grid_of(settings.network, settings.hidden_of(name))
    budget = replace(BUDGETS[settings.network.search], every_layer=True)
    recipes = [Recipe(name, group, inputs, (), settings.seed) for group in groups]
    search = Search(layer_data, tuple(range(len(groups))), grid, settings.seed, budget)
    journal = journal_of(data, recipes, search.identity(), work.journal) if work.journal else None
    with work.bar("training networks", planned_epochs(len(groups), grid, budget), "epochs") as advance:
        outcome = search_mlp(
            layer_data,
            range(len(groups)),
            grid,
            seed=settings.seed,
            budget=budget,
            journal=journal,
            progress=advance,
        )
    candidates = []
    for i, (trial, probe) in outcome.layers.items():
        if i not in standardisers:
            layer_data(i)
        recipe = replace(recipes[i], settings=(setting_of(trial.settings),))
        correction = Correction(kind.rule, recipe.layers, inputs, standardisers[i], probe)
        assert trial.finished, "the budget says so"
        candidates.append(predict_rounds(data, recipe, settings.criterion, known=correction, n_rounds=1))
    return candidates


def journal_of(data: TrainingData, recipes: Sequence[Recipe], search: dict[str, Any], journal: Path) -> Path:
    """Return the journal of this very search, in a folder where other searches may have kept theirs.

    The name holds all that the search itself compares with its journal: it would refuse one of other states or of another
    version of torch, and nobody can name another file here. It knows its layers by number only, so which ones they are is
    in the name too.
    """
    identity = {
        "search": search,
        "layers": [list(recipe.layers) for recipe in recipes],
        "inputs": list(recipes[0].inputs),
        "data": digest_bytes(data.r.tobytes() + data.rounds[0].tobytes()),
    }
    return journal.with_name(f"{journal.stem}-{digest(identity)[:12]}{journal.suffix}")


def predict_rounds(
    data: TrainingData,
    recipe: Recipe,
    criterion: str,
    *,
    known: Correction | None = None,
    n_rounds: int | None = None,
) -> Candidate:
    """Predict the validation questions of every round; `known` is the fit of the first round, if there is one."""
    scores, base = np.zeros(len(data.p)), log_of(data.p)
    features = data.features(recipe.layers, recipe.inputs)
    first = None
    for i, mask in enumerate(data.rounds[:n_rounds]):
        correction = known if known is not None and i == 0 else fit_recipe(data, recipe, ~mask, mask)
        first = first or correction
        rows = np.flatnonzero(data.options.rows(mask))
        scores[rows] = correction.outputs(features, rows)
        base[rows] *= correction.base_weight
    of_rounds = replace(data, rounds=data.rounds[:n_rounds])
    # a network has to stop on questions that it is not fitted on, so the first round's is the one that is kept
    return candidate_of(of_rounds, recipe, ProbeScores(data.p, base, scores, data.options), criterion, first)


# ----------------------------------------------------------------------------------------------------- a recipe once more


def fit_recipe(
    data: TrainingData, recipe: Recipe, train: Bool[np.ndarray, " question"], stop: Bool[np.ndarray, " question"]
) -> Correction:
    """Fit a recipe on some questions; a network stops by the loss on others."""
    kind = LENSES[recipe.kind]
    groups = [(layer,) for layer in recipe.layers] if kind.average > 1 else [recipe.layers]
    corrections = []
    for layers, setting in zip(groups, recipe.settings, strict=True):
        features = data.features(layers, recipe.inputs)
        standardiser = data.standardiser(features, train)
        fitting, stopping = (data.sample(features, mask, standardiser) for mask in (train, stop))
        (fit,) = kind.fit(fitting, stopping, (setting,), recipe.seed)
        corrections.append(Correction(kind.rule, layers, recipe.inputs, standardiser, *fit))
    return average(corrections) if kind.average > 1 else corrections[0]


def predict_all(data: TrainingData, correction: Correction) -> ProbeScores:
    """Return what a correction says of every row, whichever questions it was fitted on."""
    return correction.scores_of(data.p, data.features(correction.layers, correction.inputs), data.options)
