"""Choose a lens's setting, layer and gamma on validation questions only, and fit it again on any part of the training data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int

from coral_lens.errors import CoralError
from coral_lens.lens.probes.mlp import HIDDEN, LayerData, MlpSettings
from coral_lens.lens.probes.registry import KINDS, Fitted, Kind, Setting, setting_of
from coral_lens.lens.probes.ridge import LinearProbe
from coral_lens.lens.probes.search import GRID, planned_epochs, search_mlp
from coral_lens.lens.probes.standardise import Probe, Standardiser, predict_states, r_squared
from coral_lens.lens.rules import Rule, steer
from coral_lens.lens.training_data import TrainingData
from coral_lens.metrics.scores import METRICS
from coral_lens.progress import Bar, silent
from coral_lens.ragged import Options
from coral_lens.storage.files import digest, digest_bytes

GAMMAS = tuple(0.25 * k for k in range(13))
"""The paper's 0.25 to 3.0, and 0: a probe that helps nowhere then does nothing."""
SHRINKAGES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""What gamma may be under the listwise rule, whose scores already have their scale; 0 is plain temperature scaling."""
SHOWN = ("accuracy", "ece", "brier", "nll")
"""The validation scores that are kept of every layer and gamma."""
NETWORK_LAYERS = 8
"""Networks are searched on so many layers, the best under the lens that screens for them."""
LISTWISE_NETWORK_LAYERS = 2


@dataclass(frozen=True)
class Asked:
    """What is asked of the choice: the part of FitSettings that it needs."""

    criterion: str = "brier"
    inputs: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    top_layers: int = 1
    """Of the best single layers, so many are read side by side."""
    depth: int = 4
    """Hidden layers of the network."""
    seed: int = 0
    journal: Path | None = None
    """Where the search for a network keeps what it has done."""
    bar: Bar = silent
    """Shows how far the choice is."""


@dataclass(frozen=True)
class Parts:
    """What a fit leaves: all that a lens needs to turn states into scores."""

    standardiser: Standardiser
    probe: Probe
    base_weight: float
    scale: float

    def scores(
        self, features: Float[np.ndarray, "row feature"], rows: Int[np.ndarray, " some"] | None = None
    ) -> Float[np.ndarray, " some"]:
        """Return the scores of some rows, or of all, from inputs that are not standardised yet."""
        return self.scale * predict_states(self.probe, self.standardiser, features, rows)


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
        return KINDS[self.kind].rule


@dataclass(frozen=True)
class Candidate:
    """A recipe with what it predicts on the validation questions, each from a fit that did not see it."""

    recipe: Recipe
    r2: float
    base: Float[np.ndarray, " row"]
    """The base's part under the listwise rule: its weight times log p."""
    scores: Float[np.ndarray, " row"]
    gammas: list[dict[str, float]]
    """Validation scores at every gamma."""
    parts: Parts | None = field(repr=False, default=None)
    """The fit itself where there is one round only."""

    def best(self, criterion: str) -> dict[str, float]:
        """Return the scores at the best gamma; of equal ones the smallest, which changes the model least."""
        sign = -1.0 if METRICS[criterion].higher_is_better else 1.0
        return min(self.gammas, key=lambda s: (sign * s[criterion], s["gamma"]))

    def probs(self, data: TrainingData, gamma: float) -> Float[np.ndarray, " row"]:
        """Return the steered probabilities of every row; only those of validation questions mean anything."""
        return moved(self.recipe.rule, data.p, self.base, self.scores, data.options, gamma)


def moved(
    rule: Rule,
    p: Float[np.ndarray, " row"],
    base: Float[np.ndarray, " row"],
    scores: Float[np.ndarray, " row"],
    options: Options,
    gamma: float,
) -> Float[np.ndarray, " row"]:
    """Return probabilities moved by scores under a rule."""
    if rule == "residual":
        return steer(p, scores, options, gamma=gamma)
    return options.softmax(base + gamma * scores)


# ------------------------------------------------------------------------------------------------------- candidates


