"""The numbers of a report: all metrics of all methods on all tasks, and how the lens compares. Never formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from coral_lens.metrics.comparisons import Difference, holm, mcnemar, resampled
from coral_lens.metrics.scores import MORE, Metrics, measure, metric_named, metrics_for
from coral_lens.records import Predictions
from coral_lens.report.runs import Evaluation, Run
from coral_lens.report.tables.clear import Verdict, verdict_of

COLUMNS = ("accuracy", "ece", "cwece", "brier", "nll")
"""The metrics of a results table, by their names in METRICS."""
TOP_1 = ("brier_top1", "nll_top1")
"""The other family of Brier and NLL, confidence against right or wrong; a study's tables have them too."""
SUBJECTS = ("listwise tempered", "listwise", "coral tempered", "coral", "coral ridge")
"""The method that is compared with the controls: the first of these that a run has, else its first lens."""
UNSTEERED = ("base", "0-shot", "temperature")
"""Rows in which no lens has a part."""
OF_ANOTHER = "temperature ("
"""With this begins the row of a temperature that was fitted on the questions of another lens (`temperature_of`)."""
CONTROLS = ("base", "temperature", "coral", "coral ridge")
"""What a gain is measured against: the unsteered model, the plain remedy that looks at no hidden state, the paper's lens."""
ENOUGH = 1000
"""ECE and its kin rank nothing below this many questions: their noise is then as large as what they measure."""
RESAMPLES_PER_TEST = 80
"""So that the smallest p-value that the bootstrap can give is half of 0.05 after correction."""

Pair = Callable[[str, str, str], Difference]
"""Difference of method a minus method b in a metric."""
Pairs = Callable[[Iterable[str]], list[tuple[str, str]]]
"""Says of the methods of a table which are compared, each with what."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One method minus another on the same questions."""

    method: str
    against: str
    differences: dict[str, Difference]
    """By metric."""
    p_values: dict[str, float]
    """Holm-corrected over the tests of the task's table; a metric that must not rank has none."""

    def verdict(self, metric: str) -> int:
        """Return 1 where the method is clearly better, -1 where clearly worse, 0 where the data cannot tell."""
        return verdict_of(self.differences[metric], self.p_values.get(metric), metric=metric, n_tests=0).said


@dataclass(frozen=True, slots=True)
class TaskTable:
    """The results of all methods on one task."""

    name: str
    """Its exact name, as in files."""
    title: str
    """Its name for people, which no other task of the run has."""
    trained_on: bool
    n_questions: int
    metrics: dict[str, Metrics]
    """By method, in the order in which the run gives them."""
    comparisons: tuple[Comparison, ...]
    best: dict[str, frozenset[str]]
    """By metric: the methods that lead every other one by a paired 95 % interval that leaves out 0, and are not
    contradicted by a corrected test; often none."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The metrics that are shown: of soft answers and of scores there are more, of a confidence alone others."""
        usual = tuple(m for m in self.best if m in COLUMNS or m in MORE)
        return usual if set(COLUMNS) <= set(self.best) else tuple(self.best)

    def ranks(self, metric: str) -> bool:
        """Whether the metric may rank methods on this many questions."""
        return may_rank(metric, self.n_questions)

    def comparison(self, against: str) -> Comparison | None:
        """Return the comparison of the table's subject with a control, where there is one."""
        subject = subject_of(self.metrics)
        return next((c for c in self.comparisons if (c.method, c.against) == (subject, against)), None)

    @property
    def n_tests(self) -> int:
        """Tests of this table, for which its p-values are corrected."""
        return sum(len(c.p_values) for c in self.comparisons)

    def difference(self, metric: str, against: str = "base") -> Difference:
        """Return the table's subject minus a control that it is compared with."""
        return self._compared(against).differences[metric]

    def values(self, metric: str, against: str = "base") -> tuple[float, float]:
        """Return a metric of a control, and that of the table's subject."""
        pair = (against, self._compared(against).method)
        before, after = (self.metrics[method].scores[metric].value for method in pair)
        return before, after

    def verdict(self, metric: str, against: str = "base") -> Verdict:
        """Say whether the table's subject is clearly better or worse than a control."""
        return self.judged(self._compared(against), metric)

    def judged(self, comparison: Comparison, metric: str) -> Verdict:
        """Say whether a difference of this table is clear."""
        p_holm = comparison.p_values.get(metric)
        return verdict_of(comparison.differences[metric], p_holm, metric=metric, n_tests=self.n_tests)

    def _compared(self, against: str) -> Comparison:
        comparison = self.comparison(against)
        assert comparison is not None, f"{self.name} has no comparison with {against}"
        return comparison


