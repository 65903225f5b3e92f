"""How far a lens was from home in a run, in sentences: which questions lie far off, and what nobody has checked.

It reads a run alone; runs of lenses of earlier versions, and of lm-eval's logs, say no more than they know. Of several lenses
each is judged by itself, and named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

from coral_lens.metrics.conformal import Abstention, abstains
from coral_lens.records import FAR
from coral_lens.report.names import method_name
from coral_lens.report.runs import Evaluation, Run

UNCHECKED_OPEN = (
    "harm cannot be excluded on a task that a lens was not fitted on unless some of its questions are labelled: measure "
    "it there"
)
"""What is said of answers to open questions on a task that is not the lens's own."""
UNCHECKED = f"{UNCHECKED_OPEN}, or give thirty of them to `coral adapt`"
"""What is said of answers on a task that is not the lens's own."""
EVERYWHERE = "This lens is believed on every task as on its own."
"""What is said before that of a lens that has no trust of its own, such as the paper's."""
SIDE_BY_SIDE = "side by side"
"""Where the provenance of a run of several lenses says of each what `Reach` knows."""


@runtime_checkable
class Trusted(Protocol):
    """An answer that knows how far a lens was believed."""

    @property
    def trust(self) -> float | None:
        """The weight of the lens; None where it is believed everywhere."""

    @property
    def home(self) -> bool:
        """Whether the question is of a task that the lens was fitted on."""


def unchecked(answers: Iterable[Trusted], what: str = UNCHECKED) -> str:
    """Return the sentence about tasks that are not the lens's own where some answers are of such, else nothing.

    Trap: a lens without trust is believed everywhere, and says so; its answers have no weight that could be low.
    """
    away = [answer.trust for answer in answers if not answer.home]
    return unchecked_sentence(what, everywhere=None in away) if away else ""


def unchecked_sentence(what: str = UNCHECKED, *, everywhere: bool) -> str:
    """Return the sentence about tasks that are not the lens's own, for a lens that is believed everywhere or is not."""
    sentence = f"{what[0].upper()}{what[1:]}."
    return f"{EVERYWHERE} {sentence}" if everywhere else sentence


# --------------------------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Reach:
    """What is known of one lens of a run."""

    row: str = ""
    """Its row in tables; empty where it is the only lens."""
    trusts: bool = True
    """Whether it is believed less away from home."""
    adapted: bool = False
    """Whether labels of the task were given to it."""
    answers: Mapping[str, bool] | None = None
    """By training task, and under the empty name for any other: whether the answer may be the lens's."""
    labels: int = 0
    """How many labels of the task decided that; 0 where held-out training questions did."""
    home: Sequence[str] = ()
    """The test sets that are of its own tasks."""

    def to_json(self) -> dict[str, Any]:
        """Return it as a record."""
        return asdict(self)

    @property
    def who(self) -> str:
        """How a sentence about it begins."""
        return f"{method_name(self.row)}: " if self.row else ""


def reach_of(lens: Mapping[str, Any], home: Sequence[str], row: str = "") -> Reach:
    """Return what the record of a lens says."""
    trust, adaptation = lens.get("trust") or {}, lens.get("adaptation") or {}
    judged = adaptation.get("answers") or {}
    return Reach(row, bool(trust), bool(adaptation), trust.get("answers"), judged.get("questions", 0), tuple(home))


def reaches_of(run: Run) -> list[Reach]:
    """Return what is known of each lens of a run; nothing where it has none, or is of one that says nothing of its kind."""
    if several := run.provenance.get(SIDE_BY_SIDE):
        return [Reach(**record) for record in several]
    return (
        [reach_of(run.lens, [e.name for e in run.evaluations if e.trained_on])] if run.lens.keys() - {"model"} else []
    )


def reach_notes(run: Run) -> list[str]:
    """Return a sentence for each test set that a lens saw: how many questions are far from home, and how many abstained."""
    notes = [note for e in run.evaluations if (note := reach_note(run, e))]
    reaches = reaches_of(run)
    notes += [note for reach in reaches if (note := away_note(run, reach))]
    return [*notes, *(note for reach in reaches if (note := kept_note(reach)))]


def away_note(run: Run, reach: Reach) -> str:
    """Say what nobody has checked where a lens was on tasks that are not its own."""
    away = [run.titles[e.name] for e in run.evaluations if e.view and e.name not in reach.home]
    if not away or reach.adapted:
        return ""
    believed = "" if reach.trusts else ", and believed there as on its own tasks"
    said = f"Not fitted on {', '.join(away)}{believed}: {UNCHECKED}."
    return f"{reach.who}{said[0].lower()}{said[1:]}" if reach.who else said


def kept_note(reach: Reach) -> str:
    """Say where the answers are the model's own, because the lens was not found to answer better."""
    answers = reach.answers or {}
    usual, named = answers.get("", True), [name for name, used in answers.items() if name and not used]
    if usual and not named:
        return ""
    others = [name for name, used in answers.items() if name and used]
    where = f"on {', '.join(named)}" if usual else f"but on {', '.join(others)}" if others else ""
    kept = " ".join(["The answers are the model's own", where]).strip()
    seen = f"the {reach.labels} labelled questions of the task" if reach.labels else "held-out training questions"
    return f"{reach.who}{kept}: on {seen} the lens did not answer better. Its confidence is used."


def reach_note(run: Run, evaluation: Evaluation) -> str:
    """Return how many questions of a test set are far from home and how many the lens would abstain on."""
    view, n = evaluation.view, len(evaluation.questions)
    if view is None:
        return ""
    found = [f"{(view.shift >= FAR).sum():,} of {n:,} questions are far from those that the lens was fitted on"]
    if record := run.lens.get("abstention"):
        row = evaluation.predictions[view.method]
        unsure = abstains(Abstention.from_dict(record), row.options.max(row.probs))
        found.append(f"{unsure.sum():,} are too uncertain to answer")
    which = f" ({method_name(view.method)})" if SIDE_BY_SIDE in run.provenance else ""
    return f"{run.titles[evaluation.name]}{which}: {', and '.join(found)}."