def try_layers(data: TrainingData, name: str, layers: tuple[int, ...], asked: Asked) -> Candidate:
    """Fit a lens of closed form that reads these layers side by side, and take the setting that validates best."""
    kind = KINDS[name]
    inputs = inputs_of(kind, asked)
    features = data.features(layers, inputs)
    n = len(kind.settings)
    scores = np.zeros((n, len(data.p)))
    base = np.tile(np.log(np.maximum(data.p, 1e-300)), (n, 1))
    if kind.across and len(data.rounds) > 1:
        return candidate_across(data, name, layers, features, asked)
    for mask in data.rounds:
        standardiser = data.standardiser(features, ~mask)
        train, validation = (data.sample(features, m, standardiser) for m in (~mask, mask))
        fits = kind.fit(train, validation, kind.settings, asked.seed)
        rows = data.options.rows(mask)
        for i, one in enumerate(fits):
            scores[i, rows] = one.scale * one.probe.predict(validation.z)
            base[i, rows] *= one.base_weight
    best = judge(data, kind, base, scores, asked)
    parts = parts_of(standardiser, fits[best]) if len(data.rounds) == 1 else None
    recipe = Recipe(name, layers, inputs, (kind.settings[best],), asked.seed)
    return candidate_of(data, recipe, base[best], scores[best], asked, parts)


def candidate_across(
    data: TrainingData,
    name: str,
    layers: tuple[int, ...],
    features: Float[np.ndarray, "row feature"],
    asked: Asked,
) -> Candidate:
    """Do the same for all folds at once, where a lens has a closed form for that."""
    kind = KINDS[name]
    assert kind.across is not None, "asked for by the caller"
    fold = np.argmax(data.rounds, axis=0)
    scores = kind.across(features, data.r, data.options.spread(fold), kind.settings)
    base = np.log(np.maximum(data.p, 1e-300))
    best = judge(data, kind, np.broadcast_to(base, scores.shape), scores, asked)
    recipe = Recipe(name, layers, inputs_of(kind, asked), (kind.settings[best],), asked.seed)
    return candidate_of(data, recipe, base, scores[best], asked, None)


def judge(
    data: TrainingData,
    kind: Kind,
    base: Float[np.ndarray, "setting row"],
    scores: Float[np.ndarray, "setting row"],
    asked: Asked,
) -> int:
    """Return the number of the best setting."""
    if kind.judge == "r2":
        rows = data.options.rows(data.covered)
        return int(np.argmax([r_squared(data.r[rows], one[rows]) for one in scores]))
    sign = -1.0 if METRICS[asked.criterion].higher_is_better else 1.0
    full = [moved(kind.rule, data.p, b, s, data.options, 1.0) for b, s in zip(base, scores, strict=True)]
    return int(np.argmin([sign * data.scores(probs, [asked.criterion])[asked.criterion] for probs in full]))


def candidate_of(
    data: TrainingData,
    recipe: Recipe,
    base: Float[np.ndarray, " row"],
    scores: Float[np.ndarray, " row"],
    asked: Asked,
    parts: Parts | None,
) -> Candidate:
    """Score a recipe's validation predictions at every gamma."""
    names = tuple(dict.fromkeys((*SHOWN, asked.criterion)))
    grid = GAMMAS if recipe.rule == "residual" else SHRINKAGES
    rows = data.options.rows(data.covered)
    probs = [moved(recipe.rule, data.p, base, scores, data.options, gamma) for gamma in grid]
    curve = [{"gamma": gamma, **data.scores(q, names)} for gamma, q in zip(grid, probs, strict=True)]
    if any(np.isnan(point[asked.criterion]) for point in curve):
        raise CoralError(
            f"{asked.criterion} does not exist on the validation questions, because all are answered right or all "
            "wrong; choose by brier, or give more questions."
        )
    r_hat = scores if recipe.rule == "residual" else probs[-1] - data.p
    return Candidate(recipe, r_squared(data.r[rows], r_hat[rows]), base, scores, curve, parts)


def cost_of(candidate: Candidate, criterion: str) -> float:
    """Return what is minimised."""
    value = candidate.best(criterion)[criterion]
    return -value if METRICS[criterion].higher_is_better else value


def inputs_of(kind: Kind, asked: Asked) -> tuple[str, ...]:
    """Return the inputs asked for and those that the lens always has."""
    return tuple(dict.fromkeys((*kind.inputs, *asked.inputs)))


