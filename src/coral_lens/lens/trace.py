"""The record of a fit: how a lens was chosen, and what it was fitted on. Only data, with its JSON side by side.

`fit` makes it, a lens carries it, the card and the command line show it. Reports read the JSON of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from coral_lens.lens.rules import RuleName
from coral_lens.metrics.scores import Score

# ------------------------------------------------------------------------------------------------------- how it was chosen


@dataclass(frozen=True)
class GammaPoint:
    """Validation scores at one gamma."""

    gamma: float
    scores: dict[str, float]
    """By metric."""

    def to_json(self) -> dict[str, float]:
        """Return it as one flat record."""
        return {"gamma": self.gamma, **self.scores}

    @staticmethod
    def from_json(record: Mapping[str, float]) -> GammaPoint:
        """Read what `to_json` wrote."""
        return GammaPoint(record["gamma"], drop_entries(record, "gamma"))


@dataclass(frozen=True)
class LayerTrial:
    """The lens of one layer alone, as it was tried to choose among layers."""

    layer: int
    r2: float
    setting: dict[str, Any]
    """The hyper-parameters that were best there."""
    best: GammaPoint
    at_one: GammaPoint

    def to_json(self) -> dict[str, Any]:
        """Return it as a record in which the setting is flat."""
        points = {"best": self.best.to_json(), "at_one": self.at_one.to_json()}
        return {"layer": self.layer, "r2": self.r2, **self.setting, **points}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> LayerTrial:
        """Read what `to_json` wrote."""
        best, at_one = (GammaPoint.from_json(record[name]) for name in ("best", "at_one"))
        setting = drop_entries(record, "layer", "r2", "best", "at_one")
        return LayerTrial(record["layer"], record["r2"], setting, best, at_one)


@dataclass(frozen=True)
class Choice:
    """What was chosen."""

    layers: tuple[int, ...]
    r2: float
    gamma: float
    """As it was chosen; a lens's own gamma is in units of its probe's output."""
    settings: tuple[dict[str, Any], ...]
    """One, or one per layer where probes of single layers are averaged."""

    def to_json(self) -> dict[str, Any]:
        """Return it as a record."""
        return {"layers": list(self.layers), "r2": self.r2, "gamma": self.gamma, "settings": list(self.settings)}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Choice:
        """Read what `to_json` wrote."""
        return Choice(tuple(record["layers"]), record["r2"], record["gamma"], tuple(record["settings"]))


@dataclass(frozen=True)
class SimulatedShift:
    """Questions on which the tempering was learned: held out, or of a part that a lens was fitted without."""

    part: str
    questions: int
    shift: float
    """The median of their shifts."""


ALL = ""
"""The name of what holds for questions of all tasks."""
ELSEWHERE = "tasks that it was not fitted on"
"""The name of what was found on training tasks by fits without them, and holds for tasks that a lens was not fitted on."""


@dataclass(frozen=True)
class AnswerCheck:
    """Whether the lens answers better than the model itself, on questions that neither was fitted on."""

    questions: int
    base: float
    """The accuracy of the model itself."""
    lens: float
    """The accuracy of the lens."""
    error: float
    """The standard error of the difference."""
    used: bool
    """Whether the answers are the lens's."""

    def __str__(self) -> str:
        found = (
            f"On {self.questions} held-out questions the lens is right in {100 * self.lens:.1f} %, the model itself in "
            f"{100 * self.base:.1f} % (difference {100 * (self.lens - self.base):+.1f}, standard error {100 * self.error:.1f})"
        )
        if self.used:
            return f"{found}: the answers are the lens's."
        return f"{found}: the answers stay the model's own, with the confidence that the lens has in them."


@dataclass(frozen=True)
class CurvePoint:
    """Validation scores of the chosen lens, fitted on so many questions."""

    questions: int
    scores: dict[str, float]

    def to_json(self) -> dict[str, int | float]:
        """Return it as one flat record."""
        return {"questions": self.questions, **self.scores}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> CurvePoint:
        """Read what `to_json` wrote."""
        return CurvePoint(record["questions"], drop_entries(record, "questions"))


WORTH = 0.005
"""A gain of Brier score for which it is worth labelling more."""


