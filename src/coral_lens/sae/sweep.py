"""Score questions under many variants of an edit at one layer: blocks below it run once, those above once per variant.

Finished batches are kept, and a killed sweep goes on with the next one. A variant that changes nothing has the scores of the
unedited run, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from coral_lens.data.settings import Style
from coral_lens.engine.batches import Batch, prefix_batch
from coral_lens.engine.hooks import Edit, Site
from coral_lens.engine.planned import Extraction, plan_questions
from coral_lens.engine.rerun import capture, prefix_states, rerun
from coral_lens.errors import CoralError
from coral_lens.metrics.scores import metric_named
from coral_lens.metrics.scores import score as metric_of
from coral_lens.records import Question
from coral_lens.sae.ablate import batch_work, read_scores
from coral_lens.sae.effects import AblationScores
from coral_lens.storage.files import digest
from coral_lens.storage.progress import Progress
from coral_lens.storage.shards import Journal

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


@dataclass(frozen=True)
class Sweep:
    """Edits to compare, all of them at one layer of the residual stream."""

    layer: int
    edits: Sequence[Edit]
    about: Sequence[Any]
    """What each depends on, as JSON."""
    style: Style = Style()  # noqa: RUF009  (frozen)


def run_sweep(
    model: Model, questions: Sequence[Question], folder: Path, sweep: Sweep, *, progress: Progress | None = None
) -> AblationScores:
    """Return the scores of every variant; `progress` is told of questions that all variants are done with."""
    planned = plan_questions(model, questions, Extraction(layers=(sweep.layer,), style=sweep.style), folder=folder)
    about = {"variants": digest(list(sweep.about))}
    batch_work(planned, folder, about, lambda batch: sweep_batch(model, batch, sweep)).run(progress)
    return read_scores(Journal(folder), planned.prepared, np.arange(len(sweep.edits)))


@torch.inference_mode()
def sweep_batch(model: Model, batch: Batch, sweep: Sweep) -> dict[str, Tensor]:
    """Return the scores of a batch, unedited and under every variant."""
    site = Site("residual", sweep.layer)
    checkpoint = capture(model, batch, sweep.layer)
    shared = prefix_states(model, batch, sweep.layer) if batch.prefixes else None
    logprobs = []
    for edit in sweep.edits:
        states, prefix = edit.edit(site, checkpoint.states, batch), None
        if shared is not None:
            changed = edit.edit(site, shared, prefix_batch(batch.prefixes))
            prefix = None if torch.equal(changed, shared) else changed
        logprobs.append(rerun(model, checkpoint, states, prefix=prefix))
    return {
        "question": torch.tensor(batch.questions),
        "base": checkpoint.logprobs,
        "reconstructed": checkpoint.logprobs,
        "ablated": torch.stack(logprobs, dim=1),
    }


def scores_by(scores: AblationScores, rule: str, metrics: Sequence[str]) -> list[dict[str, float]]:
    """Return the metrics of every variant."""
    rows = [scores.predictions(logprobs, rule) for logprobs in scores.ablated]
    return [{m: metric_of(p, m) for m in metrics} for p in rows]


def best_of(values: Sequence[float], criterion: str) -> int:
    """Return the number of the best variant, the first of equals: put the one that does nothing first."""
    if np.isnan(values).any():
        raise CoralError(
            f"{criterion} does not exist on the validation questions, because all are answered right or all wrong; choose by "
            "brier, or give more questions."
        )
    return int(np.argmax(values) if metric_named(criterion).higher_is_better else np.argmin(values))