def parts_of(standardiser: Standardiser, fitted: Fitted) -> Parts:
    """Return what a lens needs of a fit."""
    return Parts(standardiser, fitted.probe, fitted.base_weight, fitted.scale)


# ----------------------------------------------------------------------------------------------------------- choice


def screen_of(name: str) -> str:
    """Return the lens of closed form that is tried on every layer on behalf of this one."""
    kind = KINDS[name]
    return kind.screen or ("listwise" if kind.average > 1 else name)


def try_singles(data: TrainingData, name: str, asked: Asked) -> list[Candidate]:
    """Try a lens of closed form on each layer by itself."""
    with asked.bar(f"fitting {name}", len(asked.layers), "layers") as advance:
        found = []
        for layer in asked.layers:
            found.append(try_layers(data, name, (layer,), asked))
            advance(1)
        return found


def choose(
    data: TrainingData, name: str, asked: Asked, tried: list[Candidate] | None = None
) -> tuple[Candidate, list[Candidate]]:
    """Return the best candidate of one kind of lens, and those that were tried layer by layer, or had been before."""
    kind = KINDS[name]
    screen = screen_of(name)
    if kind.average > 1:
        # the members would each have ranks of their own, but side by side they share one set of inputs
        asked = replace(asked, inputs=tuple(i for i in asked.inputs if i != "rank"))
    singles = tried if tried is not None else try_singles(data, screen, asked)
    ranked = sorted(singles, key=lambda c: cost_of(c, asked.criterion))
    if kind.average > 1:
        return average(data, name, ranked[: kind.average], asked), singles
    top = tuple(sorted(c.recipe.layers[0] for c in ranked[: asked.top_layers]))
    if kind.screen:
        return choose_network(data, name, [c.recipe.layers[0] for c in ranked], top, asked), singles
    return (try_layers(data, name, top, asked) if asked.top_layers > 1 else ranked[0]), singles


def average(data: TrainingData, name: str, members: Sequence[Candidate], asked: Asked) -> Candidate:
    """Average linear probes of single layers: together they are one linear probe of the layers side by side."""
    members = sorted(members, key=lambda c: c.recipe.layers)
    base = np.mean([m.base for m in members], axis=0)
    scores = np.mean([m.scores for m in members], axis=0)
    settings = tuple(m.recipe.settings[0] for m in members)
    recipe = Recipe(name, tuple(m.recipe.layers[0] for m in members), members[0].recipe.inputs, settings, asked.seed)
    known = [m.parts for m in members if m.parts is not None]
    parts = averaged(known) if len(known) == len(members) else None
    return candidate_of(data, recipe, base, scores, asked, parts)


def averaged(parts: Sequence[Parts]) -> Parts:
    """Return the linear probe on inputs side by side whose output is the mean of the members' outputs."""
    probes = [p.probe for p in parts]
    assert all(isinstance(p, LinearProbe) for p in probes), "only linear probes can be put side by side"
    weight = np.concatenate([p.weight for p in probes]) / len(parts)  # type: ignore[attr-defined]
    bias = float(np.mean([p.bias for p in probes]))  # type: ignore[attr-defined]
    standardiser = Standardiser(
        np.concatenate([p.standardiser.mean for p in parts]), np.concatenate([p.standardiser.scale for p in parts])
    )
    base_weight = float(np.mean([p.base_weight for p in parts]))
    return Parts(standardiser, LinearProbe(weight, bias), base_weight, 1.0)


def choose_network(
    data: TrainingData, name: str, ranked: Sequence[int], top: tuple[int, ...], asked: Asked
) -> Candidate:
    """Choose a network's setting and layer in the first round, then predict the other rounds with that choice."""
    kind = KINDS[name]
    inputs = inputs_of(kind, asked)
    groups = [top] if asked.top_layers > 1 else [(layer,) for layer in ranked]
    if kind.settings:
        tried = [(g, s) for g in groups[:LISTWISE_NETWORK_LAYERS] for s in kind.settings]
        found = [predict_rounds(data, Recipe(name, g, inputs, (s,), asked.seed), asked, n_rounds=1) for g, s in tried]
        recipe = min(found, key=lambda c: cost_of(c, asked.criterion)).recipe
        known = None
    else:
        recipe, known = search_network(data, name, groups[:NETWORK_LAYERS], inputs, asked)
    return predict_rounds(data, recipe, asked, known=known)


