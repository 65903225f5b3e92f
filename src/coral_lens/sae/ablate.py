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
from itertools import zip_longest
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
from coral_lens.engine.hooks import Site
from coral_lens.engine.packing import PlannedBatch
from coral_lens.engine.planned import Extraction, PlannedQuestions, plan_questions
from coral_lens.engine.prompts import Prepared
from coral_lens.engine.rerun import Checkpoint, capture, prefix_states, rerun
from coral_lens.engine.scoring import PrefixCaches, score_batch
from coral_lens.engine.shard_work import lengths_of
from coral_lens.lens.fit import check_questions
from coral_lens.ragged import Options
from coral_lens.records import OptionTable, Question, groups_of
from coral_lens.sae.autoencoder import CHUNK, Autoencoder
from coral_lens.sae.codes import sae_digest
from coral_lens.sae.effects import AblationScores, effects
from coral_lens.sae.folder import FeatureSelection, FeatureStudy
from coral_lens.sae.settings import AblationPlace, AblationPlan
from coral_lens.storage.files import write_record
from coral_lens.storage.outputs import has_word, refuse_replacing
from coral_lens.storage.progress import Bar, Progress, silent
from coral_lens.storage.resumable import Resumable, each
from coral_lens.storage.shards import Journal

if TYPE_CHECKING:
    from coral_lens.engine.model import Model

ENTRY_TOKENS = 4096
"""Positions, padding included, that are computed together."""
ENTRY_COLUMNS = 16_384
"""Columns, those of prefixes included, of the rows that are computed together: each brings its own states, keys and mask."""


@dataclass(frozen=True)
class Ablation:
    """Which features of an autoencoder are taken out, one at a time, and at which positions."""

    sae: Autoencoder
    features: Int[Tensor, " feature"]
    """The features to take out."""
    where: AblationPlace = "all"
    """The positions that are patched."""
    keep_error: bool = False
    """Keep what the reconstruction misses: the state less f_j d_j. The paper drops it."""
    style: Style = Style()  # noqa: RUF009  (frozen)
    """How the questions are asked."""


@dataclass
class Reconstruction:
    """An Edit that puts the reconstruction in place and keeps the codes of the features in question."""

    ablation: Ablation
    codes: dict[bool, Float[Tensor, "position feature"]] = field(default_factory=dict)
    """The codes of the last batch (False) and of its prefixes (True); one row per edited position, in order."""

    @property
    def sites(self) -> tuple[Site, ...]:
        return (Site("residual", self.ablation.sae.layer),)

    def edit(self, site: Site, states: Tensor, batch: Batch) -> Tensor:
        return replaced(states, edited_positions(batch, self.ablation.where), lambda chunk: self._patch(chunk, batch))

    def _patch(self, states: Float[Tensor, "position width"], batch: Batch) -> Float[Tensor, "position width"]:
        sae, of_features, patched = self.ablation.sae, [], []
        for chunk in states.split(CHUNK):
            codes = sae.encode(chunk)
            of_features.append(codes[:, self.ablation.features.to(codes.device)])
            patched.append(chunk if self.ablation.keep_error else sae.rebuilt(chunk, codes))
        self.codes[not batch.n_options] = torch.cat(of_features)
        return torch.cat(patched)


@dataclass(frozen=True)
class AblatedBatch:
    """The scores of one batch."""

    batch: Batch
    reconstructed: Float[Tensor, " option"]
    """Log-probabilities with the reconstruction in place."""
    logprobs: Float[Tensor, "feature option"]
    """The same with one feature taken out; equal to the bit where it is not active."""
    n_computed: int
    """Pairs of a feature and a row that were computed."""


