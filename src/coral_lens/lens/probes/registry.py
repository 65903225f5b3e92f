"""The table of lenses: how each is fitted on training rows, and by what rule its probe moves probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from coral_lens.lens.probes.listwise import (
    DECAYS,
    LISTWISE_GRID,
    ListwiseMlpSettings,
    fit_listwise_mlp,
    fit_listwise_path,
)
from coral_lens.lens.probes.mlp import MlpSettings, NetworkProbe, fit_mlp
from coral_lens.lens.probes.ridge import PENALTIES, LinearProbe, fit_ridge_folds, fit_ridge_path
from coral_lens.lens.probes.standardise import Probe
from coral_lens.lens.rules import Rule
from coral_lens.lens.training_data import Sample

Setting = dict[str, Any]
"""Hyper-parameters of one fit, as they are written into the lens."""


@dataclass(frozen=True)
class Fitted:
    """A probe fitted under one setting."""

    probe: Probe
    setting: Setting
    base_weight: float = 1.0
    """Of log p under the listwise rule."""
    scale: float = 1.0
    """Of the probe's output: gamma counts in units of it."""


Fit = Callable[[Sample, Sample, tuple[Setting, ...], int], list[Fitted]]
"""Training rows, validation rows (for early stopping only), settings to fit, and seed."""


Across = Callable[[np.ndarray, np.ndarray, np.ndarray, tuple[Setting, ...]], np.ndarray]
"""Inputs that are not standardised yet, residuals and the fold of each row, and settings to fit; gives [setting, row]."""


@dataclass(frozen=True)
class Kind:
    """One row of the table."""

    rule: Rule
    fit: Fit
    settings: tuple[Setting, ...]
    judge: Literal["r2", "criterion"]
    """What chooses among settings: validation R2 as in the paper, or the criterion that also chooses layer and gamma."""
    inputs: tuple[str, ...] = ()
    """Inputs that it always has."""
    screen: str = ""
    """For a network: the lens of closed form that says which layers are worth training on. Empty: every layer is tried."""
    across: Across | None = None
    """For all settings what every row is predicted by a fit that did not see its fold, where that has a closed form."""
    average: int = 1
    """Layers whose probes, each fitted alone, are averaged."""


def fit_ridge(train: Sample, _: Sample, settings: tuple[Setting, ...], __: int) -> list[Fitted]:
    """Fit ridge probes of the residual."""
    penalties = [s["penalty"] for s in settings]
    return [Fitted(p, s) for p, s in zip(fit_ridge_path(train.z, train.r, penalties), settings, strict=True)]


def ridge_across(x: np.ndarray, r: np.ndarray, folds: np.ndarray, settings: tuple[Setting, ...]) -> np.ndarray:
    """Predict every row by ridge probes of the other folds."""
    return fit_ridge_folds(x, r, folds, [s["penalty"] for s in settings])[0]


def fit_network(train: Sample, validation: Sample, settings: tuple[Setting, ...], seed: int) -> list[Fitted]:
    """Fit the paper's networks one by one."""
    data = (train.z, train.r), (validation.z, validation.r)
    return [Fitted(fit_mlp(*data, mlp_settings(s), seed=seed), s) for s in settings]


def mlp_settings(setting: Setting) -> MlpSettings:
    """Return the settings that a record describes."""
    return replace(MlpSettings(), **{**setting, "hidden": tuple(setting["hidden"])})


def setting_of(settings: MlpSettings) -> Setting:
    """Return the record of settings: those that are searched, and whatever else is not the default."""
    usual = asdict(MlpSettings())
    record = {k: v for k, v in asdict(settings).items() if k in SEARCHED or v != usual[k]}
    return record | {"hidden": list(settings.hidden)}


def fit_listwise(train: Sample, _: Sample, settings: tuple[Setting, ...], __: int) -> list[Fitted]:
    """Fit linear listwise lenses along the path of weight decays."""
    decays = [s["weight_decay"] for s in settings]
    path = fit_listwise_path(train.z, train.p, train.options, train.answers, decays)
    return [Fitted(LinearProbe(one.weight, 0.0), s, one.base_weight) for one, s in zip(path, settings, strict=True)]


def fit_listwise_networks(train: Sample, validation: Sample, settings: tuple[Setting, ...], seed: int) -> list[Fitted]:
    """Fit listwise networks one by one."""
    found = [(s, fit_listwise_mlp(train, validation, ListwiseMlpSettings(**s), seed=seed)) for s in settings]
    return [Fitted(one.probe, s, one.base_weight, one.scale) for s, one in found]


SEARCHED = ("weight_decay", "output_penalty", "learning_rate", "hidden")
"""What differs between the networks of a search, and is always on record."""
RIDGE = tuple({"penalty": p} for p in PENALTIES)
LISTWISE = tuple({"weight_decay": d} for d in DECAYS)

KINDS: dict[str, Kind] = {
    "ridge": Kind("residual", fit_ridge, RIDGE, "r2", across=ridge_across),
    "linear": Kind("residual", fit_network, (), "r2", screen="ridge"),
    "mlp": Kind("residual", fit_network, (), "r2", screen="ridge"),
    "listwise": Kind("listwise", fit_listwise, LISTWISE, "criterion", ("centred",)),
    "listwise-mlp": Kind(
        "listwise", fit_listwise_networks, LISTWISE_GRID, "criterion", ("centred",), screen="listwise"
    ),
    "ensemble": Kind("listwise", fit_listwise, LISTWISE, "criterion", ("centred",), average=5),
}
"""`mlp` and `linear` take their settings from the grid of the search (see `search`)."""
AUTO = ("ridge", "listwise", "ensemble")
"""Among which `auto` chooses: those of closed form or convex, so that five folds of each cost little."""

PROBES: dict[str, Callable[[dict[str, Tensor]], Probe]] = {
    "ridge": LinearProbe.from_tensors,
    "mlp": NetworkProbe.from_tensors,
}
"""How each kind of probe is made again from its saved tensors."""