def search_network(
    data: TrainingData, name: str, groups: Sequence[tuple[int, ...]], inputs: tuple[str, ...], asked: Asked
) -> tuple[Recipe, Parts]:
    """Search layers and the grid for the network with the best validation R2 (the paper's rule)."""
    standardisers: dict[int, Standardiser] = {}

    def layer_data(i: int) -> LayerData:
        features = data.features(groups[i], inputs)
        standardisers[i] = data.standardiser(features, ~data.rounds[0])
        train, validation = (data.sample(features, m, standardisers[i]) for m in (~data.rounds[0], data.rounds[0]))
        return LayerData(train.z, train.r, validation.z, validation.r)

    hidden = () if name == "linear" else HIDDEN[: asked.depth]
    grid = [replace(point, hidden=hidden) for point in GRID]
    with asked.bar("training networks", planned_epochs(len(groups), grid), "epochs") as advance:
        numbers = range(len(groups))
        journal = journal_of(data, asked, groups, inputs, grid)
        found = search_mlp(layer_data, numbers, grid, seed=asked.seed, journal=journal, progress=advance)
    best = found.best
    if best.layer not in standardisers:
        layer_data(best.layer)
    parts = Parts(standardisers[best.layer], found.probe, 1.0, 1.0)
    return Recipe(name, groups[best.layer], inputs, (setting_of(best.settings),), asked.seed), parts


def journal_of(
    data: TrainingData,
    asked: Asked,
    groups: Sequence[tuple[int, ...]],
    inputs: tuple[str, ...],
    grid: Sequence[MlpSettings],
) -> Path | None:
    """Return the journal of this very search, in a folder where other searches may have kept theirs.

    The search knows its layers by number only, so that which ones they are must be in the name.
    """
    if asked.journal is None:
        return None
    what = {
        "layers": [list(group) for group in groups],
        "inputs": list(inputs),
        "grid": [asdict(point) for point in grid],
        "seed": asked.seed,
        "data": digest_bytes(data.r.tobytes() + data.rounds[0].tobytes()),
    }
    return asked.journal.with_name(f"{asked.journal.stem}-{digest(what)[:12]}{asked.journal.suffix}")


def predict_rounds(
    data: TrainingData, recipe: Recipe, asked: Asked, *, known: Parts | None = None, n_rounds: int | None = None
) -> Candidate:
    """Predict the validation questions of every round; `known` is the fit of the first round, if there is one."""
    scores, base = np.zeros(len(data.p)), np.log(np.maximum(data.p, 1e-300))
    features = data.features(recipe.layers, recipe.inputs)
    first = None
    for i, mask in enumerate(data.rounds[:n_rounds]):
        parts = known if known is not None and i == 0 else fit_parts(data, recipe, ~mask, mask)
        first = first or parts
        rows = np.flatnonzero(data.options.rows(mask))
        scores[rows] = parts.scores(features, rows)
        base[rows] *= parts.base_weight
    seen = replace(data, rounds=data.rounds[:n_rounds])
    # a network has to stop on questions that it is not fitted on, so the first round's is the one that is kept
    return candidate_of(seen, recipe, base, scores, asked, first)


def fit_parts(
    data: TrainingData, recipe: Recipe, train: Bool[np.ndarray, " question"], stop: Bool[np.ndarray, " question"]
) -> Parts:
    """Fit a recipe on some questions; a network stops by the loss on others."""
    kind = KINDS[recipe.kind]
    groups = [(layer,) for layer in recipe.layers] if kind.average > 1 else [recipe.layers]
    found = []
    for layers, setting in zip(groups, recipe.settings, strict=True):
        features = data.features(layers, recipe.inputs)
        standardiser = data.standardiser(features, train)
        fitting, stopping = (data.sample(features, mask, standardiser) for mask in (train, stop))
        found.append(parts_of(standardiser, kind.fit(fitting, stopping, (setting,), recipe.seed)[0]))
    return averaged(found) if kind.average > 1 else found[0]
