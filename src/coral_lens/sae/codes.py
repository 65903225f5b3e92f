"""What an autoencoder makes of each option: the mean activation of every feature over the option's own tokens.

Kept sparse in a resumable folder, question by question: indices and values of the active features of each option. Features
are read at tokens and then averaged, because the autoencoder is of tokens; the code of an averaged state is something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from coral_lens.data.settings import Style
from coral_lens.engine.batches import Batch
from coral_lens.engine.packing import Plan
from coral_lens.engine.planned import Extraction, plan_questions
from coral_lens.engine.readers import answer_positions
from coral_lens.engine.shard_work import count_questions
from coral_lens.errors import CoralError
from coral_lens.records import Question
from coral_lens.sae.autoencoder import CHUNK, Autoencoder
from coral_lens.sae.states import iter_states
from coral_lens.storage.files import digest
from coral_lens.storage.progress import Progress
from coral_lens.storage.resumable import Resumable, each, read_manifest
from coral_lens.storage.shards import Journal, digest_tensor

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


SHARD_BATCHES = 8
"""Batches in a shard."""


def sae_digest(sae: Autoencoder) -> str:
    """Return a digest of what an autoencoder computes."""
    tensors = [t for t in (sae.w_enc, sae.b_enc, sae.w_dec, sae.b_dec, sae.threshold) if t is not None]
    limit = [] if sae.norm_limit is None else [sae.norm_limit]
    return digest([sae.architecture, sae.k, sae.layer, *limit, *map(digest_tensor, tensors)])


@torch.inference_mode()
def option_codes(
    sae: Autoencoder, states: Float[Tensor, "token width"], batch: Batch
) -> Float[Tensor, "option feature"]:
    """Return the mean code of each option from the states of a batch's answer tokens, shared ones given once."""
    at = torch.searchsorted(answer_positions(batch), batch.answer_tokens)
    lengths = batch.answer_offsets.diff()
    option = torch.repeat_interleave(torch.arange(batch.n_options), lengths)
    total = torch.zeros(batch.n_options, sae.n_features)
    for tokens in torch.arange(len(at)).split(CHUNK):
        total.index_add_(0, option[tokens], sae.encode(states[at[tokens]]))
    return total / lengths[:, None]


@dataclass(frozen=True)
class Encoding:
    """What encodes the options of questions, and how these are asked."""

    sae: Autoencoder
    style: Style = Style()  # noqa: RUF009  (frozen)


def collect_codes(
    model: Model, questions: Sequence[Question], folder: Path, encoding: Encoding, *, progress: Progress | None = None
) -> CodeStore:
    """Write the codes of the options of questions, going on where an earlier run was stopped."""
    sae = encoding.sae
    sae.check(model)
    planned = plan_questions(model, questions, Extraction(layers=(sae.layer,), style=encoding.style), folder=folder)
    prepared, plan = planned.prepared, planned.plan()
    cuts = [Plan(plan.batches[i : i + SHARD_BATCHES], plan.packing) for i in range(0, len(plan.batches), SHARD_BATCHES)]

    def codes_of(cut: Plan, _: Progress) -> dict[str, Tensor]:
        batches = iter_states(model, prepared.prompts, cut, layer=sae.layer, where="answer")
        return sparse([(batch, option_codes(sae, states, batch)) for batch, states in batches])

    identity = planned.manifest | {
        "threads": torch.get_num_threads(),
        "sae": sae_digest(sae),
        "ids": [q.id for q in prepared.questions],
        "sizes": [len(p.options) for p in prepared.prompts],
        "n_features": sae.n_features,
        "n_shards": len(cuts),
    }
    work = Resumable(folder, identity, cuts, each(codes_of), size=count_questions, form=Journal)
    work.run(progress)
    return CodeStore(folder)


def sparse(coded: Sequence[tuple[Batch, Tensor]]) -> dict[str, Tensor]:
    """Return the codes of some batches as offsets, indices and values, with the questions that they are of."""
    places = [codes.nonzero() for _, codes in coded]
    counts = torch.cat([(codes > 0).sum(dim=1) for _, codes in coded])
    return {
        "question": torch.tensor([q for batch, _ in coded for q in batch.questions]),
        "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        "index": torch.cat([active[:, 1] for active in places]).int(),
        "value": torch.cat([codes[active.unbind(1)] for (_, codes), active in zip(coded, places, strict=True)]),
    }


@dataclass(frozen=True)
class QuestionCodes:
    """The codes of the options of one question."""

    question: int
    """Its number among those that could be asked."""
    n_options: int
    option: Int[np.ndarray, " entry"]
    """The option of each entry."""
    index: Int[np.ndarray, " entry"]
    """Its feature."""
    value: Float[np.ndarray, " entry"]
    """The mean activation of the feature over the option's tokens."""

    def dense(self, n_features: int) -> Float[np.ndarray, "option feature"]:
        """Return the codes with their zeros."""
        codes = np.zeros((self.n_options, n_features), dtype=np.float32)
        codes[self.option, self.index] = self.value
        return codes


class CodeStore:
    """A finished folder of codes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder / "manifest.json", needs=("n_shards", "n_features", "ids", "sizes"))
        self._journal = Journal(folder)
        if len(self._journal.entries) != self.manifest["n_shards"]:
            raise CoralError(f"{folder} is not finished; run the same command again and it goes on where it was.")

    @property
    def n_features(self) -> int:
        return int(self.manifest["n_features"])

    @property
    def ids(self) -> list[str]:
        """The ids of the questions that could be asked."""
        return list(self.manifest["ids"])

    def __iter__(self) -> Iterator[QuestionCodes]:
        """Yield the questions, shard by shard."""
        for shard in self._journal.entries:
            arrays = {name: np.asarray(tensor) for name, tensor in self._journal.tensors(shard).items()}
            row, offsets = 0, arrays["offsets"]
            for q in arrays["question"].tolist():
                n_options = self.manifest["sizes"][q]
                edges = offsets[row : row + n_options + 1]
                row += n_options
                part, option = slice(int(edges[0]), int(edges[-1])), np.repeat(np.arange(n_options), np.diff(edges))
                yield QuestionCodes(q, n_options, option, arrays["index"][part], arrays["value"][part])
