"""The types that travel along the line: Question, Prompt, OptionTable, Predictions. They hold data and never compute scores."""

from __future__ import annotations

import re
import string
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

from coral_lens.errors import CoralError
from coral_lens.ragged import Options

UNKNOWN = -1
"""The answer of a question that has no label: it can be predicted, but not learned from or scored."""
UNNAMED = "questions"
"""The task of a question that names none, such as one of a user's file: two such need not be of one kind."""
FAR = 1.5
"""The shift from which a question counts as far: of held-out questions of the training tasks, nine in ten are nearer."""


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


@dataclass(frozen=True, slots=True)
class Wording:
    """A question's text taken apart: what is asked, the options that it lists under letters, and what a template puts around."""

    label: str
    """What stands before the question, such as `Question: `; mostly nothing in a file."""
    stem: str
    """What is asked."""
    listed: tuple[str, ...]
    """The options as they are listed, without their letters; empty where the text lists none."""
    mark: str
    """What follows a letter of the list: `. ` or `) `."""
    ending: str
    """What comes last, from its line break on, such as that of `Answer:`."""

    @property
    def text(self) -> str:
        """The whole text, put together again."""
        return self.label + self.body + self.ending

    @property
    def body(self) -> str:
        """The stem and the list."""
        lines = [
            f"{letter}{self.mark}{text}" for letter, text in zip(string.ascii_uppercase, self.listed, strict=False)
        ]
        return "\n".join([self.stem, *lines])

    @property
    def bare(self) -> str:
        """The text without its label and without a cue for an answer."""
        return without_cue(self.body + self.ending)


LABEL = re.compile(r"(?:Question|Q):\s*")
CUES = ("Answer", "A")
"""What asks for an answer at the end of a text, on a line of its own and before a colon."""
LISTED = re.compile(r"\n(?=([A-Z])([.)]\s{1,32}))")
"""Where a line begins like one of a list under letters: its letter, and the mark after it."""


def take_apart(text: str, options: Sequence[str]) -> Wording:
    """Return the parts of a question's text; a list is looked for where the options are its letters."""
    cue = cue_of(text)
    body = text.removesuffix(cue)
    stem, mark, listed = listed_parts(body, options) or (body, "", ())
    label = match[0] if (match := LABEL.match(stem)) else ""
    if listed and not cue:  # the last line may ask for an answer in other words
        last, newline, line = listed[-1].rpartition("\n")
        listed, cue = (*listed[:-1], last if newline else line), newline and newline + line
    return Wording(label, stem.removeprefix(label), listed, mark, cue)


def cue_of(text: str) -> str:
    """Return what asks for an answer at the end of a text, from its line break on; empty where nothing does.

    Trap: strangers' texts come here. A pattern would look at a long run of line breaks once from each of them.
    """
    asked = text.rstrip()
    word = asked.removesuffix(":").rstrip() if asked.endswith(":") else ""
    for cue in CUES:
        before = word.removesuffix(cue)
        space = before[len(before.rstrip()) :]
        if before != word and "\n" in space:
            return text[len(before) - len(space) + space.index("\n") :]
    return ""


def without_cue(text: str) -> str:
    """Return a text without what asks for an answer at its end."""
    return text.removesuffix(cue_of(text))


def listed_parts(text: str, options: Sequence[str]) -> tuple[str, str, tuple[str, ...]] | None:
    """Return stem, mark and listed options of a text that ends in a list under the letters that are its options.

    Trap: strangers' texts come here. A pattern of the whole list would try every line under A with every line under B and so on.
    """
    letters = string.ascii_uppercase[: len(options)]
    if [option.strip() for option in options] != list(letters):
        return None
    # the stem is as long as possible, since a question may quote a list of its own; then the mark is
    found = max(
        ((starts[0], len(mark), starts) for mark, lines in lines_by_mark(text, letters).items()
         if (starts := last_list(lines, width=2 + len(mark)))), default=None,
    )  # fmt: skip
    if found is None:
        return None
    first, n_mark, starts = found
    width = 2 + n_mark
    ends = (*starts[1:], len(text))
    listed = tuple(text[start + width : end] for start, end in zip(starts, ends, strict=True))
    return text[:first], text[first + 2 : first + width], listed


def lines_by_mark(text: str, letters: str) -> dict[str, list[list[int]]]:
    """Return for every mark that may follow a letter, and then for each letter, where its lines begin."""
    found: dict[str, list[list[int]]] = {}
    for match in LISTED.finditer(text):
        letter, longest = match.groups()
        if letter not in letters:
            continue
        for n in range(2, len(longest) + 1):  # the text of an option may begin with space of its own
            lines = found.setdefault(longest[:n], [[] for _ in letters])
            lines[letters.index(letter)].append(match.start())
    return found


def last_list(lines: Sequence[Sequence[int]], *, width: int) -> tuple[int, ...]:
    """Return where the lines of the last list begin: it has all letters in their order, each as early as the first one allows.

    `width`: how long a line is up to the text of its option. Nothing is returned where there is no such list.
    """
    latest = lines[-1][-1] if lines[-1] else -1
    for earlier in reversed(lines[:-1]):
        n = bisect_right(earlier, latest - width)
        latest = earlier[n - 1] if n else -width
    starts = [latest]
    if latest < 0:
        return ()
    for later in lines[1:]:
        starts.append(later[bisect_left(later, starts[-1] + width)])
    return tuple(starts)