@dataclass(frozen=True)
class LearningCurve:
    """How many labelled questions would have been enough."""

    points: tuple[CurvePoint, ...]
    enough: int
    """The smallest number that is as good as all, by one standard error."""
    more: int | None = None
    """About how many more would gain `WORTH`: 0 where many more would not, None where that was not asked or cannot be told."""

    def to_json(self) -> dict[str, Any]:
        """Return it as a record."""
        more = {} if self.more is None else {"more": self.more}
        return {"points": [point.to_json() for point in self.points], "enough": self.enough} | more

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> LearningCurve:
        """Read what `to_json` wrote."""
        points = tuple(map(CurvePoint.from_json, record["points"]))
        return LearningCurve(points, record["enough"], record.get("more"))


KEPT = " The answers stay the model's own."
OWN = ", beside a small probe that these labels have taught"


@dataclass(frozen=True)
class Adaptation:
    """What was found on labelled questions of one task."""

    n_questions: int
    weight: float
    """Lambda: the weight of the lens."""
    before: float
    """The weight that it has without labels."""
    temperature: float
    """What the mixture of base and lens is scaled by."""
    gain: Score
    """By how much its Brier score is lower than that of temperature alone, each question judged by labels of the others."""
    curve: LearningCurve | None = None
    """The Brier score after fewer labels, on the others."""
    answers: AnswerCheck | None = None
    """Whether the lens answers better than the model itself; None where the labels are too few to tell."""
    worse: bool = False
    """Whether the labels are enough to tell, and show that the base by temperature is better without the lens."""
    exits: bool = False
    """Of a lens that exits early: it is compared with even chances, which have no temperature, and never left out."""
    temperature_before: float = 1.0
    """The temperature of the mixture without labels."""
    own: bool = False
    """Whether a probe of the task's own, learned from these labels, stands beside base and lens."""
    few: bool = False
    """Whether fewer of them are independent than can tell better from worse; earlier versions did not say."""

    @property
    def is_left_out(self) -> bool:
        """Whether nothing but the base has a part in the answers: the lens is worse, or no weight of it is likelier than none."""
        return self.weight < 0.005 and not self.own

    def __str__(self) -> str:
        gain = f"{100 * self.gain.value:+.1f} ({100 * self.gain.low:+.1f} to {100 * self.gain.high:+.1f})"
        beside = "even chances" if self.exits else "temperature alone"
        return (
            f"{self.n_questions} labelled questions: better than {beside} by {gain}, Brier score × 100: {self.verdict}."
            f"{'' if self.answers is None or self.answers.used or self.is_left_out else KEPT}"
        )

    @property
    def verdict(self) -> str:
        """What that means, and what is made of it."""
        cooled = "" if self.exits else f", temperature {self.temperature:.2f}"
        if self.is_left_out:
            why = (
                "is worse here and"
                if self.worse
                else f"has 0 as its likeliest weight ({self.before:.2f} without labels) and"
            )
            return f"the lens {why} is left out{cooled}"
        if self.worse:
            return f"the lens is worse here and is hardly believed, since there is no base: weight {self.weight:.2f}"
        doubt = "" if self.exits or self.temperature_before == 1.0 else f" ({self.temperature_before:.2f} without)"
        weight = (
            f"Weight of the lens {self.weight:.2f} ({self.before:.2f} without labels){cooled}{doubt}{OWN * self.own}"
        )
        said = "better" if self.gain.low > 0.0 else "worse" if self.gain.high < 0.0 else ""
        if not said:
            return f"not clearly better or worse. {weight}"
        few = self.few or said == "worse"  # enough that are worse have been left out above
        return f"{f'{said} on these, which are too few to tell' if few else f'clearly {said}'}. {weight}"

    def to_json(self) -> dict[str, Any]:
        """Return it as a record."""
        others = {"curve": self.curve.to_json()} if self.curve else {}
        others |= {"answers": asdict(self.answers)} if self.answers else {}
        return drop_entries(asdict(self), "curve", "answers") | others

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Adaptation:
        """Read what `to_json` wrote."""
        curve = LearningCurve.from_json(record["curve"]) if "curve" in record else None
        answers = AnswerCheck(**record["answers"]) if "answers" in record else None
        others = drop_entries(record, "gain", "curve", "answers")
        return Adaptation(**others, gain=Score(**record["gain"]), curve=curve, answers=answers)


