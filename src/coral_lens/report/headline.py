"""What a run found, in sentences, and each task at a glance: gains, losses and what cannot be told. Never leaves out a loss.

The page and the terminal say the same sentences. Metrics are explained where they first stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coral_lens.metrics.comparisons import Difference
from coral_lens.metrics.scores import METRICS
from coral_lens.report.names import method_name
from coral_lens.report.tables.averages import HEADLINE, Average, averages
from coral_lens.report.tables.clear import Verdict, overall
from coral_lens.report.tables.formats import interval_text, kind_of, percent
from coral_lens.report.tables.run import CONTROLS, ResultsTable, TaskTable

MEANINGS = {
    "accuracy": "how often it is right, in percent",
    "brier": "the error of all its probabilities: 0 is perfect, 200 is sure and wrong",
    "ece": "by how many points its confidence misses how often it is right",
}
"""Of each metric of a summary, what it is in words."""
ANSWERS = {
    (1, 1): "It helped",
    (1, 0): "It helped",
    (1, -1): "It gives more right answers, but its probabilities are worse",
    (0, 1): "It gives better probabilities, but not clearly more right answers",
    (0, 0): "It made no clear difference",
    (0, -1): "It made the probabilities worse",
    (-1, 1): "It gives better probabilities, but fewer right answers",
    (-1, 0): "It did harm",
    (-1, -1): "It did harm",
}
"""The first words, by what accuracy and Brier score clearly did on average: 1 is better, -1 worse, 0 not clear."""
TRUST = {
    "better": "can be trusted more than before",
    "mixed": "is better in one way and worse in another",
    "worse": "can be trusted less than before",
    "seems worse": "seems worse than before",
    "not clear": "is not clearly better or worse than before",
}
"""What is said of its confidence, by what Brier score and ECE did on average."""
PAPERS = {
    "coral": "the paper's correction (CORAL)",
    "coral ridge": "the paper's correction with a ridge probe in place of its network (CORAL ridge)",
}
"""What a sentence calls the method of the paper, whose row is only its name."""
MOST_NAMED = 4
"""More tasks than this are counted instead of named."""


def headline(table: ResultsTable) -> list[str]:
    """Say in three sentences whether steering helped, whether confidence can be trusted, and what got worse."""
    compared = [task for task in table.tasks if task.comparison("base")]
    if not compared:
        return [plain_sentence(task) for task in table.tasks[:MOST_NAMED]]
    means = averages(compared)
    return [
        help_sentence(table, compared, means["accuracy"], means["brier"]),
        trust_sentence(means),
        loss_sentence(compared),
    ]


def details(table: ResultsTable) -> list[str]:
    """Say what the first sentences leave out: the plain remedy beside the lens, and answers that were ruled out."""
    compared = [task for task in table.tasks if task.comparison("temperature")]
    return control_sentences(compared) + zero_sentences(table)


# --- did it help, can it be trusted, what got worse ---------------------------------------------------------------------


def help_sentence(table: ResultsTable, tasks: Sequence[TaskTable], accuracy: Average, brier: Average) -> str:
    """Say what became of accuracy."""
    n_questions, many = sum(task.n_questions for task in tasks), len(tasks) > 1
    answer = ANSWERS[accuracy.verdict.said, brier.verdict.said]
    where = (
        f"{len(tasks)} tasks with {n_questions:,} questions"
        if many
        else f"{n_questions:,} questions of {titled(tasks[0])}"
    )
    return (
        f"{answer}: on {where}, the model is right on {percent(accuracy.after)} % with “{method_name(table.subject)}” and on "
        f"{percent(accuracy.before)} % without{', on average' if many else ''} "
        f"({changed(accuracy)}; brackets are 95 % intervals)."
    )


def trust_sentence(means: dict[str, Average]) -> str:
    """Say what became of the probabilities, and of confidence."""
    brier, ece = means["brier"], means["ece"]
    trust = TRUST[overall((brier.verdict, ece.verdict))]
    return (
        f"Its confidence {trust}: the Brier score ({MEANINGS['brier']}) goes from {percent(brier.before)} to "
        f"{percent(brier.after)} ({changed(brier)}), and the ECE ({MEANINGS['ece']}) from {percent(ece.before)} to "
        f"{percent(ece.after)} ({changed(ece)})."
    )


def loss_sentence(tasks: Sequence[TaskTable]) -> str:
    """Name every loss that is clear, or whose interval leaves out 0."""
    parts = []
    for metric in HEADLINE:
        worse = [t for t in tasks if (v := t.verdict(metric)).sign < 0 and (v.clear or v.leans)]
        if len(worse) > MOST_NAMED:
            n_clear = sum(t.verdict(metric).clear for t in worse)
            parts.append(f"{METRICS[metric].label} on {len(worse)} of {len(tasks)} tasks ({n_clear} of them clearly)")
        else:
            parts += [f"{METRICS[metric].label} on {t.title}, {loss(t, metric)}" for t in worse]
    if not parts:
        return "Nothing got clearly worse on any task; small losses may hide in the intervals."
    return f"What got worse: {'; '.join(parts)}."


def loss(task: TaskTable, metric: str) -> str:
    """Return `11.0 → 25.1 (clearly worse)`; where there was no test, with the number of questions that were too few."""
    verdict, numbers = task.verdict(metric), arrow(*task.values(metric))
    if task.ranks(metric):
        return f"{numbers} ({verdict.words})"
    return f"{numbers} (on {task.n_questions:,} questions, too few to test an ECE, but its interval leaves out 0)"


def changed(average: Average) -> str:
    """Return `+10.9 [+8.1 to +13.6], clearly better`."""
    d = average.difference
    return f"{percent(d.value, sign=True)} [{interval_text(d.low, d.high, sign=True)}], {average.verdict.words}"


def arrow(before: float, after: float) -> str:
    """Return `28.7 → 35.3`, in one piece."""
    return f"{percent(before)} → {percent(after)}".replace(" ", "\N{NO-BREAK SPACE}")


def titled(task: TaskTable) -> str:
    """Return a task's name with its relation to the training questions."""
    return f"{task.title} ({kind_of(task)})"