NONE = "none of these"
"""The last option of a question whose options the model wrote itself: that it is none of them."""


class Columns(dict[str, Sequence[Any]]):
    """The columns of a table, or of a part of it, by their names."""

    hidden: frozenset[str] = frozenset()
    """Those that say the answers."""


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


@dataclass(frozen=True, slots=True)
class OptionTable:
    """Ragged scores, one row per (question, option); question i owns rows offsets[i] to offsets[i + 1], see `options`."""

    logprobs: Float[np.ndarray, " row"]
    """Summed log-probability of the option's tokens given the context."""
    n_tokens: Int[np.ndarray, " row"]
    n_chars: Int[np.ndarray, " row"]
    n_bytes: Int[np.ndarray, " row"]
    offsets: Int[np.ndarray, " edge"]
    answers: Int[np.ndarray, " question"]
    """Index of the correct option within its question, or UNKNOWN."""
    targets: Float[np.ndarray, " row"] | None = None
    """The share of each option where answers are soft or several are right; None: all of it is on the answer."""
    neutral: Float[np.ndarray, " row"] | None = None
    """Summed log-probability of the option's tokens after a context that says nothing of the question, if it was scored."""
    counts: Int[np.ndarray, " row"] | None = None
    """How often the model wrote each option, where the options of all questions are its own; None where they were given."""

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def options(self) -> Options:
        """The options of each question, side by side."""
        return Options(self.offsets)


@dataclass(frozen=True, slots=True)
class Predictions:
    """What every method ends in: one distribution over the options of each question."""

    method: str
    model: str
    task: str
    split: str
    ids: tuple[str, ...]
    answers: Int[np.ndarray, " question"]
    offsets: Int[np.ndarray, " edge"]
    probs: Float[np.ndarray, " row"]
    groups: tuple[str, ...] = ()
    """What the questions belong to that are not independent (RACE's articles), see `groups_of`; empty if all are."""
    targets: Float[np.ndarray, " row"] | None = None
    """The share of each option where answers are soft or several are right; None: all of it is on the answer."""
    ordered: Bool[np.ndarray, " question"] | None = None
    """Which questions are scores, whose options are levels in their order; None: no question is."""

    def __post_init__(self) -> None:
        assert self.targets is None or len(self.targets) == len(self.probs), "a target for each row, or none"
        assert self.ordered is None or len(self.ordered) == len(self.ids), "one mark per question, or none"
        assert len(self.groups) in (0, len(self.ids)), "one group per question, or none"
        assert self.offsets[0] == 0, "offsets must start at 0"
        assert self.offsets[-1] == len(self.probs), "offsets must end at the number of rows"
        assert len(self.offsets) == len(self.answers) + 1 == len(self.ids) + 1, "one answer and one id per question"
        assert np.isfinite(self.probs).all(), "probabilities must be finite"
        assert np.allclose(self.options.sum(self.probs), 1.0, atol=1e-6), (
            "probabilities must sum to 1 over each question"
        )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def options(self) -> Options:
        """The options of each question, side by side."""
        return Options(self.offsets)

    def take(self, questions: Bool[np.ndarray, " question"] | Int[np.ndarray, " chosen"]) -> Predictions:
        """Return the predictions of some questions alone, by a mask or by numbers in the order asked for."""
        numbers = np.flatnonzero(questions) if questions.dtype == np.bool_ else questions
        rows = self.options.rows_of(numbers)
        return replace(
            self,
            ids=tuple(self.ids[i] for i in numbers),
            answers=self.answers[numbers],
            offsets=self.options.take(numbers).edges,
            probs=self.probs[rows],
            groups=tuple(self.groups[i] for i in numbers) if self.groups else (),
            targets=None if self.targets is None else self.targets[rows],
            ordered=None if self.ordered is None else self.ordered[numbers],
        )

    def renamed(self, method: str) -> Predictions:
        """Return the same predictions under another method name."""
        return replace(self, method=method)


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


@runtime_checkable
class Scored(Protocol):
    """Questions that a model has scored, with their states: a store, or several joined."""

    @property
    def manifest(self) -> dict[str, Any]:
        """Model, digest of the questions, and whatever else says where the states come from."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that can be read."""

    @property
    def questions(self) -> Sequence[Question]:
        """The questions in order."""

    @property
    def table(self) -> OptionTable:
        """Their scores."""

    def layer(self, layer: int, place: str = "answer") -> Float[np.ndarray, "row width"]:
        """Return one layer's pooled states, read at the options' own tokens or at another place (`engine.settings`)."""


def predictions_of(method: str, scored: Scored, probs: Float[np.ndarray, " row"]) -> Predictions:
    """Return probabilities of the options of scored questions as Predictions."""
    questions, table = scored.questions, scored.table
    return Predictions(
        method=method,
        model=scored.manifest["model"]["name"],
        task=questions[0].task,
        split=questions[0].split,
        ids=tuple(q.id for q in questions),
        answers=table.answers,
        offsets=table.offsets,
        probs=probs,
        groups=groups_of(questions),
        targets=table.targets,
        ordered=ordered_of(questions),
    )
