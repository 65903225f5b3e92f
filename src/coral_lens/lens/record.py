"""A lens as a record: what of it stands in lens.json and under which key, and its fields again from that and its tensors.

Knows the fields of a lens by their names; `lens.folder` writes and reads the files, `lens.checks` says what may stand in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from coral_lens.data.settings import Style
from coral_lens.lens.correction import Correction
from coral_lens.lens.open_part import OpenPart
from coral_lens.lens.probes.ridge import LinearProbe
from coral_lens.lens.shift import ShiftModel
from coral_lens.lens.tempering import Tempering
from coral_lens.lens.trace import Adaptation, Trace, Training
from coral_lens.lens.trust import Trust
from coral_lens.metrics.conformal import Abstention, Conformal

if TYPE_CHECKING:
    from coral_lens.lens.artefact import Lens

FORMAT = 2
KEYS_IN_ORDER = ("format", "kind", "rule", "layers", "read", "inputs", "gamma", "base_weight", "base", "base_temperature",
                 "then_temperature", "style", "probe", "tempering", "trust", "adaptation", "exits", "temperature", "sets",
                 "abstention", "keys", "open", "model", "training", "trace")  # fmt: skip
"""The keys of lens.json. What is not of the correction is a field of the lens, as it is or by `RECORDS`."""
SAVED_AS = {"steered_temperature": "then_temperature", "control_temperature": "temperature"}
"""Fields whose key in lens.json is another word than their name, because earlier versions wrote it."""
RECORDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "style": (Style.record, lambda record: Style(**record)),
    "tempering": (asdict, lambda record: Tempering(**record)),
    "trust": (Trust.to_json, Trust.from_json),
    "adaptation": (Adaptation.to_json, Adaptation.from_json),
    "sets": (Conformal.to_dict, Conformal.from_dict),
    "abstention": (Abstention.to_dict, Abstention.from_dict),
    "open": (OpenPart.to_json, OpenPart.from_json),
    "training": (Training.to_json, Training.from_json),
    "trace": (Trace.to_json, Trace.from_json),
}
"""How fields of a lens that are records are written as JSON and read again; None stays None."""
AS_IT_IS = (lambda value: value, lambda value: value)


def keys_of_fields(lens: Lens | type[Lens]) -> dict[str, str]:
    """Return the key in lens.json of each field that is there; the other fields are tensors, or have a file of their own."""
    keys = {field.name: SAVED_AS.get(field.name, field.name) for field in fields(lens)}
    return {name: key for name, key in keys.items() if key in KEYS_IN_ORDER}


def record_of(lens: Lens) -> dict[str, Any]:
    """Return the JSON part of a lens."""
    record = {"format": FORMAT} | lens.correction.to_json()
    for name, key in keys_of_fields(lens).items():
        value, (write, _) = getattr(lens, name), RECORDS.get(name, AS_IT_IS)
        record[key] = None if value is None else write(value)
    return {key: record[key] for key in KEYS_IN_ORDER if key in record}


def fields_of(kind: type[Lens], record: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the fields of a lens from its JSON part and its tensors; its layer view has a file of its own."""
    values: dict[str, Any] = {}
    for name, key in keys_of_fields(kind).items():
        value, (_, read) = record[key], RECORDS.get(name, AS_IT_IS)
        values[name] = None if value is None else read(value)
    correction = Correction.from_json(record, tensors)
    if (part := values["open"]) is not None:
        reference = dict(zip(correction.layers, tensors["open.reference"].numpy(), strict=True))
        values["open"] = replace(part, reference=reference)
    own = tensors["task_probe.weight"].numpy() if "task_probe.weight" in tensors else None
    return values | {
        "correction": correction,
        "task_probe": None if own is None else LinearProbe(own, 0.0),
        "shift": ShiftModel.from_tensors(tensors),
        "seen": tensors["training.seen"].numpy(),
        # lenses of older versions have the keys of both among those seen
        "calibrated_on": tensors.get("training.calibrated_on", torch.zeros(0, dtype=torch.int64)).numpy(),
        "adapted_on": tensors.get("training.adapted_on", torch.zeros(0, dtype=torch.int64)).numpy(),
    }
