"""Fit a method and keep its predictions of every test set, each made once; what it took is kept beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coral_lens.lens.settings import FitSettings
from coral_lens.methods.interface import NOTES, FitContext, QuestionSet, prompts_digest
from coral_lens.methods.lens import OF_THE_STUDY
from coral_lens.methods.registry import METHODS
from coral_lens.records import Predictions, predictions_of
from coral_lens.storage.files import canonical, digest, file_name, kept_record, sealed, write_atomic
from coral_lens.storage.settings import Settings
from coral_lens.study.costs import CostRecord

if TYPE_CHECKING:
    from coral_lens.methods.entry import MethodEntry


LENS = "lens/lens.json"
"""Where the lens of a method is, if it is one, in the method's folder."""
BESIDE = (NOTES, LENS)
"""Files of a method's folder that reports tell of, where a method writes them."""
Rows = dict[str, dict[str, Predictions]]
"""By test set, then by row of its table."""


def method_predictions(context: FitContext, entry: MethodEntry, settings: Any, tests: Sequence[QuestionSet]) -> Rows:
    """Return a method's predictions of every test set; it is fitted only if some are not on the disk yet."""
    method = METHODS[entry.kind]
    about = [entry.kind, plain(settings), plain(context.common), digest(context.train.states.manifest)]
    about += method.depends(settings)
    keys = {t.name: digest([*about, digest(t.states.manifest), *adapted_on(t)]) for t in tests}
    paths = {t.name: context.folder / "predictions" / f"{file_name(t.name)}.json" for t in tests}
    kept = {t.name: read_rows(paths[t.name], keys[t.name], t, context.folder) for t in tests}
    missing = [t for t in tests if kept[t.name] is None]
    if missing:
        costs = CostRecord(context.folder)
        context = replace(context, model=costs.uncounted(context.model))
        with costs.measuring("training", len(context.train.states.questions)):
            predict = method.fit(context, settings)
        for test in missing:
            with costs.measuring(test.name, len(test.states.questions)):
                rows = predict(test)
            beside = [name for name in BESIDE if (context.folder / name).exists()]
            record = {"key": keys[test.name], "rows": {k: p.probs.tolist() for k, p in rows.items()}, "beside": beside}
            write_atomic(paths[test.name], canonical(sealed(record)).encode())
            kept[test.name] = rows
    return {
        name: {f"{entry.row}{k}": p.renamed(f"{entry.row}{k}") for k, p in (rows or {}).items()}
        for name, rows in kept.items()
    }


def adapted_on(test: QuestionSet) -> list[str]:
    """Return what tells the questions that a method may adapt on; nothing where there are none."""
    return [prompts_digest(test.adapt())] if test.adapt else []


def method_folder(place: Path, entry: MethodEntry, settings: Any) -> Path:
    """Return where a method keeps its work on a mixture: another one for other settings."""
    return place / f"{file_name(entry.row)}-{digest([entry.kind, plain(settings)])[:8]}"


def described(entry: MethodEntry, settings: Any) -> dict[str, Any]:
    """Return which version of a method ran: its kind and every setting that is its own, defaults included."""
    own = plain(settings) or {}
    shared = [k for k in OF_THE_STUDY if k != "lens"] if isinstance(settings, FitSettings) else []
    return {"kind": entry.kind, **{k: v for k, v in own.items() if k not in shared}}


def plain(settings: Any) -> Any:
    """Return settings as JSON would read them back."""
    return json.loads(json.dumps(settings.record() if isinstance(settings, Settings) else settings))


def read_rows(path: Path, key: str, test: QuestionSet, folder: Path) -> dict[str, Predictions] | None:
    """Return predictions that were made before; None where there are none, damaged ones, or others than are asked for.

    Nor are there any where the method has lost a file of its folder that a report tells of: it is then fitted again.
    """
    record = kept_record(path)
    if record is None or record.get("key") != key:
        return None
    try:
        if not all((folder / name).exists() for name in record.get("beside", [])):
            return None
        return {k: predictions_of(k, test.states, np.array(probs)) for k, probs in record["rows"].items()}
    except (
        AssertionError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
    ):  # damage that an older version left no digest of
        return None
