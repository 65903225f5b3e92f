"""Anyone's lm-eval logs (`--log_samples`) as Predictions: metrics, intervals and reports then work on them.

A log holds the log-likelihood of every option, which is all that calibration needs. It does not hold token counts, so the
base rules are `sum` (lm-eval's acc) and `char` (its acc_norm). Every complaint names file and line.
"""

from __future__ import annotations

import ast
import glob
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coral_lens.errors import CoralError
from coral_lens.harness.requests import Pair, choices_of, in_contexts, n_options
from coral_lens.lens.rules import base_probs
from coral_lens.ragged import Options
from coral_lens.records import OptionTable, Predictions, Question, groups_of
from coral_lens.report.runs import Evaluation, Run
from coral_lens.storage.escape import in_one_line
from coral_lens.storage.files import digest_file, versions
from coral_lens.storage.lines import iter_lines, parse_json

LogRule = Literal["sum", "char"]
METHODS: dict[LogRule, str] = {"sum": "sum (acc)", "char": "char (acc_norm)"}
"""The names of a table's rows: our base rule and lm-eval's accuracy of the same answers."""
PATTERN = "samples_*.jsonl"
_FILE_NAME = re.compile(r"samples_(.+?)(?:_\d{4}-\d{2}-\d{2}T[\d.:-]+)?")


@dataclass(frozen=True, slots=True)
class LoggedSample:
    """One logged document of a multiple-choice task."""

    where: str
    """File and line, for complaints."""
    number: str
    pairs: tuple[Pair, ...]
    """The requests of its options; empty where the log does not hold them."""
    logprobs: tuple[float, ...]
    target: Any
    acc: float | None
    """Whether lm-eval counted the answer as right; None where the task has no such metric."""
    by_length: bool
    """Whether the task has acc_norm."""

    @property
    def choices(self) -> tuple[str, ...]:
        return choices_of([continuation for _, continuation in self.pairs])

    @property
    def top(self) -> int:
        return int(np.argmax(self.logprobs))


@dataclass(frozen=True)
class Log:
    """One file: the questions of a task and their scores."""

    task: str
    path: Path
    questions: tuple[Question, ...]
    table: OptionTable
    rules: tuple[LogRule, ...]
    """The base rules that mean something for it."""

    def predictions(self, rule: LogRule = "sum", *, method: str | None = None) -> Predictions:
        """Return the distribution over the options of each question by a base rule."""
        if rule not in self.rules:
            raise CoralError(f"{self.path} cannot be read by the base rule {rule!r}; use {' or '.join(self.rules)}.")
        return Predictions(
            method=method or METHODS[rule],
            model=self.path.parent.name,
            task=self.task,
            split="",
            ids=tuple(q.id for q in self.questions),
            answers=self.table.answers,
            offsets=self.table.offsets,
            probs=base_probs(self.table, rule),
            groups=groups_of(self.questions),
        )


def load_log(path: Path, *, filter_name: str | None = None) -> Log:
    """Read one file of samples. Without a filter's name, the unfiltered answers are taken, or those of the only filter."""
    named = _FILE_NAME.fullmatch(path.stem)
    task = named[1] if named else path.stem
    samples = [sample_of(record, where) for where, record in filtered(path, filter_name)]
    answers = answers_of(samples)
    questions = tuple(question_of(s, a, task) for s, a in zip(samples, answers, strict=True))
    if len({q.id for q in questions}) < len(questions):
        raise CoralError(f"{path} holds some documents twice: it is of several runs; give each run's file by itself.")
    choices = [choice for s in samples for choice in (s.choices or [""] * len(s.logprobs))]
    n_chars = np.array([len(choice) for choice in choices])
    table = OptionTable(
        logprobs=np.array([x for s in samples for x in s.logprobs]),
        n_tokens=np.zeros(len(choices), dtype=np.int64),
        n_chars=n_chars,
        n_bytes=np.array([len(choice.encode()) for choice in choices]),
        offsets=Options.of_sizes([len(s.logprobs) for s in samples]).edges,
        answers=np.array(answers, dtype=np.int64),
    )
    lengths_known = all(s.by_length and s.pairs and not in_contexts(s.pairs) for s in samples) and bool(n_chars.all())
    return Log(task, path, questions, table, ("sum", "char") if lengths_known and not is_normal(table) else ("sum",))


def is_normal(table: OptionTable) -> bool:
    """Whether the log-likelihoods are those of a distribution already (`--model coral` with a lens): lengths do not count."""
    with np.errstate(over="ignore"):  # a log-likelihood far above 0 is none, and certainly not normal
        return bool(np.allclose(table.options.sum(np.exp(table.logprobs)), 1.0, atol=1e-6))


# ---------------------------------------------------------------------------------------------------------- reading


