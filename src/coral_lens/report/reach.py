"""How far a lens was from home in a run, in sentences: which questions lie far off, and what nobody has checked.

It reads a run alone; runs of lenses of earlier versions, and of lm-eval's logs, say no more than they know.
"""

from __future__ import annotations

from collections.abc import Iterable

from coral_lens.metrics.conformal import Abstention, abstains
from coral_lens.records import FAR
from coral_lens.report.runs import Evaluation, Run

UNCHECKED = (
    "harm cannot be excluded on a task that a lens was not fitted on unless some of its questions are labelled: measure it "
    "there, or give thirty of them to `coral adapt`"
)
"""What is said of answers on a task that is not the lens's own."""


def harm_note(trusts: Iterable[float | None], *, is_adapted: bool) -> str | None:
    """Return what is said of answers in some of which a lens is away from home, by its weight in each; None where it never is."""
    away = not is_adapted and any(trust is not None and trust < 1.0 for trust in trusts)
    return f"{UNCHECKED[0].upper()}{UNCHECKED[1:]}." if away else None


def reach_notes(run: Run) -> list[str]:
    """Return a sentence for each test set that a lens saw: how many questions are far from home, and how many abstained."""
    notes = [note for e in run.evaluations if (note := reach_note(run, e))]
    away = [run.titles[e.name] for e in run.evaluations if e.view and not e.trained_on]
    if away and run.lens.get("trust") and not run.lens.get("adaptation"):
        notes.append(f"Not fitted on {', '.join(away)}: {UNCHECKED}.")
    return [*notes, *kept_answers(run)]


def kept_answers(run: Run) -> list[str]:
    """Say where the answers are the model's own, because the lens did not answer held-out training questions better."""
    answers = (run.lens.get("trust") or {}).get("answers") or {}
    usual, named = answers.get("", True), [name for name, used in answers.items() if name and not used]
    if usual and not named:
        return []
    others = [name for name, used in answers.items() if name and used]
    where = f"on {', '.join(named)}" if usual else f"but on {', '.join(others)}" if others else ""
    kept = " ".join(["The answers are the model's own", where]).strip()
    return [f"{kept}: on held-out training questions the lens did not answer better. Its confidence is used."]


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
    return f"{run.titles[evaluation.name]}: {', and '.join(found)}."
