"""The table of lenses: how each is fitted on training rows, and by what rule its probe corrects probabilities.

A new lens is one entry of `LENSES`: a function that fits its probe, the settings to try, and an entry of `rules.RULES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from coral_lens.lens.probes.listwise import (
    DECAYS,
    LISTWISE_GRID,
    ListwiseMlpSettings,
    fit_listwise_mlp,
    fit_listwise_path,
)
from coral_lens.lens.probes.mlp import LayerData, MlpSettings, fit_mlp
from coral_lens.lens.probes.ridge import PENALTIES, fit_ridge_folds, fit_ridge_path
from coral_lens.lens.probes.standardise import FittedProbe
from coral_lens.lens.rules import RuleName
from coral_lens.lens.training_data import Sample

Setting = dict[str, Any]
"""Hyper-parameters of one fit, as they are written into the lens."""
Grid = tuple[Setting, ...]
"""Settings to try."""

FitProbes = Callable[[Sample, Sample, Grid, int], list[FittedProbe]]
"""Training rows, validation rows (for early stopping only), settings to fit, and seed; gives a probe for each setting."""
FitFolds = Callable[
    [Float[np.ndarray, "row feature"], Float[np.ndarray, " row"], Int[np.ndarray, " row"], Grid],
    Float[np.ndarray, "setting row"],
]
"""Inputs that are not standardised yet, residuals and the fold of each row, and settings to fit; gives outputs."""


@dataclass(frozen=True)
class LensKind:
    """One row of the table."""

    rule: RuleName
    fit: FitProbes
    settings: Grid
    """To choose from."""
    chosen_by: Literal["r2", "criterion"]
    """What chooses among settings: validation R2 as in the paper, or the criterion that also chooses layer and gamma."""
    inputs: tuple[str, ...] = ()
    """Inputs that it always has."""
    network: bool = False
    """Whether its probe is a network. One without settings takes them from a grid and is searched (see `search`)."""
    screened_by: str = ""
    """For a network: the lens of closed form that says which layers are worth training on. Empty: every layer is tried."""
    fit_folds: FitFolds | None = None
    """For every setting, the output at each row of a fit that did not see its fold, where that has a closed form."""
    average: int = 1
    """Layers whose probes, each fitted alone, are averaged."""


def fit_ridge(train: Sample, _: Sample, settings: Grid, __: int) -> list[FittedProbe]:
    """Fit ridge probes of the residual."""
    return [FittedProbe(probe) for probe in fit_ridge_path(train.z, train.r, [s["penalty"] for s in settings])]


def ridge_folds(
    x: Float[np.ndarray, "row feature"],
    r: Float[np.ndarray, " row"],
    folds: Int[np.ndarray, " row"],
    settings: Grid,
) -> Float[np.ndarray, "setting row"]:
    """Predict every row by ridge probes of the other folds."""
    return fit_ridge_folds(x, r, folds, [s["penalty"] for s in settings])[0]


def fit_networks(train: Sample, validation: Sample, settings: Grid, seed: int) -> list[FittedProbe]:
    """Fit the paper's networks one by one."""
    data = LayerData(train.z, train.r, validation.z, validation.r, train.device)
    return [FittedProbe(fit_mlp(data, mlp_settings(s), seed=seed)) for s in settings]


def fit_listwise(train: Sample, _: Sample, settings: Grid, __: int) -> list[FittedProbe]:
    """Fit linear listwise lenses along the path of weight decays."""
    decays = [s["weight_decay"] for s in settings]
    return fit_listwise_path(
        train.z, train.p, train.options, train.answers, decays, targets=train.targets, n_free=train.n_free
    )


def fit_listwise_networks(train: Sample, validation: Sample, settings: Grid, seed: int) -> list[FittedProbe]:
    """Fit listwise networks one by one."""
    return [fit_listwise_mlp(train, validation, ListwiseMlpSettings(**s), seed=seed) for s in settings]


RIDGE = tuple({"penalty": p} for p in PENALTIES)
LISTWISE = tuple({"weight_decay": d} for d in DECAYS)
CENTRED = ("centred",)

LENSES: dict[str, LensKind] = {
    "ridge": LensKind("residual", fit_ridge, RIDGE, "r2", fit_folds=ridge_folds),
    "linear": LensKind("residual", fit_networks, (), "r2", network=True),
    "mlp": LensKind("residual", fit_networks, (), "r2", network=True),
    "listwise": LensKind("listwise", fit_listwise, LISTWISE, "criterion", CENTRED),
    "listwise-mlp": LensKind(
        "listwise", fit_listwise_networks, LISTWISE_GRID, "criterion", CENTRED, network=True, screened_by="listwise"
    ),
    "ensemble": LensKind("listwise", fit_listwise, LISTWISE, "criterion", CENTRED, average=5),
}
AUTO = ("ridge", "listwise", "ensemble")
"""Among which `auto` chooses: those of closed form or convex, so five folds of each cost little."""


# -------------------------------------------------------------------------------------- settings of networks, on record

SEARCHED = ("weight_decay", "output_penalty", "learning_rate", "hidden")
"""What differs between the networks of a search, and is always on record."""


def mlp_settings(setting: Setting) -> MlpSettings:
    """Return the settings that a record describes."""
    return replace(MlpSettings(), **{**setting, "hidden": tuple(setting["hidden"])})


def setting_of(settings: MlpSettings) -> Setting:
    """Return the record of settings: those that are searched, and whatever else is not the default."""
    usual = asdict(MlpSettings())
    record = {k: v for k, v in asdict(settings).items() if k in SEARCHED or v != usual[k]}
    return record | {"hidden": list(settings.hidden)}
