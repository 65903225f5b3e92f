"""The ablation of many features on many questions, batch by batch in a folder that a killed run goes on with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from coral_lens.engine import Prefixes, score_batch
from coral_lens.errors import CoralError
from coral_lens.layout import PlannedBatch, lay_out, plan_for
from coral_lens.prompts import Prepared, prepare
from coral_lens.records import OptionTable, Question, Style, groups_of, offsets_of
from coral_lens.sae.ablation import Ablating, Reconstruction, ablate_batch
from coral_lens.sae.codes import sae_digest
from coral_lens.sae.effects import AblationScores
from coral_lens.shards import Journal, locked, open_manifest, read_tensor, shard_path, thread_count
from coral_lens.store import Extraction, Progress, describe, settled

if TYPE_CHECKING:
    from coral_lens.layout import Packing
    from coral_lens.models import Model


def run_ablation(
    model: Model,
    questions: Sequence[Question],
    folder: Path,
    *,
    what: tuple[Ablating, Style],
    progress: Progress | None = None,
) -> AblationScores:
    """Ablate features on questions, going on where an earlier run was stopped."""
    ablating, style = what
    ablating.sae.check(model)
    how = settled(model, folder, Extraction(layers=(ablating.sae.layer,), style=style))
    asked = prepare(questions, style, model)
    assert how.packing is not None
    assert how.token_budget is not None
    plan = plan_for(asked.prompts, token_budget=how.token_budget, packing=how.packing, border=model.rope_border)
    with locked(folder):
        wanted = describe(model, asked, how) | {
            "sae": sae_digest(ablating.sae),
            "features": ablating.features.tolist(),
            "where": ablating.where,
            "keep_error": ablating.keep_error,
        }
        manifest = open_manifest(folder, wanted)
        journal = Journal(folder)
        journal.drop_damaged()
        if progress:
            progress(sum(len(plan.batches[i].questions) for i in journal.entries))
        with thread_count(manifest["threads"]):
            for i, planned in enumerate(plan.batches):
                if i not in journal.entries:
                    journal.add(i, ablate_planned(model, asked, planned, plan.packing, ablating))
                    if progress:
                        progress(len(planned.questions))
        journal.finish(len(plan.batches))
    return read_scores(folder, asked, journal, ablating.features.numpy())


def ablate_planned(
    model: Model, asked: Prepared, planned: PlannedBatch, packing: Packing, ablating: Ablating
) -> dict[str, Tensor]:
    """Return the scores of one batch: unpatched, reconstructed, ablated."""
    batch = lay_out(asked.prompts, planned, packing=packing)
    found = ablate_batch(model, batch, ablating, prefixes=Prefixes(model, [Reconstruction(ablating)]))
    return {
        "question": torch.tensor(batch.questions),
        "base": score_batch(model, batch).logprobs,
        "reconstructed": found.reconstructed,
        # one row per option, so that questions can be put into their order
        "ablated": found.logprobs.T.contiguous(),
    }


def read_scores(
    folder: Path, asked: Prepared, journal: Journal, features: Int[np.ndarray, " feature"]
) -> AblationScores:
    """Return the scores of all batches in the order of the questions."""
    offsets = offsets_of([len(p.options) for p in asked.prompts])
    n_rows, n_features = int(offsets[-1]), len(features)
    columns = {"base": np.zeros(n_rows), "reconstructed": np.zeros(n_rows), "ablated": np.zeros((n_rows, n_features))}
    for shard, digests in journal.entries.items():
        path = shard_path(folder, shard)
        read = {name: read_tensor(path, name, wanted) for name, wanted in digests.items()}
        if any(t is None for t in read.values()):
            raise CoralError(f"{path} is damaged; run the same command again and only this shard is computed anew.")
        order = np.asarray(read["question"])
        rows = np.concatenate([np.arange(offsets[q], offsets[q + 1]) for q in order])
        for name, column in columns.items():
            column[rows] = np.asarray(read[name])
    lengths = {
        "n_tokens": [len(o) for p in asked.prompts for o in p.options],
        "n_chars": [len(c) for r in asked.rendered for c in r.choices],
        "n_bytes": [len(c.encode()) for r in asked.rendered for c in r.choices],
    }
    table = OptionTable(
        logprobs=columns["base"],
        **{name: np.array(values, dtype=np.int64) for name, values in lengths.items()},
        offsets=offsets,
        answers=np.array([q.answer for q in asked.questions], dtype=np.int64),
    )
    return AblationScores(
        ids=tuple(q.id for q in asked.questions),
        table=table,
        reconstructed=columns["reconstructed"],
        ablated=np.ascontiguousarray(columns["ablated"].T),
        features=features,
        groups=groups_of(asked.questions),
    )
