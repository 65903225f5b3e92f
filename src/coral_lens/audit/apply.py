"""Use what an audit fitted on new probabilities, which need no labels: each row comes back with its calibrated ones beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coral_lens.audit.decisions import flattened
from coral_lens.audit.maps import SystemMaps
from coral_lens.audit.settings import MapName
from coral_lens.audit.systems import CONFIDENCE_ONLY
from coral_lens.audit.tables import AuditedRow, Layout, audited_row, layout_of, rows_of
from coral_lens.data.settings import TableOptions
from coral_lens.data.sources import open_table
from coral_lens.data.tables import Refusals, Table
from coral_lens.errors import CoralError, nearest
from coral_lens.metrics.conformal import abstains, prediction_sets
from coral_lens.ragged import Options

COLUMNS = ("calibrated_probs", "calibrated_confidence", "options_in_set", "abstain")
"""What is added to each row; sets and abstention where an audit fitted them."""


def apply_maps(
    source: str | Path | Any,
    maps: Mapping[str, SystemMaps],
    said: TableOptions | None = None,
    *,
    which: MapName | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of a table with calibrated probabilities; `which` selects another map than the one the audit used.

    Prediction sets and abstention were fitted on one map, and are left out with another.
    """
    said, refuse = said or TableOptions(), Refusals((said or TableOptions()).skip_bad)
    table = open_table(source, refuse)
    layouts: dict[tuple[str, ...], Layout] = {}
    found = []
    try:
        for batch in table.batches:
            for number, row in flattened(rows_of(batch)):
                layout = layouts.setdefault(tuple(row), layout_of(tuple(row), said.columns or {}, table.name))
                try:
                    read = audited_row(table, number, row, layout)
                    found.append(calibrated_row(read, maps, table, which))
                except CoralError as error:
                    refuse(str(error), error)
    finally:
        table.close()
    if not found:
        raise CoralError(f"{table.name} holds nothing that maps can be applied to.")
    return found


def calibrated_row(
    row: AuditedRow, maps: Mapping[str, SystemMaps], table: Table, which: MapName | None
) -> dict[str, Any]:
    """Return a row with what its system's maps make of it."""
    if row.options == CONFIDENCE_ONLY:
        raise CoralError(
            f"{table.where(row.number)}: a confidence alone cannot be mapped; give the probabilities of all options."
        )
    system, probs = next(iter(row.probs.items()))
    fitted = maps_for(system, maps, table, row.number)
    p, options = np.array(probs) / sum(probs), Options.of_sizes([len(probs)])
    name = which or fitted.used
    mapped = fitted.mapped(name, p, options)
    made: dict[str, Any] = {"calibrated_probs": mapped.tolist(), "calibrated_confidence": float(mapped.max())}
    if name == fitted.used and fitted.sets:
        made["options_in_set"] = np.flatnonzero(prediction_sets(fitted.sets, mapped, options)).tolist()
    if name == fitted.used and fitted.abstention:
        made["abstain"] = bool(abstains(fitted.abstention, np.array([mapped.max()]))[0])
    return {key if key not in COLUMNS else f"input_{key}": value for key, value in row.values.items()} | made


def maps_for(system: str, maps: Mapping[str, SystemMaps], table: Table, number: int) -> SystemMaps:
    """Return the maps of a row's system; where an audit had one system only, its maps are meant."""
    if system in maps:
        return maps[system]
    if len(maps) == 1:
        return next(iter(maps.values()))
    named = f"the system {system!r}" if system else "no system"
    raise CoralError(
        f"{table.where(number)}: it names {named}, and the maps are of {', '.join(maps)}; say which in a column `system`."
        f"{nearest(system, maps)}"
    )