@torch.inference_mode()
def ablate_batch(
    model: Model, batch: Batch, ablation: Ablation, *, prefixes: PrefixCaches | None = None
) -> AblatedBatch:
    """Score a batch with the reconstruction, and with each feature taken out of it.

    `prefixes` may be shared by batches if it was made with a Reconstruction of the same kind.
    """
    edit = Reconstruction(ablation)
    checkpoint = capture(
        model, batch, ablation.sae.layer, edits=[edit], prefixes=prefixes or PrefixCaches(model, [edit])
    )
    logprobs = checkpoint.logprobs.repeat(len(ablation.features), 1)
    codes = codes_by_position(edit.codes.get(False), batch, ablation)
    active = (codes > 0).any(dim=1)  # [row, feature]
    n_computed = 0
    for j, prefix in changed_prefixes(model, checkpoint, ablation):
        rows = torch.arange(len(batch.input_ids))
        states = states_without(checkpoint, codes, rows, torch.full_like(rows, j), ablation)
        logprobs[j] = rerun(model, checkpoint, states, prefix=prefix)
        active[:, j] = False
        n_computed += len(rows)
    rows, features = active.nonzero().T
    for entries in entry_groups(rows, features, codes, batch):
        states = states_without(checkpoint, codes, rows[entries], features[entries], ablation)
        scores = rerun(model, checkpoint, states, rows=rows[entries])
        options = checkpoint.options_of(rows[entries])
        feature = torch.repeat_interleave(features[entries], checkpoint.option_counts[rows[entries]])
        logprobs[feature, options] = scores
        n_computed += len(entries)
    return AblatedBatch(batch, checkpoint.logprobs, logprobs, n_computed)


def codes_by_position(
    codes: Float[Tensor, "position feature"] | None, batch: Batch, ablation: Ablation
) -> Float[Tensor, "row width feature"]:
    """Return codes by row and column of the batch, zero where nothing is edited."""
    rows, width = batch.input_ids.shape
    by_position = torch.zeros(rows * width, len(ablation.features))
    if codes is not None:
        by_position[edited_positions(batch, ablation.where)] = codes.cpu()
    return by_position.reshape(rows, width, -1)


def states_without(
    checkpoint: Checkpoint,
    codes: Float[Tensor, "row width feature"],
    rows: Int[Tensor, " entry"],
    features: Int[Tensor, " entry"],
    ablation: Ablation,
) -> Float[Tensor, "entry width state"]:
    """Return the states of rows less f_j d_j; positions where the feature is not active keep their bits."""
    device = checkpoint.states.device
    directions = ablation.sae.on(device).w_dec[ablation.features[features].to(device)]
    amounts = codes[rows, :, features].to(device)[:, :, None]
    states = checkpoint.states[rows.to(device)]
    return torch.where(amounts > 0, states - (amounts * directions[:, None, :]).to(states.dtype), states)


def changed_prefixes(
    model: Model, checkpoint: Checkpoint, ablation: Ablation
) -> Iterator[tuple[int, Float[Tensor, "prefix token state"]]]:
    """Yield the shared prefixes less f_j d_j, for each feature that is active in one of them; one copy at a time."""
    batch = checkpoint.batch
    if not batch.prefixes or ablation.where != "all":
        return
    edit = Reconstruction(ablation)
    states = prefix_states(model, batch, ablation.sae.layer, edits=[edit])
    codes = codes_by_position(edit.codes.get(True), prefix_batch(batch.prefixes), ablation)
    directions = ablation.sae.on(states.device).w_dec
    for j in (codes > 0).flatten(0, 1).any(dim=0).nonzero()[:, 0].tolist():
        contribution = codes[:, :, j : j + 1].to(states.device) * directions[ablation.features[j]]
        yield j, states - contribution.to(states.dtype)


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


def ablate_fully(model: Model, batch: Batch, ablation: Ablation, feature: int) -> Float[Tensor, " option"]:
    """Return the scores without one feature by a whole pass of its own: what `ablate_batch` must equal, to rounding."""
    return score_batch(model, batch, edits=[WithoutFeature(ablation, feature)]).logprobs


@dataclass(frozen=True)
class WithoutFeature:
    """An Edit that puts h_hat - f_j d_j in the place of h."""

    ablation: Ablation
    feature: int
    """Which of the features in question."""

    @property
    def sites(self) -> tuple[Site, ...]:
        return (Site("residual", self.ablation.sae.layer),)

    def edit(self, site: Site, states: Tensor, batch: Batch) -> Tensor:
        return replaced(states, edited_positions(batch, self.ablation.where), self._patch)

    def _patch(self, states: Float[Tensor, "position width"]) -> Float[Tensor, "position width"]:
        sae, j, parts = self.ablation.sae.on(states.device), int(self.ablation.features[self.feature]), []
        for chunk in states.split(CHUNK):
            codes = sae.encode(chunk)
            patched = chunk if self.ablation.keep_error else sae.rebuilt(chunk, codes)
            parts.append(patched - codes[:, j : j + 1] * sae.w_dec[j])
        return torch.cat(parts)


