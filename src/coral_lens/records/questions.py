"""A question with options, and what becomes of it on its way to the model: the strings, and the tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Bool, Float, Int

from coral_lens.errors import CoralError
from coral_lens.records.texts import Wording, take_apart

UNKNOWN = -1
"""The answer of a question that has no label: it can be predicted, but not learned from or scored."""
UNNAMED = "questions"
"""The task of a question that names none, such as one of a user's file: two such need not be of one kind."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The exact strings that are tokenised: what lm-eval would send as requests, one per option."""

    contexts: tuple[str, ...]
    """One context per option. All equal, but for tasks such as Winogrande that put the option into the context."""
    continuations: tuple[str, ...]
    """The scored string of each option, with its leading delimiter."""
    choices: tuple[str, ...]
    """The scored string as lm-eval counts its length (`acc_norm`): without the delimiter."""
    chat: bool = False


NONE = "none of these"
"""The last option of a question whose options the model wrote itself: that it is none of them."""


class Columns(dict[str, Sequence[Any]]):
    """The columns of a table, or of a part of it, by their names."""

    hidden: frozenset[str] = frozenset()
    """Those that say the answers."""
    file: str = ""
    """The file that they were read from, if they were read from one."""


Kind = Literal["choice", "yes-no", "score"]
"""What kind of decision a question is: one of several options; a statement that is true or not, of which the second option is
"true"; one of several levels in their order. All three are options with probabilities: a kind changes no prompt and no score."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Question:
    """One question with options to choose from: of a benchmark task, of a user's file, or a decision."""

    id: str
    group: str
    """The unit that must not be split between training and test: an article, or the question itself."""
    text: str
    """What is asked, for people and for the prompt styles."""
    options: tuple[str, ...]
    answer: int = UNKNOWN
    """Index of the correct option, or UNKNOWN. Of several right ones the first, of a soft answer the likeliest."""
    passage: str = ""
    """Text to read before the question, such as the state that several decisions are about; empty if there is none."""
    task: str = UNNAMED
    version: str = ""
    split: str = ""
    rendered: Rendered | None = None
    """Set where the task brings its own template; otherwise the prompt is made from text and options by a Style."""
    instructions: str = ""
    """How to decide, where that is said apart from what is asked."""
    descriptions: tuple[str, ...] = ()
    """What each option means, in their order; empty where no option has a description."""
    kind: Kind = "choice"
    right: tuple[int, ...] = ()
    """All right options in their order, where there are several; empty where there is one."""
    soft: tuple[float, ...] = ()
    """The share of each option, where the answer is a distribution, such as that of annotators who disagree; else empty."""
    counts: tuple[int, ...] = ()
    """Where the options are candidates that the model wrote itself: how often it wrote each. The last option is then `NONE`, and
    its count is of what was written and is no candidate. Empty where the options were given."""
    shots: tuple[Question, ...] = field(default=(), compare=False, repr=False)
    """Worked examples that a Style puts before it."""
    table: Mapping[str, Sequence[Any]] | None = field(default=None, compare=False, repr=False)
    """The columns of the table that it comes from, or of a part of it."""
    row: int = field(default=0, compare=False, repr=False)
    """Its place in them; see `columns`."""

    @cached_property
    def wording(self) -> Wording:
        """Its text taken apart, once."""
        return take_apart(self.text, self.options)

    @property
    def is_open(self) -> bool:
        """Whether it came without options, and those that it has were written by the model."""
        return bool(self.counts)

    @property
    def is_soft(self) -> bool:
        """Whether its answer is more than one option."""
        return bool(self.soft or self.right)

    @property
    def target(self) -> tuple[float, ...]:
        """The distribution that is to be predicted: all of it on the answer, unless several are right or the answer is soft."""
        assert self.answer != UNKNOWN, "an unlabelled question has no target"
        right = self.right or (self.answer,)
        return self.soft or tuple(1.0 / len(right) if j in right else 0.0 for j in range(len(self.options)))

    @property
    def visible_columns(self) -> dict[str, Any]:
        """The row without what says the answer: what a template may show."""
        hidden = getattr(self.table, "hidden", ())
        return {name: value for name, value in self.columns.items() if name not in hidden}

    @property
    def columns(self) -> dict[str, Any]:
        """The row of the table that it comes from, which comes back beside its answer; empty where it comes from none."""
        return {name: values[self.row] for name, values in (self.table or {}).items()}

    def __post_init__(self) -> None:
        where, n = f"Question {self.id!r}", len(self.options)
        if n < 2:
            found = f"{n} option(s)" if self.options else "no options"
            raise CoralError(f"{where} has {found}; a multiple-choice question needs at least two.")
        for j, option in enumerate(self.options):
            if not option.strip():
                raise CoralError(f"{where} has an empty option (number {j + 1}); give it a text or remove it.")
        if not (self.answer == UNKNOWN or 0 <= self.answer < n):
            raise CoralError(f"{where} has answer {self.answer}, but its options are numbered 0 to {n - 1}.")
        assert len(self.counts) in (0, n), "a count for each option, or none"
        if self.kind != "choice" or self.descriptions:
            self._check_decision(where)
        if self.is_soft:
            self._settle_target(where)

    def _check_decision(self, where: str) -> None:
        if self.kind not in KINDS:
            raise CoralError(f"{where} is of the unknown kind {self.kind!r}; use one of {', '.join(KINDS)}.")
        if self.kind == "yes-no" and len(self.options) != 2:
            raise CoralError(f"{where} is a yes-no question with {len(self.options)} options; give no and yes.")
        if len(self.descriptions) not in (0, len(self.options)):
            raise CoralError(
                f"{where} has {len(self.descriptions)} descriptions for {len(self.options)} options; give one for each, which "
                "may be empty."
            )

    def _settle_target(self, where: str) -> None:
        """Check a soft answer or several right ones, and name the likeliest; all of it on one option is a plain answer."""
        n = len(self.options)
        if self.soft and self.right:
            raise CoralError(f"{where} has both a soft answer and several right options; give one of them.")
        if self.soft and (len(self.soft) != n or not all(0.0 <= s <= 1.0 for s in self.soft)):
            raise CoralError(
                f"{where} has the soft answer {self.soft}; give a share from 0 to 1 for each of {n} options."
            )
        if self.soft and abs(sum(self.soft) - 1.0) > 1e-6:
            raise CoralError(f"{where} has a soft answer whose shares sum to {sum(self.soft):g}; they must sum to 1.")
        if self.right and (list(self.right) != sorted(set(self.right)) or not 0 <= self.right[0] <= self.right[-1] < n):
            raise CoralError(f"{where} has the right options {self.right}; give different numbers from 0 to {n - 1}.")
        likeliest = self.soft.index(max(self.soft)) if self.soft else self.right[0]
        if self.answer not in (UNKNOWN, likeliest):
            raise CoralError(f"{where} has answer {self.answer}, but its soft answer is likeliest {likeliest}.")
        object.__setattr__(self, "answer", likeliest)
        if len(self.right) == 1:
            object.__setattr__(self, "right", ())
        if self.soft and self.soft[likeliest] == 1.0:
            object.__setattr__(self, "soft", ())


