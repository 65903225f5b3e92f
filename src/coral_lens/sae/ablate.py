"""Take single features out of a model's states and see what that does (the paper's section 5.2), computing nothing twice.

The layer's output is replaced by its reconstruction, h_hat, and for feature j by h_hat - f_j d_j, in the model's own units.
Changes are measured against the reconstruction: its own error would swamp an effect of 1e-4. A batch runs once with the
reconstruction in place; for a feature only the blocks above the layer run again, only at positions that the change can
reach, only where the feature is active, and many features at once. Labels are not used here.

Many features are ablated on many questions batch by batch, in a folder that a killed run goes on with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coral_lens.data.leaks import question_keys
from coral_lens.data.settings import Style
from coral_lens.engine.batches import Batch, lay_out, prefix_batch
from coral_lens.engine.edits import edited_positions, replaced
from coral_lens.engine.extract import Extraction, PlannedQuestions, lengths_of, plan_questions
from coral_lens.engine.hooks import Site
from coral_lens.engine.packing import PlannedBatch
from coral_lens.engine.prompts import Prepared
from coral_lens.engine.rerun import Checkpoint, capture, prefix_states, rerun
from coral_lens.engine.scoring import PrefixCaches, score_batch
from coral_lens.lens.fit import check_questions
from coral_lens.ragged import Options
from coral_lens.records import OptionTable, Question, groups_of
from coral_lens.sae.autoencoder import CHUNK, Autoencoder
from coral_lens.sae.codes import sae_digest
from coral_lens.sae.effects import AblationScores, effects
from coral_lens.sae.folder import FeatureStudy, Selection
from coral_lens.sae.settings import AblationPlace, AblationPlan
from coral_lens.storage.files import write_json
from coral_lens.storage.progress import Bar, Progress, silent
from coral_lens.storage.resumable import Resumable
from coral_lens.storage.shards import Journal

if TYPE_CHECKING:
    from coral_lens.engine.model import Model

ENTRY_TOKENS = 4096
"""Positions, padding included, that are computed together."""
ENTRY_COLUMNS = 16_384
"""Columns, those of prefixes included, of the rows that are computed together: each brings its own states, keys and mask."""


@dataclass(frozen=True)
class Ablating:
    """What is patched."""

    sae: Autoencoder
    features: Int[Tensor, " feature"]
    """Those that are taken out, one at a time."""
    where: AblationPlace = "all"
    keep_error: bool = False
    """Keep what the reconstruction misses: the state less f_j d_j. The paper drops it."""
    style: Style = Style()  # noqa: RUF009  (frozen)
    """How the questions are asked."""


@dataclass
class Reconstruction:
    """An Edit that puts the reconstruction in place and keeps the codes of the features in question."""

    ablating: Ablating
    codes: dict[bool, Float[Tensor, "position feature"]] = field(default_factory=dict)
    """Of the last batch, and (True) of its prefixes; one row per edited position, in order."""

    @property
    def sites(self) -> tuple[Site, ...]:
        return (Site("residual", self.ablating.sae.layer),)

    def edit(self, site: Site, states: Tensor, batch: Batch) -> Tensor:
        return replaced(states, edited_positions(batch, self.ablating.where), lambda chunk: self._patch(chunk, batch))

    def _patch(self, states: Float[Tensor, "position width"], batch: Batch) -> Float[Tensor, "position width"]:
        sae, kept, patched = self.ablating.sae, [], []
        for chunk in states.split(CHUNK):
            codes = sae.encode(chunk)
            kept.append(codes[:, self.ablating.features.to(codes.device)])
            patched.append(chunk if self.ablating.keep_error else sae.rebuilt(chunk, codes))
        self.codes[not batch.n_options] = torch.cat(kept)
        return torch.cat(patched)


@dataclass(frozen=True)
class Ablated:
    """The scores of one batch."""

    batch: Batch
    reconstructed: Float[Tensor, " option"]
    """Log-probabilities with the reconstruction in place."""
    logprobs: Float[Tensor, "feature option"]
    """The same with one feature taken out; equal to the bit where it is not active."""
    n_computed: int
    """Pairs of a feature and a row that were computed."""


@torch.inference_mode()
def ablate_batch(model: Model, batch: Batch, ablating: Ablating, *, prefixes: PrefixCaches | None = None) -> Ablated:
    """Score a batch with the reconstruction, and with each feature taken out of it.

    `prefixes` may be shared by batches if it was made with a Reconstruction of the same kind.
    """
    edit = Reconstruction(ablating)
    checkpoint = capture(
        model, batch, ablating.sae.layer, edits=[edit], prefixes=prefixes or PrefixCaches(model, [edit])
    )
    logprobs = checkpoint.logprobs.repeat(len(ablating.features), 1)
    codes = spread(edit.codes.get(False), batch, ablating)
    active = (codes > 0).any(dim=1)  # [row, feature]
    n_computed = 0
    for j, prefix in changed_prefixes(model, checkpoint, ablating):
        rows = torch.arange(len(batch.input_ids))
        states = without(checkpoint, codes, rows, torch.full_like(rows, j), ablating)
        logprobs[j] = rerun(model, checkpoint, states, prefix=prefix)
        active[:, j] = False
        n_computed += len(rows)
    rows, features = active.nonzero().T
    for entries in entry_groups(rows, features, codes, batch):
        states = without(checkpoint, codes, rows[entries], features[entries], ablating)
        scores = rerun(model, checkpoint, states, rows=rows[entries])
        options = checkpoint.options_of(rows[entries])
        entry = torch.repeat_interleave(features[entries], checkpoint.option_counts[rows[entries]])
        logprobs[entry, options] = scores
        n_computed += len(entries)
    return Ablated(batch, checkpoint.logprobs, logprobs, n_computed)


def spread(
    codes: Float[Tensor, "position feature"] | None, batch: Batch, ablating: Ablating
) -> Float[Tensor, "row width feature"]:
    """Return codes by row and column of the batch, zero where nothing is edited."""
    rows, width = batch.input_ids.shape
    out = torch.zeros(rows * width, len(ablating.features))
    if codes is not None:
        out[edited_positions(batch, ablating.where)] = codes.cpu()
    return out.reshape(rows, width, -1)


def without(
    checkpoint: Checkpoint,
    codes: Float[Tensor, "row width feature"],
    rows: Int[Tensor, " entry"],
    features: Int[Tensor, " entry"],
    ablating: Ablating,
) -> Float[Tensor, "entry width state"]:
    """Return the states of rows less f_j d_j; positions where the feature is not active keep their bits."""
    device = checkpoint.states.device
    directions = ablating.sae.on(device).w_dec[ablating.features[features].to(device)]
    amounts = codes[rows, :, features].to(device)[:, :, None]
    states = checkpoint.states[rows.to(device)]
    return torch.where(amounts > 0, states - (amounts * directions[:, None, :]).to(states.dtype), states)


def changed_prefixes(
    model: Model, checkpoint: Checkpoint, ablating: Ablating
) -> Iterator[tuple[int, Float[Tensor, "prefix token state"]]]:
    """Yield the shared prefixes less f_j d_j, for each feature that is active in one of them; one copy at a time."""
    batch = checkpoint.batch
    if not batch.prefixes or ablating.where != "all":
        return
    own = Reconstruction(ablating)
    states = prefix_states(model, batch, ablating.sae.layer, edits=[own])
    codes = spread(own.codes.get(True), prefix_batch(batch.prefixes), ablating)
    directions = ablating.sae.on(states.device).w_dec
    for j in (codes > 0).flatten(0, 1).any(dim=0).nonzero()[:, 0].tolist():
        taken = codes[:, :, j : j + 1].to(states.device) * directions[ablating.features[j]]
        yield j, states - taken.to(states.dtype)


def entry_groups(
    rows: Int[Tensor, " entry"],
    features: Int[Tensor, " entry"],
    codes: Float[Tensor, "row width feature"],
    batch: Batch,
) -> Iterator[Int[Tensor, " group"]]:
    """Yield entries in groups of similar size: all of a group are padded to its largest."""
    if not len(rows):
        return
    n_keys = batch.input_ids.shape[1] if batch.allowed is None else batch.allowed.shape[2]
    sizes = reached(codes, batch)[rows, features]
    order = sizes.argsort(descending=True, stable=True)
    start = 0
    while start < len(order):
        n = max(1, min(ENTRY_TOKENS // max(1, int(sizes[order[start]])), ENTRY_COLUMNS // n_keys))
        yield order[start : start + n]
        start += n


def reached(codes: Float[Tensor, "row width feature"], batch: Batch) -> Int[Tensor, "row feature"]:
    """Return about how many positions a feature's change reaches in each row."""
    active: Bool[Tensor, "row width feature"] = codes > 0
    if batch.allowed is None:
        return torch.full(active.shape[::2], batch.input_ids.shape[1])
    sees = batch.allowed[:, :, -batch.input_ids.shape[1] :].float()
    return (sees @ active.float() > 0).sum(dim=1)


