"""The one door of an audit: tables, frames, logs of lm-eval, of Inspect and of our own server, and runs, become audited sets."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from coral_lens.audit.inspect_logs import is_inspect_log, read_inspect
from coral_lens.audit.systems import AuditedSet, joined
from coral_lens.audit.tables import read_table
from coral_lens.data.settings import TableOptions
from coral_lens.errors import CoralError
from coral_lens.harness.logs import PATTERN, find_logs, load_logs
from coral_lens.records import Columns, Question
from coral_lens.report.confidence import end_to_end
from coral_lens.report.runs import Evaluation, load_run
from coral_lens.storage.files import digest_file
from coral_lens.storage.lines import iter_lines, parse_json

TASK = "task"
"""The column that says which test set a question is from, where an audit has several."""


def read_audited(sources: Sequence[Any], said: TableOptions | None = None) -> AuditedSet:
    """Return all that sources hold as one set.

    Sources that answered the same questions are systems that are compared; others are put one after the other, if they are of the
    same systems, and divided into subgroups by their `task`.
    """
    found = [one for source in expanded(sources) for one in read_source(source, said or TableOptions())]
    clusters: list[list[AuditedSet]] = []
    for one in found:
        ids = {q.id for q in one.questions}
        home = next((c for c in clusters if ids & {q.id for q in c[0].questions}), None)
        clusters.append([one]) if home is None else home.append(one)
    sets = [joined(cluster) for cluster in clusters]
    return sets[0] if len(sets) == 1 else one_after_the_other(sets)


def read_logs(sources: Sequence[str | Path]) -> AuditedSet:
    """Return what lm-eval logged, and nothing else: files of samples, folders that hold them, and patterns."""
    paths = tuple(find_logs(sources))
    sets = [of_evaluation(e, digests(paths)) for e in load_logs(paths)]
    return sets[0] if len(sets) == 1 else one_after_the_other(sets)


def expanded(sources: Sequence[Any]) -> list[Any]:
    """Return sources with patterns replaced by the files that they name, logs of lm-eval gathered as one."""
    found: list[Any] = []
    logs: list[Path] = []
    for source in sources:
        if not isinstance(source, str | Path):
            found.append(source)
            continue
        path = Path(source)
        names = [path] if path.exists() else [Path(p) for p in sorted(glob.glob(str(source)))]
        if not names:
            raise CoralError(
                f"{source}: no such file or folder; an audit reads tables, logs of lm-eval and Inspect, and runs."
            )
        for name in names:
            if name.is_dir() and not (name / "run.json").is_file() and sorted(name.rglob(PATTERN)):
                logs += sorted(name.rglob(PATTERN))
            elif name.is_file() and is_lm_eval_log(name):
                logs.append(name)
            else:
                found.append(name)
    return [*found, *([tuple(logs)] if logs else [])]


def is_lm_eval_log(path: Path) -> bool:
    """Whether a file holds samples that lm-eval logged, by its first line."""
    if not path.name.lower().endswith((".jsonl", ".jsonl.gz")):
        return False
    first = next((line for _, line in iter_lines(path) if line.strip()), b"")
    try:
        record = parse_json(first[: 2**24])
    except ValueError:
        return False
    return isinstance(record, dict) and "doc_id" in record and ("resps" in record or "filtered_resps" in record)


def read_source(source: Any, said: TableOptions) -> list[AuditedSet]:
    """Return the sets of one source."""
    if isinstance(source, tuple):
        return [of_evaluation(e, digests(source)) for e in load_logs(source)]
    if isinstance(source, Path):
        if source.is_dir() and (source / "run.json").is_file():
            return [
                of_evaluation(e, {str(source): digest_file(source / "run.json")}) for e in load_run(source).evaluations
            ]
        if is_inspect_log(source):
            return [replace(read_inspect(source), sources=digests([source]))]
        sets = read_table(source, said, name=source.name)
        return [replace(one, sources=digests([source]) if source.is_file() else {}) for one in sets]
    return read_table(source, said, name="the table")


def digests(paths: Sequence[Path]) -> dict[str, str]:
    """Return the digest of each file."""
    return {str(path): digest_file(path) for path in paths}


def of_evaluation(evaluation: Evaluation, sources: dict[str, str]) -> AuditedSet:
    """Return the test set of a run or of lm-eval's logs."""
    return AuditedSet(evaluation.name, evaluation.questions, dict(evaluation.predictions), sources=sources)


def one_after_the_other(sets: Sequence[AuditedSet]) -> AuditedSet:
    """Return several sets of the same systems as one, whose questions say which they come from."""
    first = sets[0]
    for other in sets[1:]:
        if set(other.systems) != set(first.systems) or other.top_only != first.top_only:
            raise CoralError(
                f"{first.name} and {other.name} have neither questions nor systems in common ({', '.join(first.systems)}; "
                f"{', '.join(other.systems)}): audit them one by one, or give the same questions the same ids."
            )
    name = f"{len(sets)} sets"
    systems = {n: end_to_end([one.systems[n] for one in sets], name) for n in first.systems}
    questions = [(one.name, q) for one in sets for q in one.questions]
    names = list(dict.fromkeys(column for _, q in questions for column in q.columns))
    rows = [{**dict.fromkeys(names), **q.columns, TASK: task} for task, q in questions]
    table = Columns({column: [row[column] for row in rows] for column in dict.fromkeys([*names, TASK])})
    placed: tuple[Question, ...] = tuple(replace(q, table=table, row=i) for i, (_, q) in enumerate(questions))
    sources = {path: digest for one in sets for path, digest in one.sources.items()}
    assert all(np.isfinite(p.probs).all() for p in systems.values()), "probabilities are numbers"
    tests = tuple(task for task, _ in questions)
    return AuditedSet(name, placed, systems, first.top_only, sources, tests)
