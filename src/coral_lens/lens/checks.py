"""A lens from a stranger: its record and its tensors are checked here, before memory is taken and before anything is computed.

A digest says only that nothing was changed since somebody wrote it. Whatever passes here can be used, or is refused later for
its model; no number of it is missing, infinite or of a wrong shape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, ValidationError, field_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coral_lens.data.leaks import NORMALISED
from coral_lens.data.templates import MOST_TEMPLATE
from coral_lens.engine.settings import MOST_EXAMPLES
from coral_lens.errors import CoralError
from coral_lens.lens.features import N_RANKS
from coral_lens.lens.publish import COLUMNS
from coral_lens.lens.settings import BaseRule

LARGEST_RECORD = 64 * 2**20
"""Bytes of a lens.json; real ones have some kilobytes."""
LARGEST_TENSORS = 2**30
"""Bytes of a file of tensors; real ones have some megabytes."""
Shape = tuple[int, ...]
Name = Annotated[str, Field(max_length=10_000)]
Share = Annotated[float, Field(gt=0, lt=1)]


class Checked(BaseModel):
    """A part of lens.json: other keys are let through, wrong types and numbers that are not finite are not."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow", protected_namespaces=())


class Exact(Checked):
    """A part that has these keys and no other."""

    model_config = ConfigDict(extra="forbid")


class StyleRecord(Exact):
    """`style`: how questions are asked."""

    kind: Literal["text", "letters", "p-true"]
    chat: bool
    template: Annotated[str, Field(max_length=MOST_TEMPLATE)] = ""
    system: Name = ""


class TemperingRecord(Exact):
    """`tempering`: four numbers."""

    base: float
    base_slope: float
    lens: float
    lens_slope: float


class TrustRecord(Exact):
    """`trust`: how far it is believed."""

    elsewhere: Annotated[float, Field(ge=0, le=10)]
    reach: PositiveFloat
    home_reach: PositiveFloat
    pooled: PositiveFloat
    scales: dict[Name, PositiveFloat]
    everywhere: bool
    least: Annotated[float, Field(ge=0, le=1)]
    temperature: PositiveFloat
    adapted: bool
    answers: dict[Name, bool] = {}
    places: list[Name] = []


class PenaltyRecord(Exact):
    """`sets.regularisation`: the penalty of RAPS."""

    penalty: Annotated[float, Field(ge=0)]
    k_reg: NonNegativeInt


class SetsRecord(Exact):
    """`sets`: prediction sets."""

    kind: Literal["lac", "aps", "raps"]
    coverage: Share
    threshold: float
    n_questions: NonNegativeInt
    randomised: bool
    regularisation: PenaltyRecord | None


class AbstentionRecord(Exact):
    """`abstention`: when not to answer."""

    risk: Share
    delta: Share
    threshold: float | None
    n_questions: NonNegativeInt
    n_answered: NonNegativeInt
    n_wrong: NonNegativeInt


class SamplingRecord(Exact):
    """`open.sampling`: how candidates are written."""

    candidates: Annotated[int, Field(ge=1, le=64)]
    temperature: Annotated[float, Field(gt=0, le=5)]
    max_tokens: Annotated[int, Field(ge=1, le=1024)]
    examples: Annotated[int, Field(ge=0, le=MOST_EXAMPLES)]
    seed: NonNegativeInt


class WeighingRecord(Exact):
    """`open.weighing`: five numbers."""

    bias: float
    token: float
    sum: float
    share: float
    spread: float


class OpenRecord(Exact):
    """`open`: what a lens for open questions has beside all others."""

    sampling: SamplingRecord
    weighing: WeighingRecord


class ModelRecord(Checked):
    """`model`: what it was fitted on."""

    name: Name
    weights: Name
    tokenizer: Name
    config: dict[str, Any] = {}


class TrainingRecord(Exact):
    """`training`: the questions and the settings of the fit."""

    tasks: dict[Name, NonNegativeInt]
    terms: dict[Name, Name] = {}
    n_train: NonNegativeInt
    n_validation: NonNegativeInt
    settings: dict[str, Any]
    store: str
    questions: str
    versions: dict[str, str]
    overrides: list[Name] = []
    shots: NonNegativeInt = 0


class PointRecord(Checked):
    """Scores at one gamma."""

    __pydantic_extra__: dict[str, float] = Field(init=False)
    gamma: float