def ablate_fully(model: Model, batch: Batch, ablating: Ablating, feature: int) -> Float[Tensor, " option"]:
    """Return the scores without one feature by a whole pass of its own: what `ablate_batch` must equal, to rounding."""
    return score_batch(model, batch, edits=[WithoutFeature(ablating, feature)]).logprobs


@dataclass(frozen=True)
class WithoutFeature:
    """An Edit that puts h_hat - f_j d_j in the place of h."""

    ablating: Ablating
    feature: int
    """Which of the features in question."""

    @property
    def sites(self) -> tuple[Site, ...]:
        return (Site("residual", self.ablating.sae.layer),)

    def edit(self, site: Site, states: Tensor, batch: Batch) -> Tensor:
        return replaced(states, edited_positions(batch, self.ablating.where), self._patch)

    def _patch(self, states: Float[Tensor, "position width"]) -> Float[Tensor, "position width"]:
        sae, j, parts = self.ablating.sae.on(states.device), int(self.ablating.features[self.feature]), []
        for chunk in states.split(CHUNK):
            codes = sae.encode(chunk)
            patched = chunk if self.ablating.keep_error else sae.rebuilt(chunk, codes)
            parts.append(patched - codes[:, j : j + 1] * sae.w_dec[j])
        return torch.cat(parts)