@dataclass(frozen=True, slots=True)
class ResultsTable:
    """Everything that the tables, the headline and the summary figures say."""

    tasks: tuple[TaskTable, ...]
    n_tests: int
    """Tests that Holm's correction covers: those of one task's table, of the largest where tables differ."""
    n_boot: int
    """Resamples behind the intervals of values."""
    n_paired: int
    """Resamples behind differences and their p-values: more, because Holm multiplies these."""
    seed: int

    @property
    def subject(self) -> str:
        return subject_of(self.methods) or SUBJECTS[0]

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(method for task in self.tasks for method in task.metrics))


def may_rank(metric: str, n_questions: int) -> bool:
    """Whether a metric may rank methods on this many questions: the ECEs need many, the others do not."""
    return metric_named(metric).kind != "gap" or n_questions >= ENOUGH


@dataclass(frozen=True, slots=True)
class Scope:
    """What the tables of a run hold beyond its methods."""

    columns: tuple[str, ...]
    """The metrics in which methods are compared."""
    pairs: Pairs


def results_table(run: Run, *, scope: Scope | None = None, n_boot: int = 1000, seed: int = 0) -> ResultsTable:
    """Evaluate a run: the slow step of a report, done once and handed to every renderer. The scope is by default the run's."""
    scope, evaluations = scope or scope_of(run), in_order(run)
    families = [
        len(scope.pairs(e.predictions)) * sum(may_rank(m, len(e.questions)) for m in columns_of(e, scope))
        for e in evaluations
    ]
    n_tests = max(families, default=0)
    # a bootstrap p-value is at least 2 / (resamples + 1), and Holm multiplies the smallest by the number of tests
    n_paired = max(2 * n_boot, RESAMPLES_PER_TEST * n_tests)
    metrics = [{k: measure(p, n_boot=n_boot, seed=seed) for k, p in e.predictions.items()} for e in evaluations]
    drafts = [draft_table(e, m, scope, n_boot=n_paired, seed=seed) for e, m in zip(evaluations, metrics, strict=True)]
    tasks = tuple(replace(with_p(task, iter(holm(p_values))), title=run.titles[task.name]) for task, p_values in drafts)
    return ResultsTable(tasks, n_tests, n_boot, n_paired, seed)


def columns_of(evaluation: Evaluation, scope: Scope) -> tuple[str, ...]:
    """Return the metrics in which methods are compared on a test set: soft answers and scores have more."""
    first = next(iter(evaluation.predictions.values()))
    return (*scope.columns, *(name for name in metrics_for(first) if name in MORE))


def in_order(run: Run) -> list[Evaluation]:
    """Return the held-out tasks before the transfer tasks: the order of everything in a report."""
    return sorted(run.evaluations, key=lambda evaluation: not evaluation.trained_on)


def subject_of(methods: Iterable[str]) -> str | None:
    """Return the method that a table is about, or None where there is no lens in it.

    A lens that is tempered answers with that row, under whatever name it stands beside others.
    """
    known = list(methods)
    lenses = [m for m in (*SUBJECTS, *known) if m in known and m not in UNSTEERED and not m.startswith(OF_ANOTHER)]
    first = lenses[0] if lenses else None
    return tempered if (tempered := f"{first} tempered") in known else first


def temperature_of(lens: str) -> str:
    """Return the row of temperature scaling on the questions that the lens of a row was fitted on."""
    return f"{OF_ANOTHER}{lens})"


