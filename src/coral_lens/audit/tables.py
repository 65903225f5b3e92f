"""Probabilities from a table, in whatever columns people have them: a list, one column for each class, or a confidence alone.

Names of columns say what they are, or the user does; a table that can be read in two ways is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coral_lens.audit.decisions import flattened
from coral_lens.audit.systems import (
    CONFIDENCE_ONLY,
    AuditedSet,
    predictions_of_rows,
    refuse_no_distribution,
)
from coral_lens.data.answers import TRUTH, AnswerBook, chosen, is_missing, read_answers, settle
from coral_lens.data.columns import plain_name
from coral_lens.data.options import Asked, OptionColumn, listed, options_in
from coral_lens.data.settings import KIND_WORDS, TableOptions
from coral_lens.data.sources import open_table
from coral_lens.data.tables import Batch, Refusals, Table
from coral_lens.errors import CoralError
from coral_lens.metrics.answered import distribution_of
from coral_lens.records import Columns, Question

PARTS: dict[str, tuple[str, ...]] = {
    "probs": ("probs", "probabilities", "predicted_probs", "predicted_probabilities", "proba"),
    "base_probs": ("base_probs",),
    "probability": ("probability", "p_true", "p_yes", "score"),
    "confidence": ("confidence", "conf"),
    "correct": ("correct", "is_correct", "right"),
    "prediction": ("prediction", "predicted", "choice", "model_answer"),
    "answer": ("input_answer", "label", "answer", "gold", "target", "truth", "y", "answer_key", "answerkey"),
    "options": ("options", "choices", "classes", "labels"),
    "id": ("id", "question_id", "qid"),
    "group": ("group",),
    "question": ("question", "text", "prompt"),
    "kind": ("kind",),
    "system": ("system", "model", "method", "lens"),
}
"""What each part of an audited row may be called; the first name that a table has counts."""
CHOSEN = {"option", "confidence", "probs", "base_probs"}
"""Beside these, `answer` is what a lens chose (`coral predict` writes it so), and no label."""
CLASS_COLUMN = re.compile(r"(?:probs?|probability|proba|p)_(.+)", re.IGNORECASE)
"""The column of one class: `prob_spam`, `p_0`."""


@dataclass(frozen=True)
class Layout:
    """Which column is what, and the columns of single classes."""

    parts: Mapping[str, str]
    classes: Mapping[str, str]
    """By class, its column; empty where probabilities stand in one cell."""


def layout_of(names: Sequence[str], said: Mapping[str, str], where: str) -> Layout:
    """Return which column is what."""
    for part, column in said.items():
        if part not in PARTS:
            raise CoralError(f"--columns has the unknown part {part!r}; an audit knows {', '.join(PARTS)}.")
        if column and column not in names:
            raise CoralError(
                f"{where}: there is no {column!r}, which --columns takes for the {part}; found {', '.join(names)}."
            )
    plain = {plain_name(name): name for name in reversed(names)}
    parts = {part: column for part, column in said.items() if column}
    if set(plain) >= CHOSEN:
        plain.pop("answer", None)
    for part, aliases in PARTS.items():
        found = next((plain[alias] for alias in aliases if alias in plain), None)
        if part not in said and found is not None and found not in parts.values():
            parts[part] = found
    taken = set(parts.values())
    classes = {m[1]: name for name in names if name not in taken and (m := CLASS_COLUMN.fullmatch(name.strip()))}
    return Layout(parts, classes if len(classes) > 1 and "probs" not in parts else {})


@dataclass
class AuditedRow:
    """One row as it was read: what is known of its options, and what each system says."""

    number: int
    options: tuple[str, ...]
    probs: dict[str, list[float]]
    """By system."""
    label: Any
    kind: str
    values: Mapping[str, Any]
    """The whole row."""


def read_table(source: Any, said: TableOptions, *, name: str) -> list[AuditedSet]:
    """Return what a table holds: one set, or several where rows name their systems and these answered different questions."""
    refuse = Refusals(said.skip_bad)
    table = open_table(source, refuse)
    try:
        rows = list(iter_rows(table, said, refuse))
    finally:
        table.close()
    if not rows:
        raise CoralError(f"{table.name} holds nothing to audit.")
    top_only = any(row.options == CONFIDENCE_ONLY for row in rows)
    return grouped(rows, table, said, name=name, top_only=top_only)


def iter_rows(table: Table, said: TableOptions, refuse: Refusals) -> Iterator[AuditedRow]:
    """Yield the rows of a table; decisions that a server answered are taken apart first."""
    layouts: dict[tuple[str, ...], Layout] = {}
    for batch in table.batches:
        for number, row in flattened(rows_of(batch)):
            names = tuple(row)
            if names not in layouts:
                layouts[names] = layout_of(names, said.columns or {}, table.name)
            try:
                yield audited_row(table, number, row, layouts[names])
            except CoralError as error:
                refuse(str(error), error)


def rows_of(batch: Batch) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a batch."""
    for i, number in enumerate(batch.numbers):
        yield number, {name: column[i] for name, column in batch.columns.items()}