class TrialRecord(Checked):
    """An entry of `trace.layers`."""

    layer: NonNegativeInt
    r2: float
    best: PointRecord
    at_one: PointRecord


class ChoiceRecord(Checked):
    """`trace.chosen`."""

    layers: list[NonNegativeInt]
    r2: float
    gamma: float
    settings: list[dict[str, Any]]


class ScoreRecord(Exact):
    """A score with its interval."""

    value: float
    low: float
    high: float


class SimulatedRecord(Exact):
    """An entry of `trace.simulated`."""

    part: Name
    questions: NonNegativeInt
    shift: float


class AnswerRecord(Exact):
    """An entry of `trace.answers`."""

    questions: NonNegativeInt
    base: float
    lens: float
    error: float
    used: bool


class CurvePointRecord(Checked):
    """Scores after so many questions."""

    __pydantic_extra__: dict[str, float] = Field(init=False)
    questions: NonNegativeInt


class CurveRecord(Checked):
    """`trace.learning_curve`."""

    points: list[CurvePointRecord]
    enough: NonNegativeInt
    more: NonNegativeInt | None = None


class AdaptationRecord(Exact):
    """`adaptation`: what labels of a task have shown."""

    n_questions: NonNegativeInt
    weight: float
    before: float
    temperature: PositiveFloat
    gain: ScoreRecord
    curve: CurveRecord | None = None
    answers: AnswerRecord | None = None
    worse: bool = False
    exits: bool = False
    temperature_before: PositiveFloat = 1.0
    few: bool = False
    own: bool = False


class TraceRecord(Checked):
    """`trace`: how it was chosen."""

    criterion: Name
    rule: Literal["residual", "listwise"]
    chosen: ChoiceRecord
    layers: list[TrialRecord]
    gammas: list[PointRecord]
    kinds: dict[str, PointRecord]
    as_good: list[NonNegativeInt]
    validation: dict[Name, dict[str, ScoreRecord]]
    simulated: list[SimulatedRecord] = []
    learning_curve: CurveRecord | None = None
    own_layers: bool = False
    answers: dict[Name, AnswerRecord] = {}

    @field_validator("validation")
    @classmethod
    def same_metrics(cls, scores: dict[str, dict[str, ScoreRecord]]) -> dict[str, dict[str, ScoreRecord]]:
        """Refuse a table with holes, or without what the card shows."""
        kept = {frozenset(of_method) for of_method in scores.values()}
        if len(kept) > 1 or any(not set(COLUMNS) <= metrics for metrics in kept):
            raise ValueError("not every method has every metric")
        return scores


class LensRecord(Checked):
    """The whole of lens.json."""

    kind: Name
    rule: Literal["residual", "listwise"]
    layers: Annotated[list[Annotated[int, Field(ge=0, le=100_000)]], Field(min_length=1, max_length=1000)]
    inputs: list[Literal["centred", "rank"]]
    read: Literal["answer", "less-letter", "listed", "context"] = "answer"
    gamma: float
    base_weight: float
    base: BaseRule
    base_temperature: PositiveFloat
    then_temperature: PositiveFloat
    style: StyleRecord
    probe: Literal["ridge", "mlp"]
    tempering: TemperingRecord | None
    trust: TrustRecord | None
    adaptation: AdaptationRecord | None
    exits: bool
    temperature: PositiveFloat
    sets: SetsRecord | None
    abstention: AbstentionRecord | None
    keys: Annotated[int, Field(ge=1, le=max(NORMALISED))]
    open: OpenRecord | None
    model: ModelRecord
    training: TrainingRecord
    trace: TraceRecord
    tensors: str
    sha256: dict[str, str] = {}


def check_record(record: Mapping[str, Any], path: Path) -> None:
    """Refuse a record that is not that of a lens, and say what is wrong with it first."""
    try:
        LensRecord.model_validate(record)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the record"
        raise CoralError(
            f"{path} is not the record of a lens ({where}: {first['msg']}); fit or copy it again."
        ) from None


