"""The audit of anyone's probabilities in one call: what `coral audit` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coral_lens.audit.measure import Audit, audit
from coral_lens.audit.reading import read_audited
from coral_lens.audit.settings import AuditSettings
from coral_lens.data.settings import TableOptions
from coral_lens.storage.progress import Bar, bar_of


def audit_probabilities(
    source: str | Path | Any | Sequence[str | Path],
    settings: AuditSettings | None = None,
    *,
    fit_on: str | Path | Any | None = None,
    swap: str | Path | Any | None = None,
    table: TableOptions | None = None,
    bar: Bar | bool = True,
) -> Audit:
    """Audit labelled probabilities from a file, from a frame, or from several files of the same questions.

    Maps are fitted on `fit_on` if it is given, otherwise on a part of the source, and measured on the rest. `swap` holds the
    same questions with their options in another order. `write_audit(found, folder)` writes the page and the maps.
    """
    audited = read_audited(sources_in(source), table)
    others = [None if other is None else read_audited([other], table) for other in (fit_on, swap)]
    return audit(audited, settings, fit_on=others[0], swapped=others[1], bar=bar_of(bar))


def sources_in(source: Any) -> list[Any]:
    """Return the files of a list of files, or the one source; a list of rows is one table."""
    several = isinstance(source, list | tuple) and bool(source) and all(isinstance(one, str | Path) for one in source)
    return [*source] if several else [source]