def features_of(chosen: Sequence[int]) -> Int[Tensor, " feature"]:
    """Return features as the tensor that an ablation takes."""
    return torch.tensor(list(chosen), dtype=torch.int64)


# ------------------------------------------------------------------------------------------------- batch by batch


def run_ablation(
    model: Model, questions: Sequence[Question], folder: Path, ablating: Ablating, *, progress: Progress | None = None
) -> AblationScores:
    """Ablate features on questions, going on where an earlier run was stopped."""
    ablating.sae.check(model)
    extraction = Extraction(layers=(ablating.sae.layer,), style=ablating.style)
    planned = plan_questions(model, questions, extraction, folder=folder)
    about = {
        "sae": sae_digest(ablating.sae),
        "features": ablating.features.tolist(),
        "where": ablating.where,
        "keep_error": ablating.keep_error,
    }
    work = batch_work(planned, folder, about, lambda batch: ablate_planned(model, batch, ablating))
    work.run(progress)
    return read_scores(Journal(folder), planned.prepared, ablating.features.numpy())


def batch_work(
    planned: PlannedQuestions, folder: Path, about: dict[str, Any], compute: Callable[[Batch], dict[str, Tensor]]
) -> Resumable[PlannedBatch, dict[str, Tensor]]:
    """Return the work of computing something of every batch of questions; `about` is what it depends on beside them."""
    plan, prompts = planned.plan(), planned.prepared.prompts
    return Resumable(
        folder,
        planned.manifest | about,
        plan.batches,
        lambda batch, _: compute(lay_out(prompts, batch, packing=plan.packing)),
        size=lambda batch: len(batch.questions),
        form=Journal,
    )