# ------------------------------------------------------------------------------------------------------------ tensors


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file and its metadata; one that is too large for a lens is not read at all."""
    try:
        if (size := path.stat().st_size) > LARGEST_TENSORS:
            raise CoralError(f"{path} has {size:,} bytes, which is too large for a lens; fit or copy it again.")
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = file.metadata() or {}
    except (OSError, ValueError, TypeError, SafetensorError, RuntimeError) as error:
        raise CoralError(f"{path} cannot be read ({error}); fit or copy the lens again.") from None
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CoralError(f"{path} holds numbers in {name} that are not finite; fit or copy the lens again.")
    return tensors, about


def check_tensors(tensors: Mapping[str, Tensor], record: Mapping[str, Any], path: Path) -> None:
    """Refuse tensors that are missing, of another type or shape than the record asks for, or not positive where they must be."""
    width, n_domains, rank = (
        shape_of(tensors, *of) for of in (("shift.mean", 0), ("shift.means", 0), ("shift.basis", 1))
    )
    n_inputs = width * len(record["layers"]) + (1 + N_RANKS if "rank" in record["inputs"] else 0)
    shapes: dict[str, Shape] = {
        "standardiser.mean": (n_inputs,),
        "standardiser.scale": (n_inputs,),
        "shift.mean": (width,),
        "shift.scale": (width,),
        "shift.means": (n_domains, width),
        "shift.basis": (width, rank),
        "shift.variances": (rank,),
        "shift.rest": (1,),
        "shift.typical": (n_domains,),
        **probe_shapes(tensors, record["probe"], n_inputs),
        **({"open.reference": (len(record["layers"]), width)} if record["open"] else {}),
        **({"task_probe.weight": (n_inputs,)} if (record.get("adaptation") or {}).get("own") else {}),
    }
    if record.get("read") == "less-letter":
        shapes["letters"] = (len(record["layers"]), shape_of(tensors, "letters", 1), width)
    if len(places := (record.get("trust") or {}).get("places", ())) not in (0, n_domains):
        raise CoralError(f"{path} names {len(places)} places of {n_domains}; fit or copy the lens again.")
    for name, shape in shapes.items():
        refuse_tensor(tensors.get(name), name, shape, path)
    for name in ("standardiser.scale", "shift.scale", "shift.variances", "shift.rest", "shift.typical"):
        if not bool((tensors[name] > 0).all()):
            raise CoralError(f"{path} holds a number in {name} that is not positive; fit or copy the lens again.")
    for name in {"training.seen", *tensors} & {"training.seen", "training.calibrated_on", "training.adapted_on"}:
        keys = tensors.get(name)
        if keys is None or keys.dtype != torch.int64 or keys.ndim != 1:
            raise CoralError(f"{path} has no list of whole numbers under {name}; fit or copy the lens again.")


def refuse_tensor(tensor: Tensor | None, name: str, shape: Shape, path: Path) -> None:
    """Refuse one tensor of numbers that is missing or has another type or shape, or none at all."""
    found = "nothing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}".removeprefix("torch.")
    is_wrong = tensor is None or tensor.dtype not in (torch.float32, torch.float64) or tuple(tensor.shape) != shape
    if is_wrong or 0 in shape:
        raise CoralError(
            f"{path} holds {found} under {name}, not numbers of shape {shape}; fit or copy the lens again."
        )


def shape_of(tensors: Mapping[str, Tensor], name: str, axis: int) -> int:
    """Return the length of a tensor along an axis; 0 where it has none, which no shape allows."""
    shape = tensors[name].shape if name in tensors else ()
    return shape[axis] if axis < len(shape) else 0


def probe_shapes(tensors: Mapping[str, Tensor], kind: str, n_inputs: int) -> dict[str, Shape]:
    """Return the shapes of a probe: a linear one has a weight for each input, a network a chain of layers that ends in 1."""
    if kind == "ridge":
        return {"probe.weight": (n_inputs,), "probe.bias": (1,)}
    found = {name: re.fullmatch(r"probe\.(\d{1,3})\.weight", name) for name in tensors}
    numbers = sorted(int(match[1]) for match in found.values() if match)
    shapes: dict[str, Shape] = {}
    for number in numbers or [0]:
        n_outputs = 1 if number == (numbers or [0])[-1] else shape_of(tensors, f"probe.{number}.weight", 0)
        shapes |= {f"probe.{number}.weight": (n_outputs, n_inputs), f"probe.{number}.bias": (n_outputs,)}
        n_inputs = n_outputs
    return shapes
