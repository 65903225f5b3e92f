"""The command that looks at anyone's probabilities: audit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coral_lens.audit.settings import AuditSettings
from coral_lens.cli.options import flat
from coral_lens.data.settings import TableOptions
from coral_lens.errors import CoralError, need
from coral_lens.storage.escape import for_terminal
from coral_lens.storage.settings import Settings

if TYPE_CHECKING:
    from coral_lens.audit.measure import Audit

app = typer.Typer()


@dataclass(frozen=True)
class AuditFiles(Settings):
    """What else is read, and what is written."""

    out: Path | None = None
    """Folder for the page, the numbers and the maps; with --apply, the file to write (.jsonl, .csv or .parquet)."""
    fit_on: Path | None = None
    """Fit maps, sets and the threshold on this file instead of a part of the first."""
    swap: Path | None = None
    """The same questions with their options in another order: says how many answers flip."""
    apply: Path | None = None
    """Use the maps of an earlier audit (its folder, or OUT/maps.json) on new rows, which need no labels."""


@app.command()
@flat
def audit(
    files: Annotated[
        list[str], typer.Argument(help="Tables with probabilities and labels, logs of lm-eval or Inspect, runs.")
    ],
    *,
    settings: AuditSettings,
    others: AuditFiles,
    table: TableOptions,
) -> None:
    """Say whether anyone's probabilities can be trusted; no model is needed, only probabilities and labels.

    Reads JSONL, CSV, parquet, logs of lm-eval (`samples_*.jsonl`) and of Inspect (`.eval`, `.json`), answers of `coral predict`
    and of servers of decisions with labels beside them. Several files of the same questions are compared.
    Example: `coral audit answers.csv --precision 0.95 --by topic --out audited`, then
    `coral audit --apply audited/maps.json new.csv --out calibrated.csv`
    """
    if others.apply:
        apply_to(files, settings, others, table)
        return
    from coral_lens.audit.probabilities import audit_probabilities
    from coral_lens.storage.progress import shown

    refuse_other_out(others.out)
    found = audit_probabilities(files, settings, fit_on=others.fit_on, swap=others.swap, table=table, bar=shown)
    show_audit(found, others.out)


def refuse_other_out(out: Path | None, *, by: str = "coral audit --out") -> None:
    """Refuse a place for results that holds something else, before anything is computed."""
    from coral_lens.audit.page import refuse_other_audit

    if out:
        need("report", by=by)
        refuse_other_audit(out)


def show_audit(found: Audit, out: Path | None) -> None:
    """Print what an audit found, and write its page if it has a folder."""
    from coral_lens.audit.page import write_audit
    from coral_lens.audit.rows import calibrated_lines, group_lines, system_lines
    from coral_lens.audit.sentences import sentences

    for sentence in sentences(found):
        typer.echo(for_terminal(f"{sentence}\n"))
    for lines in (system_lines(found), calibrated_lines(found), group_lines(found)):
        if lines:
            typer.echo(for_terminal("\n".join([*lines, ""])))
    if out:
        typer.echo(f"Report: {write_audit(found, out)}")


def apply_to(files: list[str], settings: AuditSettings, others: AuditFiles, table: TableOptions) -> None:
    """Use the maps of an earlier audit on new rows."""
    from coral_lens.audit.apply import COLUMNS, apply_maps
    from coral_lens.audit.maps import load_maps
    from coral_lens.storage.files import write_atomic
    from coral_lens.storage.outputs import output_file
    from coral_lens.storage.rows import first_columns, writer_of

    assert others.apply is not None, "asked for by the caller"
    if others.out is None:
        raise CoralError("--apply writes a table: give --out FILE (.jsonl, .csv or .parquet).")
    write = writer_of(others.out)
    target = output_file(others.out, is_ours=lambda path: set(COLUMNS[:2]) <= first_columns(path))
    maps = load_maps(others.apply)
    usual = AuditSettings().map
    rows = [
        row
        for file in files
        for row in apply_maps(file, maps, table, which=None if settings.map == usual else settings.map)
    ]
    write_atomic(target, write(rows))
    typer.echo(f"{len(rows):,} rows in {others.out}")