def audited_row(table: Table, number: int, row: Mapping[str, Any], layout: Layout) -> AuditedRow:
    """Read one row."""
    cells = {part: row.get(column) for part, column in layout.parts.items()}
    kind = KIND_WORDS.get(str(cells.get("kind") or "choice").strip().lower().replace("_", "-"), "choice")
    system = str(cells["system"]) if not is_missing(cells.get("system")) else ""
    options: tuple[str, ...] = ()
    if not is_missing(cells.get("options")):
        options = options_in(cells["options"], bars=True).options
    where = table.where(
        number, layout.parts.get("probs", layout.parts.get("probability", layout.parts.get("confidence", "")))
    )
    probs: dict[str, list[float]] = {}
    if layout.classes:
        options = options or tuple(layout.classes)
        probs[system] = refuse_no_distribution([row[c] for c in layout.classes.values()], where)
    elif not is_missing(cells.get("probs")):
        options, probs = in_cell(cells["probs"], options, system, where)
        if not is_missing(cells.get("base_probs")) and list(probs) == [system]:
            _, base = in_cell(cells["base_probs"], options, "base", where)
            probs = {system or "lens": probs[system], **base}
    elif not is_missing(cells.get("probability")):
        yes = number_in(cells["probability"], where)
        options, probs[system], kind = options or ("no", "yes"), [1.0 - yes, yes], "yes-no"
    elif not is_missing(cells.get("confidence")):
        return by_confidence(table, number, row, cells, system)
    else:
        raise CoralError(
            f"{table.where(number)}: no probabilities; found {', '.join(row)}. Call the column `probs` (a list), `prob_CLASS` "
            "(one for each class), `probability` (of yes) or `confidence`, or say which it is: --columns probs=NAME."
        )
    sizes = {len(p) for p in probs.values()} | {len(options)}
    if len(sizes) > 1:
        raise CoralError(f"{where}: {len(options)} options have {len(next(iter(probs.values())))} probabilities.")
    return AuditedRow(number, options, probs, cells.get("answer"), kind, row)


def in_cell(
    cell: Any, options: tuple[str, ...], system: str, where: str
) -> tuple[tuple[str, ...], dict[str, list[float]]]:
    """Return options and probabilities of one cell: a list, an object by option, or one of these for each system."""
    value = listed(cell) if isinstance(cell, str) else cell
    if isinstance(value, Mapping) and value and all(isinstance(inner, list | tuple) for inner in value.values()):
        made = {str(name): refuse_no_distribution(inner, where) for name, inner in value.items()}
        n = len(next(iter(made.values())))
        return options or tuple(f"option {i + 1}" for i in range(n)), made
    if isinstance(value, Mapping):
        names = tuple(map(str, value))
        if options and set(options) == set(names):
            return options, {system: refuse_no_distribution([value[o] for o in options], where)}
        return names, {system: refuse_no_distribution(value.values(), where)}
    numbers = refuse_no_distribution(value, where)
    return options or tuple(f"option {i + 1}" for i in range(len(numbers))), {system: numbers}


def number_in(cell: Any, where: str) -> float:
    """Return a probability."""
    try:
        value = float(cell)
    except (TypeError, ValueError):
        value = float("nan")
    if not 0.0 <= value <= 1.0:
        raise CoralError(f"{where}: a probability from 0 to 1 is expected. Got {str(cell)[:40]!r} instead.")
    return value