def ablate_planned(model: Model, batch: Batch, ablating: Ablating) -> dict[str, Tensor]:
    """Return the scores of one batch: unpatched, reconstructed, ablated."""
    patched = ablate_batch(model, batch, ablating, prefixes=PrefixCaches(model, [Reconstruction(ablating)]))
    return {
        "question": torch.tensor(batch.questions),
        "base": score_batch(model, batch).logprobs,
        "reconstructed": patched.reconstructed,
        # one row per option, so that questions can be put into their order
        "ablated": patched.logprobs.T.contiguous(),
    }


def read_scores(journal: Journal, prepared: Prepared, features: Int[np.ndarray, " feature"]) -> AblationScores:
    """Return the scores of all batches in the order of the questions."""
    options = Options.of_sizes([len(p.options) for p in prepared.prompts])
    n_rows, n_features = options.n_rows, len(features)
    columns = {"base": np.zeros(n_rows), "reconstructed": np.zeros(n_rows), "ablated": np.zeros((n_rows, n_features))}
    for shard in journal.entries:
        tensors = journal.tensors(shard)
        rows = options.rows_of(np.asarray(tensors["question"]))
        for name, column in columns.items():
            column[rows] = np.asarray(tensors[name])
    lengths = lengths_of(prepared, range(len(prepared.prompts)))
    table = OptionTable(
        logprobs=columns["base"],
        **{name: values.numpy() for name, values in lengths.items()},
        offsets=options.edges,
        answers=np.array([q.answer for q in prepared.questions], dtype=np.int64),
    )
    return AblationScores(
        ids=tuple(q.id for q in prepared.questions),
        table=table,
        reconstructed=columns["reconstructed"],
        ablated=np.ascontiguousarray(columns["ablated"].T),
        features=features,
        groups=groups_of(prepared.questions),
    )


# ------------------------------------------------------------------------------------------------- coral sae ablate


def ablate_features(
    model: Model, questions: Sequence[Question], study: FeatureStudy, plan: AblationPlan, *, bar: Bar = silent
) -> dict[str, Any]:
    """Ablate the selected features, and random ones, on questions; return the record in STUDY/ablation-NAME.json."""
    record, sae = study.record, study.autoencoder()
    study.check(model)
    check_questions(questions)
    chosen, random = draw_features(study.selection, plan)
    features, style = features_of([*chosen, *random]), Style(**record["style"])
    ablating = Ablating(sae, features, plan.where, plan.keep_error, style)
    with bar(f"ablating ({plan.name})", len(questions), "questions") as advance:
        folder = study.folder / f"ablation-{plan.name}"
        scores = run_ablation(model, questions, folder, ablating, progress=advance)
    groups = {plan.by: range(len(chosen)), "random": range(len(chosen), len(chosen) + len(random))}
    changes = effects(scores, groups, record["base"])
    result = {
        "plan": asdict(plan),
        "of": study.identity,
        "model": record["model"],
        "chosen": chosen,
        "random": random,
        "questions": list(scores.ids),
        "keys": question_keys(questions).tolist(),
        "tasks": sorted({f"{q.task}:{q.split}" if q.split else q.task for q in questions}),
        **changes,
    }
    write_json(study.folder / f"ablation-{plan.name}.json", result)
    return result


def draw_features(selection: Selection, plan: AblationPlan) -> tuple[list[int], list[int]]:
    """Return the features to ablate, and random ones beside them."""
    chosen = selection.chosen[plan.by][: plan.features]
    others = np.setdiff1d(selection.alive(), chosen)
    n = min(plan.random, len(others))
    random = np.sort(np.random.default_rng(plan.seed).choice(others, n, replace=False)) if n else others[:0]
    return chosen, [int(j) for j in random]