@dataclass(frozen=True)
class Trace:
    """How setting, layer, gamma and kind were chosen, all on validation questions."""

    criterion: str
    rule: RuleName
    chosen: Choice
    layers: tuple[LayerTrial, ...]
    gammas: tuple[GammaPoint, ...]
    """Every gamma at what was chosen."""
    kinds: dict[str, GammaPoint]
    """The best of each kind of lens that was compared."""
    as_good: tuple[int, ...]
    """The layers within one standard error of the best."""
    validation: dict[str, dict[str, Score]]
    """By method, then by metric: the lens and its controls."""
    simulated: tuple[SimulatedShift, ...] = ()
    """What its tempering was learned on; empty where it is not tempered."""
    learning_curve: LearningCurve | None = None
    own_layers: bool = False
    """Of a network: whether `layers` are trials of its own; earlier versions tried the lens there that screened for it."""
    answers: dict[str, AnswerCheck] = field(default_factory=dict)
    """Whether it answers better than the model itself: on all held-out questions, under the empty name, and by task."""

    def to_json(self) -> dict[str, Any]:
        """Return it as a record; what there is nothing of is left out."""
        record: dict[str, Any] = {
            "criterion": self.criterion,
            "rule": self.rule,
            "chosen": self.chosen.to_json(),
            "layers": [trial.to_json() for trial in self.layers],
            "gammas": [point.to_json() for point in self.gammas],
            "kinds": {kind: point.to_json() for kind, point in self.kinds.items()},
            "as_good": list(self.as_good),
            "validation": {m: {name: asdict(s) for name, s in scores.items()} for m, scores in self.validation.items()},
        }
        if self.simulated:
            record["simulated"] = [asdict(part) for part in self.simulated]
        if self.learning_curve:
            record["learning_curve"] = self.learning_curve.to_json()
        if self.own_layers:
            record["own_layers"] = True
        if self.answers:
            record["answers"] = {name: asdict(check) for name, check in self.answers.items()}
        return record

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Trace:
        """Read what `to_json` wrote."""
        curve = record.get("learning_curve")
        return Trace(
            criterion=record["criterion"],
            rule=record["rule"],
            chosen=Choice.from_json(record["chosen"]),
            layers=tuple(map(LayerTrial.from_json, record["layers"])),
            gammas=tuple(map(GammaPoint.from_json, record["gammas"])),
            kinds={kind: GammaPoint.from_json(point) for kind, point in record["kinds"].items()},
            as_good=tuple(record["as_good"]),
            validation={
                m: {name: Score(**s) for name, s in scores.items()} for m, scores in record["validation"].items()
            },
            simulated=tuple(SimulatedShift(**part) for part in record.get("simulated", ())),
            learning_curve=LearningCurve.from_json(curve) if curve else None,
            own_layers=record.get("own_layers", False),
            answers={name: AnswerCheck(**check) for name, check in record.get("answers", {}).items()},
        )


def drop_entries(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return a record without some of its entries."""
    return {name: value for name, value in record.items() if name not in names}


# ------------------------------------------------------------------------------------------------ what it was fitted on


@dataclass(frozen=True)
class Training:
    """What a lens was fitted on and how."""

    tasks: dict[str, int]
    """Questions of each source: a task, with its split if it has one."""
    terms: dict[str, str]
    """The licence of each source; empty where it is not known."""
    n_train: int
    n_validation: int
    settings: dict[str, Any]
    """The FitSettings, as JSON keeps them."""
    store: str
    """Digest of the manifest of the states."""
    questions: str
    """Digest of the questions."""
    versions: dict[str, str]
    """Versions of the packages that can change a result."""
    overrides: tuple[str, ...] = ()
    """Models that it was used on in spite of other fingerprints."""
    shots: int = 0
    """Worked examples before each of the user's own questions."""

    def to_json(self) -> dict[str, Any]:
        """Return it as a record; without overrides and worked examples, it has no such entries."""
        record = {one.name: getattr(self, one.name) for one in fields(self)}
        others = {"overrides": list(self.overrides), "shots": self.shots}
        return drop_entries(record, *others) | {name: value for name, value in others.items() if value}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Training:
        """Read what `to_json` wrote, and what older versions wrote, which knew no terms."""
        return Training(**{"terms": {}, **record, "overrides": tuple(record.get("overrides", ()))})