def feature_tensor(chosen: Sequence[int]) -> Int[Tensor, " feature"]:
    """Return features as the tensor that an ablation takes."""
    return torch.tensor(list(chosen), dtype=torch.int64)


# ------------------------------------------------------------------------------------------------- batch by batch


def run_ablation(
    model: Model, questions: Sequence[Question], folder: Path, ablation: Ablation, *, progress: Progress | None = None
) -> AblationScores:
    """Ablate features on questions, going on where an earlier run was stopped."""
    ablation.sae.check(model)
    extraction = Extraction(layers=(ablation.sae.layer,), style=ablation.style)
    planned = plan_questions(model, questions, extraction, folder=folder)
    about = {
        "sae": sae_digest(ablation.sae),
        "features": ablation.features.tolist(),
        "where": ablation.where,
        "keep_error": ablation.keep_error,
    }
    work = batch_work(planned, folder, about, lambda batch: ablate_planned(model, batch, ablation))
    work.run(progress)
    return read_scores(Journal(folder), planned.prepared, ablation.features.numpy())


def batch_work(
    planned: PlannedQuestions, folder: Path, about: dict[str, Any], compute: Callable[[Batch], dict[str, Tensor]]
) -> Resumable[PlannedBatch, dict[str, Tensor]]:
    """Return the work of computing something of every batch of questions; `about` is what it depends on beside them."""
    plan, prompts = planned.plan(), planned.prepared.prompts
    return Resumable(
        folder,
        planned.manifest | {"threads": torch.get_num_threads()} | about,
        plan.batches,
        each(lambda batch, _: compute(lay_out(prompts, batch, packing=plan.packing))),
        size=lambda batch: len(batch.questions),
        form=Journal,
    )


def ablate_planned(model: Model, batch: Batch, ablation: Ablation) -> dict[str, Tensor]:
    """Return the scores of one batch: unpatched, reconstructed, ablated."""
    patched = ablate_batch(model, batch, ablation, prefixes=PrefixCaches(model, [Reconstruction(ablation)]))
    return {
        "question": torch.tensor(batch.questions),
        "base": score_batch(model, batch).logprobs,
        "reconstructed": patched.reconstructed,
        # one row per option: questions can then be put into their order
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
    record, sae, name = study.record, study.autoencoder(), f"ablation-{plan.name}"
    refuse_replacing(study.folder, [f"{name}.json"], is_ours=lambda path: has_word(path, '"plan"'))
    study.check(model)
    check_questions(questions)
    chosen, random = draw_features(study.selection, plan)
    features, style = feature_tensor([*chosen, *random]), Style(**record["style"])
    ablation = Ablation(sae, features, plan.where, plan.keep_error, style)
    with bar(f"ablating ({plan.name})", len(questions), "questions") as advance:
        scores = run_ablation(model, questions, study.folder / name, ablation, progress=advance)
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
    write_record(study.folder / f"{name}.json", result)
    return result


def in_turns(*rankings: Sequence[int]) -> list[int]:
    """Return what stands in rankings, each once: the first of each, then the second of each, and so on."""
    turns = (place for rank in zip_longest(*rankings) for place in rank if place is not None)
    return list(dict.fromkeys(turns))


def draw_features(selection: FeatureSelection, plan: AblationPlan) -> tuple[list[int], list[int]]:
    """Return the features to ablate, and random ones beside them."""
    ranked = in_turns(*selection.chosen.values()) if plan.by == "both" else selection.chosen[plan.by]
    chosen = ranked[: plan.features]
    pool = np.setdiff1d(selection.alive(), chosen)
    n = min(plan.random, len(pool))
    random = np.sort(np.random.default_rng(plan.seed).choice(pool, n, replace=False)) if n else pool[:0]
    return chosen, [int(j) for j in random]
