"""The questions of a run as compact data for the page's browser of questions. Chooses and packs, never formats.

Probabilities are whole thousandths, what each layer would change is one byte: a thousand questions stay below a megabyte.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from coral_lens.report.pages.examples import is_plain, shortened
from coral_lens.report.runs import Evaluation, Run
from coral_lens.report.tables.run import in_order

MOST = 1000
"""Questions in a page."""
LONGEST = 480
"""Characters of a question, and of an option, that are shown."""


def questions_data(run: Run, *, before: str, after: str, most: int = MOST) -> dict[str, Any] | None:
    """Return what the browser of questions reads; None where no task has both methods."""
    tasks = [e for e in in_order(run) if before in e.predictions and after in e.predictions]
    if not tasks:
        return None
    quotas = shares([len(e.questions) for e in tasks], most)
    rows: list[list[Any]] = []
    about, plain, titles = [], [], run.titles
    for number, (evaluation, quota) in enumerate(zip(tasks, quotas, strict=True)):
        chosen = choose_questions(evaluation, before=before, after=after, n=quota)
        rows += [packed(evaluation, int(i), (before, after), number) for i in chosen]
        plain += [int(is_plain(evaluation.questions[i])) for i in chosen]
        about.append({"name": titles[evaluation.name], "n": len(evaluation.questions), "shown": len(chosen)})
    views = [e.view for e in tasks if e.view and e.view.layers]
    return {
        "tasks": about,
        "layers": list(views[0].layers) if views else [],
        "own": list(views[0].own) if views else [],
        "questions": rows,
        "plain": plain,
    }


def shares(sizes: Sequence[int], most: int) -> list[int]:
    """Divide the places among tasks in proportion to their size; all questions where they are few enough."""
    total = sum(sizes)
    return list(sizes) if total <= most else [max(1, n * most // total) for n in sizes]


def choose_questions(evaluation: Evaluation, *, before: str, after: str, n: int) -> Int[np.ndarray, " chosen"]:
    """Return n questions in their order: first those whose answer changed, then others, each drawn at random."""
    was, now = (p.options.top(p.probs) for p in (evaluation.predictions[before], evaluation.predictions[after]))
    changed = was != now
    order = np.random.default_rng(0).permutation(len(changed))
    kept = order[np.argsort(~changed[order], kind="stable")][:n]
    return np.sort(kept)


def packed(evaluation: Evaluation, i: int, methods: tuple[str, str], task: int) -> list[Any]:
    """Return a question as a list: task, id, text, options, answer, both probabilities, shift, changes by layer."""
    question = evaluation.questions[i]
    first = evaluation.predictions[methods[0]]
    rows = first.options.of(i)
    probs = [np.rint(1000 * evaluation.predictions[m].probs[rows]).astype(int).tolist() for m in methods]
    view = evaluation.view
    shift = round(float(view.shift[i]), 2) if view else None
    text, options = shortened(question.text, limit=LONGEST), [shortened(o, limit=LONGEST) for o in question.options]
    changes = bytes_of(view.changes[:, rows]) if view else ""
    return [task, question.id, text, options, question.answer, *probs, shift, changes]


def bytes_of(changes: np.ndarray) -> str:
    """Return changes between -1 and 1 as one signed byte each, layer by layer, in base64."""
    whole = np.clip(np.rint(127 * changes), -127, 127).astype(np.int8)
    return base64.b64encode(whole.tobytes()).decode()


def script_text(data: dict[str, Any]) -> str:
    """Return data as JSON that cannot end the element it stands in, whatever a question says."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
