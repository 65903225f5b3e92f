"""What is fitted on some questions and holds for others: a temperature, an isotonic curve, prediction sets, and a threshold.

A file of maps is JSON with a digest, and says for each system what was fitted; `coral audit --apply` uses it on new rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from coral_lens.audit.settings import AuditSettings, MapName
from coral_lens.errors import CoralError
from coral_lens.lens.rules import apply_temperature, fit_temperature
from coral_lens.metrics.conformal import (
    Abstention,
    Conformal,
    fit_abstention,
    fit_conformal,
    questions_needed,
)
from coral_lens.metrics.facts import facts_of
from coral_lens.ragged import Options
from coral_lens.records import Predictions
from coral_lens.storage.files import read_record, write_record

FORMAT = 1
MAPS_FILE = "maps.json"
STARTS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
"""Shares of the surest answers from which a threshold is looked for: the precision that people state may be that of few."""
SLOPE = 1e-6
"""Slope of the line that is added to an isotonic curve, which then breaks ties as the probabilities themselves would."""


@dataclass(frozen=True)
class Curve:
    """An increasing curve from a probability to the share of such options that are right; straight between its points."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __call__(self, p: Float[np.ndarray, " row"], options: Options) -> Float[np.ndarray, " row"]:
        """Return the curve at each probability, renormalised over the options of each question."""
        return options.normalise(np.interp(p, self.x, self.y) + SLOPE * p)


def fit_curve(p: Float[np.ndarray, " row"], y: Float[np.ndarray, " row"]) -> Curve:
    """Return the increasing curve with the least squared error."""
    from sklearn.isotonic import IsotonicRegression

    fitted = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(p, y)
    return Curve(tuple(map(float, fitted.X_thresholds_)), tuple(map(float, fitted.y_thresholds_)))


@dataclass(frozen=True)
class SystemMaps:
    """What was fitted for one system."""

    n_fitted: int
    """Questions behind temperature and curve."""
    temperature: float
    curve: Curve
    used: MapName
    """The map that sets and threshold stand on."""
    sets: Conformal | None = None
    abstention: Abstention | None = None
    """The threshold; None where no risk was stated."""

    def mapped(self, name: MapName, p: Float[np.ndarray, " row"], options: Options) -> Float[np.ndarray, " row"]:
        """Return probabilities changed by one of the maps."""
        if name == "none":
            return p
        return (
            self.curve(p, options)
            if name == "isotonic"
            else apply_temperature(p, options, temperature=self.temperature)
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as a record."""
        return {
            "n_fitted": self.n_fitted,
            "temperature": self.temperature,
            "isotonic": {"x": list(self.curve.x), "y": list(self.curve.y)},
            "used": self.used,
            "sets": self.sets.to_dict() if self.sets else None,
            "abstention": self.abstention.to_dict() if self.abstention else None,
        }

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> SystemMaps:
        """Read what `to_json` wrote; anything else is refused."""
        curve = Curve(tuple(map(float, record["isotonic"]["x"])), tuple(map(float, record["isotonic"]["y"])))
        temperature = float(record["temperature"])
        rises = len(curve.x) == len(curve.y) > 0 and bool(
            (np.diff(curve.x) > 0).all() and (np.diff(curve.y) >= 0).all()
        )
        if not rises or not 0 < temperature < 1e6 or record["used"] not in ("temperature", "isotonic", "none"):
            raise ValueError("its numbers are none that an audit fits")
        return SystemMaps(
            n_fitted=int(record["n_fitted"]),
            temperature=temperature,
            curve=curve,
            used=record["used"],
            sets=Conformal.from_dict(record["sets"]) if record["sets"] else None,
            abstention=Abstention.from_dict(record["abstention"]) if record["abstention"] else None,
        )


def fit_maps(fitting: Predictions, promising: Predictions, settings: AuditSettings, *, top_only: bool) -> SystemMaps:
    """Fit temperature and curve on some questions, and on others what is promised of the mapped probabilities.

    Two parts, because a promise holds only for probabilities that its own questions had no part in making.
    """
    p, options = fitting.probs, fitting.options
    temperature = fit_temperature(p, options, fitting.answers, targets=fitting.targets)
    curve = fit_curve(p, facts_of(fitting).target)
    # of a confidence alone, the other options are made up: nothing that looks at them may move it
    maps = SystemMaps(len(fitting), temperature, curve, "none" if top_only else settings.map)
    mapped, held = maps.mapped(maps.used, promising.probs, promising.options), promising.options
    sets = abstention = None
    if not top_only and len(promising) >= questions_needed(settings.coverage):
        sets = fit_conformal(mapped, held, promising.answers, coverage=settings.coverage)
    if settings.stated_risk is not None:
        y = facts_of(promising).target
        right = y[held.row(held.top(mapped))] == held.max(y)
        delta = round(1.0 - settings.certainty, 12)
        abstention = fit_abstention(held.max(mapped), right, risk=settings.stated_risk, delta=delta, starts=STARTS)
    return SystemMaps(maps.n_fitted, temperature, curve, maps.used, sets, abstention)


def save_maps(path: Path, maps: Mapping[str, SystemMaps]) -> None:
    """Write a file of maps."""
    write_record(path, {"format": FORMAT, "systems": {name: one.to_json() for name, one in maps.items()}})


def load_maps(path: str | Path) -> dict[str, SystemMaps]:
    """Read a file of maps, or the one in an audit's folder, and check that nothing was changed or lost."""
    path = Path(path)
    path = path / MAPS_FILE if path.is_dir() else path
    record = read_record(path, remedy="run the audit again", needs=("format", "systems"))
    if record["format"] != FORMAT:
        raise CoralError(f"{path} has the format {record['format']!r} of maps, but this version reads {FORMAT}.")
    try:
        maps = {str(name): SystemMaps.from_json(one) for name, one in record["systems"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, CoralError) as error:
        raise CoralError(f"{path} is no file of maps ({error}); run the audit again.") from None
    if not maps:
        raise CoralError(f"{path} holds no maps; run the audit again.")
    return maps