def by_confidence(
    table: Table, number: int, row: Mapping[str, Any], cells: Mapping[str, Any], system: str
) -> AuditedRow:
    """Read a row that has a confidence and says whether the answer is right, or what was answered and what is right."""
    confidence = number_in(cells["confidence"], table.where(number, "confidence"))
    correct, prediction, label = (cells.get(part) for part in ("correct", "prediction", "answer"))
    if not is_missing(correct):
        truth = TRUTH.get(spelled(correct).lower())
        if truth is None:
            raise CoralError(
                f"{table.where(number, 'correct')}: yes or no is expected. Got {str(correct)[:40]!r} instead."
            )
    elif is_missing(prediction) or is_missing(label):
        raise CoralError(
            f"{table.where(number)}: a confidence needs `correct`, or `prediction` and `label`; found {', '.join(row)}."
        )
    else:
        truth = int(spelled(prediction) == spelled(label))
    return AuditedRow(number, CONFIDENCE_ONLY, {system: distribution_of(confidence).tolist()}, not truth, "choice", row)


def spelled(cell: Any) -> str:
    """Return a cell as text; a column of whole numbers with gaps is written as 1.0 by data frames, and is 1 all the same."""
    return str(cell).strip().removesuffix(".0")


# ------------------------------------------------------------------------------------------------------- rows into sets


def grouped(
    rows: Sequence[AuditedRow], table: Table, said: TableOptions, *, name: str, top_only: bool
) -> list[AuditedSet]:
    """Return the rows as sets of questions, one for each system that rows name."""
    systems = list(dict.fromkeys(system for row in rows for system in row.probs))
    whole = all(set(row.probs) == set(systems) for row in rows)
    parts = [rows] if whole else [[row for row in rows if system in row.probs] for system in systems]
    sets = []
    for i, part in enumerate(parts):
        answers = labels_of(part, table, said) if not top_only else [int(row.label) for row in part]
        questions = questions_of(part, answers, table, said)
        named = systems if whole else [systems[i]]
        predictions = {
            system or name: predictions_of_rows(system or name, name, questions, [row.probs[system] for row in part])
            for system in named
        }
        sets.append(AuditedSet(name, questions, predictions, top_only))
    return sets


def labels_of(rows: Sequence[AuditedRow], table: Table, said: TableOptions) -> list[int]:
    """Return the right option of each row, read in the one way that fits the whole table; `answer_index` has one only."""
    places = [row.values.get("answer_index") for row in rows]
    if all(type(place) is int and 0 <= place < len(row.options) for place, row in zip(places, rows, strict=True)):
        return [int(place) for place in places if place is not None]
    asked = [Asked(row.options, kind=row.kind, truth=row.options == ("no", "yes")) for row in rows]
    options = OptionColumn([row.options for row in rows], asked)
    given = [row.label for row in rows]
    missing = [row.number for row in rows if is_missing(row.label)]
    if missing:
        raise CoralError(
            f"{table.where(missing[0])}: {len(missing)} of {len(rows)} rows have no label, and an audit needs all; call the "
            "column `label`, or say which it is: --columns answer=NAME."
        )
    column = read_answers([row.number for row in rows], given, options, is_text=table.is_text)
    book = AnswerBook(table, said.answer_base, [column])
    found = chosen(book, column, settle(book), Refusals(), "label")
    return [answer for answer in found if answer is not None]


def questions_of(
    rows: Sequence[AuditedRow], answers: Sequence[int], table: Table, said: TableOptions
) -> tuple[Question, ...]:
    """Return the rows as questions, for people and for subgroups; each keeps its row."""
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    layout = layout_of(names, said.columns or {}, table.name).parts
    columns = Columns({name: [row.values.get(name) for row in rows] for name in names})
    made, seen = [], set[str]()
    for i, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        cell = row.values.get(layout.get("id", ""), None)
        identity = f"{table.stem}:{row.number}" if is_missing(cell) else str(cell)
        if identity in seen:
            raise CoralError(
                f"{table.where(row.number)}: the id {identity!r} comes twice; make ids unique, or name the column of systems: "
                "--columns system=NAME."
            )
        seen.add(identity)
        group, text = (row.values.get(layout.get(part, "")) for part in ("group", "question"))
        size = len(next(iter(row.probs.values())))
        options = (
            row.options if len(row.options) == size else (row.options[0], *(f"another {j}" for j in range(1, size)))
        )
        made.append(
            Question(
                identity,
                identity if is_missing(group) else str(group),
                str(text) if not is_missing(text) else identity,
                tuple(option if option.strip() else "(empty)" for option in options),
                answer,
                task="audit",
                kind="choice" if row.kind == "yes-no" and len(options) != 2 else row.kind,  # type: ignore[arg-type]
                table=columns,
                row=i,
            )
        )
    return tuple(made)