def with_controls(methods: Iterable[str]) -> list[tuple[str, str]]:
    """Compare the lens that a table is about with each control: nothing where the run has no lens."""
    known = list(methods)
    subject = subject_of(known)
    return [(subject, c) for c in CONTROLS if c in known and c != subject] if subject else []


def with_base(methods: Iterable[str]) -> list[tuple[str, str]]:
    """Compare every method with the unsteered model, and the lens that a table is about with the other controls too."""
    known = list(methods)
    everyone = [(m, "base") for m in known if m != "base" and "base" in known]
    return [*everyone, *(pair for pair in with_controls(known) if pair not in everyone)]


ABOUT_ONE = Scope(COLUMNS, with_controls)
"""The report of a run."""
ABOUT_ALL = Scope((*COLUMNS, *TOP_1), with_base)
"""The tables of a study."""


def scope_of(run: Run) -> Scope:
    """Return what the tables of a run hold, whoever makes them: those of a study's run must serve the study's own."""
    return ABOUT_ALL if "study" in run.provenance else ABOUT_ONE


def draft_table(
    evaluation: Evaluation, metrics: dict[str, Metrics], scope: Scope, *, n_boot: int, seed: int
) -> tuple[TaskTable, list[float]]:
    """Return a task's table before correction, and its p-values in the order of comparisons and columns."""
    predictions, n_questions = evaluation.predictions, len(evaluation.questions)
    columns = columns_of(evaluation, scope)
    draws = resampled(predictions, columns, n_boot=n_boot, seed=seed)

    def pair(a: str, b: str, metric: str) -> Difference:
        return draws[a][metric].minus(draws[b][metric], kind=metric_named(metric).kind)

    comparisons = tuple(Comparison(a, b, {m: pair(a, b, m) for m in columns}, {}) for a, b in scope.pairs(predictions))
    best = {m: leaders(m, metrics, pair) if may_rank(m, n_questions) else frozenset[str]() for m in columns}
    table = TaskTable(evaluation.name, evaluation.name, evaluation.trained_on, n_questions, metrics, comparisons, best)
    return table, [p_value(c, m, predictions) for c in comparisons for m in columns if table.ranks(m)]


def p_value(comparison: Comparison, metric: str, predictions: Mapping[str, Predictions]) -> float:
    """Return the uncorrected p-value: McNemar's for accuracy, the paired bootstrap's for the rest and for groups."""
    ours = predictions[comparison.method]
    if metric == "accuracy" and not ours.groups:
        return mcnemar(ours, predictions[comparison.against])
    return comparison.differences[metric].p_value


def with_p(task: TaskTable, corrected: Iterator[float]) -> TaskTable:
    """Fill in the corrected p-values, in the order in which `draft_table` gave them out."""
    comparisons = tuple(
        replace(c, p_values={m: next(corrected) for m in c.differences if task.ranks(m)}) for c in task.comparisons
    )
    best = {m: methods if confirmed(m, methods, comparisons) else frozenset[str]() for m, methods in task.best.items()}
    return replace(task, comparisons=comparisons, best=best)


def confirmed(metric: str, methods: frozenset[str], comparisons: Sequence[Comparison]) -> bool:
    """Whether every corrected test between a leader and another method agrees that the leader is better."""
    telling = [c for c in comparisons if (c.method in methods) != (c.against in methods)]
    return all(c.verdict(metric) == (1 if c.method in methods else -1) for c in telling)


def leaders(metric: str, metrics: Mapping[str, Metrics], pair: Pair) -> frozenset[str]:
    """Return the best methods of a column, or none where the best does not clearly lead all that are not its equals.

    Equals are common: temperature changes no answer, so it has the accuracy of the base to the last digit.
    """
    sign = 1.0 if metric_named(metric).higher_is_better else -1.0
    values = {method: sign * m.scores[metric].value for method, m in metrics.items()}
    top = max(values, key=lambda method: values[method])
    equals = frozenset(method for method, value in values.items() if value == values[top])
    leads = [pair(top, other, metric) for other in values if other not in equals]
    clear = bool(leads) and all(d.low > 0 or d.high < 0 for d in leads)
    return equals if clear else frozenset()