KEPT = ("id", "group", "text", "options", "answer", "passage", "task", "version", "split")
"""What is always kept of a question on the disk."""
KEPT_IF_SET = ("instructions", "descriptions", "kind", "right", "soft", "counts")
"""What is kept of it where it is not the default: the records, and therefore the digests, of other questions never change."""


def question_record(question: Question) -> dict[str, Any]:
    """Return what is kept of a question: neither its prompt nor its worked examples nor the row that it comes from."""
    record = {name: getattr(question, name) for name in KEPT}
    others = {name: getattr(question, name) for name in KEPT_IF_SET}
    return record | {name: value for name, value in others.items() if value != getattr(Question, name)}


def question_from(record: Mapping[str, Any]) -> Question:
    """Return the question of a record; what it does not say is the default."""
    values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in record.items()}
    return Question(**values)


class CheckedQuestion:
    """A question of values that were checked before: once made, it is a `Question`, and was not checked again.

    A file may have a hundred thousand of them, and a frozen record with checks takes ten times as long to make.
    """

    def __init__(
        self, id: str, group: str, text: str, options: tuple[str, ...], answer: int, table: Any, row: int
    ) -> None:
        self.id, self.group, self.text, self.options = id, group, text, options
        self.answer, self.table, self.row = answer, table, row
        self.__class__ = Question  # type: ignore[assignment]


def checked_questions(columns: Mapping[str, Sequence[Any]]) -> list[Question]:
    """Return the questions that `Question(...)` would make of columns of values, for values that were checked before."""
    first = ("id", "group", "text", "options", "answer", "table", "row")
    questions: list[Any] = list(map(CheckedQuestion, *(columns[name] for name in first)))
    for name in columns.keys() - set(first):
        deque(map(object.__setattr__, questions, repeat(name), columns[name]), maxlen=0)
    return questions


def targets_of(questions: Sequence[Question]) -> Float[np.ndarray, " row"] | None:
    """Return the targets of the options of all questions, or None where each has one right option, or none that is known."""
    if not any(q.is_soft for q in questions):
        return None
    nothing = [(0.0,) * len(q.options) if q.answer == UNKNOWN else q.target for q in questions]
    return np.array([share for target in nothing for share in target])


def counts_of(questions: Sequence[Question]) -> Int[np.ndarray, " row"] | None:
    """Return how often the options of all questions were written, or None where any question came with its options."""
    if not questions or not all(q.is_open for q in questions):
        return None
    return np.array([count for q in questions for count in q.counts], dtype=np.int64)


TASKS_OF_FAMILY = 3
"""So many tasks of one family (`mmlu_anatomy`, `mmlu_virology`, ...) or more are taken together, in analyses and reports."""


def task_family(task: str) -> str:
    """Return the family of a task: the first word of its name."""
    return task.split("_")[0]


def groups_of(questions: Sequence[Question]) -> tuple[str, ...]:
    """Return the group of each question, or nothing where each stands by itself."""
    groups = tuple(q.group for q in questions)
    return groups if len(set(groups)) < len(groups) else ()


def ordered_of(questions: Sequence[Question]) -> Bool[np.ndarray, " question"] | None:
    """Return which questions are scores, or None where none is."""
    ordered = np.array([q.kind == "score" for q in questions], dtype=bool)
    return ordered if ordered.any() else None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question as token ids: for each option its context and its own tokens.

    Contexts of one question are nearly always the same tuple; they differ where a prompt is cut on the left to fit the
    model (the cut depends on the option's length) and where the task puts the option into the context.
    """

    id: str
    contexts: tuple[tuple[int, ...], ...]
    options: tuple[tuple[int, ...], ...]
    truncated: bool = False
    listed: tuple[tuple[int, int], ...] = ()
    """For each option, from and up to which token of its context its text stands listed; empty where none is, or where nobody
    has asked (see `engine.listings`)."""