def plain_sentence(task: TaskTable) -> str:
    """Describe a task on which nothing is compared."""
    parts = [
        f"{method_name(method)} has {percent(m.scores['accuracy'].value)} % accuracy and a Brier score of "
        f"{percent(m.scores['brier'].value)}"
        for method, m in task.metrics.items()
    ]
    return f"On {task.n_questions:,} questions of {task.title}, {'; '.join(parts)}."


# --- what else is to be said ----------------------------------------------------------------------------------------------


def enumerated(names: Sequence[str]) -> str:
    """Return `a`, `a and b`, or `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def control_sentences(tasks: Sequence[TaskTable]) -> list[str]:
    """Compare with temperature scaling: what a gain is worth that needs no hidden state."""
    verdicts = {task.title: task.verdict("brier", "temperature") for task in tasks}
    parts = []
    for sign, word in ((1, "clearly better"), (-1, "clearly worse"), (0, "not clearly different")):
        if names := [name for name, v in verdicts.items() if v.said == sign]:
            parts.append(f"{word} on {enumerated(names) if len(names) <= MOST_NAMED else f'{len(names)} tasks'}")
    if not parts:
        return []
    return [
        "Against plain temperature scaling, which changes no answer and reads no hidden state, its Brier score is "
        f"{enumerated(parts)}."
    ]


def zero_sentences(table: ResultsTable) -> list[str]:
    """Say how often a method ruled out the truth."""
    sentences = []
    for method in table.methods:
        n = sum(t.metrics[method].n_zero_answer for t in table.tasks if method in t.metrics)
        total = sum(t.n_questions for t in table.tasks if method in t.metrics)
        if n:
            sentences.append(
                f"On {n:,} of {total:,} questions {in_words(method, table)} gave the correct option probability 0, for "
                "which its NLL pays dearly."
            )
    return sentences


def in_words(method: str, table: ResultsTable) -> str:
    """Return what a method is for a reader who has seen no table yet; of a control, that it is one."""
    name = PAPERS.get(method, f"“{method_name(method)}”")
    is_control = method in CONTROLS and method != table.subject and table.subject in table.methods
    return f"{name}, here a control beside “{method_name(table.subject)}”," if is_control else name


# --- each task at a glance ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """A metric before and after steering on one task."""

    metric: str
    before: float
    after: float
    difference: Difference
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Glance:
    """A task at a glance."""

    name: str
    """Exact."""
    title: str
    kind: str
    n_questions: int
    changes: tuple[Change, ...]
    """Accuracy, Brier and ECE."""

    @property
    def word(self) -> str:
        """One word for all of them."""
        return overall(change.verdict for change in self.changes)


def glances(table: ResultsTable) -> list[Glance]:
    """Return each task on which the lens is compared with the unsteered model."""
    return [glance_at(task) for task in table.tasks if task.comparison("base")]


def glance_at(task: TaskTable) -> Glance:
    """Return accuracy, Brier and ECE before and after, with what may be said of them."""
    changes = (Change(m, *task.values(m), task.difference(m), task.verdict(m)) for m in HEADLINE)
    return Glance(task.name, task.title, kind_of(task), task.n_questions, tuple(changes))