def filtered(path: Path, wanted: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Return the records of one filter, each with its file and line."""
    records = read_lines(path)
    names = list(dict.fromkeys(str(record.get("filter", "none")) for _, record in records))
    chosen = wanted or ("none" if "none" in names else names[0])
    if chosen not in names or (wanted is None and chosen != "none" and len(names) > 1):
        known = ", ".join(in_one_line(name)[:80] for name in names[:10]) + (", ..." if len(names) > 10 else "")
        raise CoralError(f"{path} holds the filters {known}; name one of them.")
    return [(where, record) for where, record in records if str(record.get("filter", "none")) == chosen]


def read_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the JSON objects of a file, each with its file and line."""
    numbered = []
    # bytes, because str.splitlines would also cut at U+2028 and its like, which a document may hold
    for number, line in iter_lines(path):
        where = f"{path}, line {number}"
        try:
            record = parse_json(line) if line.strip() else None
        except ValueError as error:
            raise CoralError(f"{where}: not valid JSON in UTF-8 ({error}).") from error
        if isinstance(record, dict):
            numbered.append((where, record))
        elif record is not None:
            raise CoralError(f"{where}: a JSON object is expected, found {type(record).__name__}.")
    if not numbered:
        raise CoralError(f"{path} holds no samples.")
    return numbered


def sample_of(record: Mapping[str, Any], where: str) -> LoggedSample:
    """Read one logged document; the requests that `acc_mutual_info` adds are left out."""
    missing = [name for name in ("doc_id", "target") if record.get(name) is None]
    if missing:
        raise CoralError(f"{where}: {missing[0]!r} is missing; make the log with lm-eval's --log_samples.")
    logprobs = logprobs_of(record, where)
    pairs = request_pairs(record.get("arguments"), where)
    if pairs and len(pairs) != len(logprobs):
        raise CoralError(f"{where}: {len(pairs)} requests have {len(logprobs)} answers; the log is damaged.")
    number = str(record["doc_id"])
    # JSON can escape half a character; no file could take it
    if any("\ud800" <= character <= "\udfff" for text in (number, *chain(*pairs)) for character in text):
        raise CoralError(f"{where}: it holds half of a surrogate pair, which is not text; the log is damaged.")
    n = n_options(pairs) if pairs else len(logprobs)
    if n < 2:
        raise CoralError(f"{where}: not of a multiple-choice task, because it has one request only.")
    acc, metrics = record.get("acc"), record.get("metrics")
    return LoggedSample(
        where=where,
        number=number,
        pairs=pairs[:n],
        logprobs=logprobs[:n],
        target=record["target"],
        acc=float(acc) if isinstance(acc, int | float) and 0 <= acc <= 1 else None,
        by_length="acc_norm" in (metrics if isinstance(metrics, list) else ()) or "acc_norm" in record,
    )


def logprobs_of(record: Mapping[str, Any], where: str) -> tuple[float, ...]:
    """Return the log-likelihood of each request; lm-eval writes them as text, in one list more where not filtered."""
    answers = record.get("filtered_resps")
    if not isinstance(answers, list):
        answers = record.get("resps", ())
    try:
        if not isinstance(record.get("filtered_resps"), list):
            answers = [repeats[0] for repeats in answers if repeats]
        values = tuple(float(logprob) for logprob, _ in answers)
    except (TypeError, ValueError, KeyError, OverflowError):
        raise CoralError(
            f"{where}: its answers are not pairs of a log-likelihood and a flag, so it is not of a multiple-choice task."
        ) from None
    if not values or any(np.isnan(x) or x == np.inf for x in values) or all(x == -np.inf for x in values):
        raise CoralError(f"{where}: its log-likelihoods {list(values)} are missing or make no distribution.")
    return values


def request_pairs(arguments: Any, where: str) -> tuple[Pair, ...]:
    """Return contexts and continuations: in files under `gen_args_0`, `arg_0`; as lists in older ones and in memory."""
    rows = list(arguments.values()) if isinstance(arguments, dict) else arguments or []
    rows = [list(row.values()) if isinstance(row, dict) else row for row in rows] if isinstance(rows, list) else [rows]
    if not all(isinstance(row, list) for row in rows):
        raise CoralError(f"{where}: its arguments are not lists of a context and a continuation; the log is damaged.")
    return tuple((str(row[0]), str(row[1])) for row in rows if len(row) >= 2)


# ------------------------------------------------------------------------------------------------------ right options


def target_as_number(sample: LoggedSample) -> int | None:
    """Read the target as the number of an option."""
    try:
        number = int(target_of(sample))
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number < len(sample.logprobs) else None


def target_as_text(sample: LoggedSample) -> int | None:
    """Read the target as the text of an option."""
    target = target_of(sample)
    return sample.choices.index(target) if target in sample.choices else None


def answer_by_verdict(sample: LoggedSample) -> int | None:
    """Infer the right option from lm-eval's verdict: logs of tasks with options in the context do not name it."""
    if sample.acc is None or not in_contexts(sample.pairs):
        return None
    if sample.acc == 1.0:
        return sample.top
    return 1 - sample.top if len(sample.logprobs) == 2 else None


READINGS: tuple[Callable[[LoggedSample], int | None], ...] = (target_as_number, target_as_text, answer_by_verdict)
"""How a target may be meant. Files hold all targets as text: `2` may be the third option or the option `2`."""


def target_of(sample: LoggedSample) -> Any:
    """Return the target; a list of one is that one, and a longer one is refused."""
    target = sample.target
    if isinstance(target, str) and target.startswith("["):
        try:
            target = ast.literal_eval(target)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # whatever it is, it is no list
            return target
    if not isinstance(target, list):
        return target
    if len(target) != 1:
        raise CoralError(f"{sample.where}: {len(target)} options are right; only questions with one can be used.")
    return target[0]


def answers_of(samples: Sequence[LoggedSample]) -> list[int]:
    """Return the right option of each sample: by the one reading that fits all of a file and lm-eval's own verdicts."""
    readings = [[read(s) for s in samples] for read in READINGS]
    fitting = [r for r in readings if all(map(agrees, samples, r))]
    if not fitting:
        # complain where the likeliest reading breaks down
        best = max(readings, key=lambda r: sum(map(agrees, samples, r)))
        wrong = next(s for s, a in zip(samples, best, strict=True) if not agrees(s, a))
        raise CoralError(
            f"{wrong.where}: the right option cannot be told from target {wrong.target!r} and acc {wrong.acc}; is it labelled?"
        )
    for sample, *answers in zip(samples, *fitting, strict=True):
        if len(set(answers)) > 1:
            raise CoralError(f"{sample.where}: target {sample.target!r} may be the number or the text of an option.")
    return [a for a in fitting[0] if a is not None]


def agrees(sample: LoggedSample, answer: int | None) -> bool:
    """Whether an answer exists and is right exactly where lm-eval says so."""
    return answer is not None and (sample.acc is None or (sample.top == answer) == (sample.acc == 1.0))


def question_of(sample: LoggedSample, answer: int, task: str) -> Question:
    """Return the question for people: what lm-eval asked, as it asked it."""
    contexts = [context for context, _ in sample.pairs]
    text, shown = (contexts[0], sample.choices) if contexts else ("", ())
    if in_contexts(sample.pairs):
        text, shown = sample.pairs[0][1], tuple(contexts)
    options = shown or tuple(f"option {i + 1}" for i in range(len(sample.logprobs)))
    name = f"{task}/{sample.number}"
    return Question(name, name, text, tuple(o if o.strip() else "(empty)" for o in options), answer, task=task)


# ----------------------------------------------------------------------------------------------------- several files


def find_logs(sources: Sequence[str | Path]) -> list[Path]:
    """Return the files of samples that are named: files, folders that hold them, and patterns."""
    logs: list[Path] = []
    for source in map(Path, sources):
        if source.is_dir():
            named = sorted(source.rglob(PATTERN))
        else:
            named = [source] if source.exists() else [Path(p) for p in sorted(glob.glob(str(source)))]
        if not named:
            raise CoralError(
                f"{source}: no such file, nor a folder with {PATTERN}; lm-eval writes them with --log_samples."
            )
        logs += named
    return list(dict.fromkeys(logs))


def run_of_logs(sources: Sequence[str | Path]) -> Run:
    """Return the run that a report is made of; it has no lens."""
    evaluations = load_logs(sources)
    models = dict.fromkeys(p.model for e in evaluations for p in e.predictions.values())
    files = {str(path): digest_file(path) for path in find_logs(sources)}
    provenance = {"lm-eval samples": files, "versions": versions()}
    name = ", ".join(models)
    return Run(f"{name}: lm-eval's samples", tuple(evaluations), {"model": {"name": name}}, provenance)


def load_logs(sources: Sequence[str | Path]) -> list[Evaluation]:
    """Read files of samples; those of the same questions (of several models) stand side by side in one table."""
    paths = find_logs(sources)
    labels = labels_of(paths)
    by_questions: dict[tuple[Any, ...], list[Log]] = {}
    for path in paths:
        log = load_log(path)
        asked = tuple((q.id, len(q.options), q.answer) for q in log.questions)
        by_questions.setdefault((log.task, asked), []).append(log)
    tasks = [task for task, _ in by_questions]
    evaluations = []
    for (task, _), logs in by_questions.items():
        name = task if tasks.count(task) == 1 else f"{task} ({labels[logs[0].path]})"
        predictions = [
            log.predictions(rule, method=METHODS[rule] if len(logs) == 1 else f"{labels[log.path]}: {METHODS[rule]}")
            for log in logs
            for rule in log.rules
        ]
        evaluations.append(Evaluation(name, logs[0].questions, {p.method: p for p in predictions}))
    return evaluations


def labels_of(paths: Sequence[Path]) -> dict[Path, str]:
    """Return a name for each file: its folder's, which lm-eval calls after the model, or its own where that is not enough."""
    tasks = [(p.parent.name, (_FILE_NAME.fullmatch(p.stem) or [p.stem, p.stem])[1]) for p in paths]
    return {p: p.parent.name if tasks.count(t) == 1 else p.stem for p, t in zip(paths, tasks, strict=True)}
