"""Lay the trees of a planned batch into rows: token ids, positions, who sees whom, and where each option's tokens are.

Nothing here runs a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from coral_lens.engine.packing import Packing, PlannedBatch
from coral_lens.engine.trees import Tree, ancestors, build_tree, chain_of
from coral_lens.ragged import Options
from coral_lens.records import Prompt


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows ready for the model, and where each option's tokens lie in them.

    `Flat` positions index the rows laid end to end: row * width + column. Options are listed question by question.
    """

    questions: tuple[int, ...]
    """Question numbers, in the order of the options below."""
    names: tuple[str, ...]
    """Their ids."""
    option_offsets: Int[np.ndarray, " edge"]
    """Options of the i-th question of this batch: option_offsets[i] to option_offsets[i + 1]."""
    input_ids: Int[Tensor, "batch width"]
    position_ids: Int[Tensor, "batch width"]
    lengths: Int[Tensor, " batch"]
    """Tokens of each row; what follows them is padding."""
    allowed: Bool[Tensor, "batch width key"] | None
    """Which key each query may see, those of the prefix first; None where the rows are ordinary causal ones."""
    answer_tokens: Int[Tensor, " token"]
    """Flat positions of the options' own tokens, option by option."""
    answer_offsets: Int[Tensor, " option_edge"]
    """Answer tokens of option j: answer_offsets[j] to answer_offsets[j + 1]."""
    before_tokens: Int[Tensor, " token"]
    """Flat position of the token that predicts each answer token."""
    targets: Int[Tensor, " token"]
    """Token id of each answer token."""
    stems: Int[Tensor, " option"]
    """Flat position of each option's last context token."""
    listed: tuple[Int[np.ndarray, " _"], ...] = ()
    """Flat positions of each option's text where it stands listed, or of its own tokens; empty where all are the latter."""
    prefixes: tuple[tuple[int, ...], ...] = ()
    """Distinct token prefixes that rows attend to through a cache."""
    row_prefix: tuple[int, ...] = ()
    """For each row, its prefix."""
    blocks: tuple[tuple[int, int], ...] = ()
    """Where the batch is one row without padding: the borders of the parts that see nothing else of the row."""

    @property
    def n_options(self) -> int:
        return len(self.stems)


def lay_out(
    prompts: Sequence[Prompt], planned: PlannedBatch, *, packing: Packing = "tree", joined: bool = False
) -> Batch:
    """Lay the prompts of a planned batch into rows, or all into one without padding if `joined` and they share a prefix."""
    trees = {
        q: build_tree(prompts[q], skip=length)
        for row, length in zip(planned.rows, planned.prefixes, strict=True)
        for q in row
    }
    prefixes = row_prefixes(prompts, planned)
    packing = "plain" if planned.plain else packing
    if joined and packing == "tree" and len(set(prefixes)) == 1:
        batch = collate(trees, [planned.questions], prefixes=prefixes[:1])
        # with a prefix, whole rows are a block: its keys are then read once for all questions of the row
        parts = planned.rows if prefixes[0] else [(q,) for q in planned.questions]
        edges = accumulate((sum(len(trees[q]) for q in part) for part in parts), initial=0)
        return replace(batch, blocks=tuple(pairwise(edges)))
    return collate(trees, planned.rows, packing=packing, prefixes=prefixes)


def row_prefixes(prompts: Sequence[Prompt], planned: PlannedBatch) -> list[tuple[int, ...]]:
    """Return the prefix of each row, mostly empty."""
    return [prompts[row[0]].contexts[0][:n] for row, n in zip(planned.rows, planned.prefixes, strict=True)]


def batch_prefixes(prompts: Sequence[Prompt], planned: PlannedBatch) -> tuple[tuple[int, ...], ...]:
    """Return the distinct prefixes of a planned batch, or nothing where it has none: what `Batch.prefixes` will be."""
    prefixes = tuple(dict.fromkeys(row_prefixes(prompts, planned)))
    return prefixes if any(prefixes) else ()


def collate(
    trees: Mapping[int, Tree],
    rows: Sequence[Sequence[int]],
    *,
    packing: Packing = "tree",
    prefixes: Sequence[tuple[int, ...]] = (),
) -> Batch:
    """Lay the trees of the numbered questions into one batch; `rows` says which question goes into which row."""
    if packing == "plain":
        return collate_plain([trees[q] for row in rows for q in row], [q for row in rows for q in row])
    width = max(sum(len(trees[q]) for q in row) for row in rows)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    positions = np.zeros_like(ids)
    # padding attends to itself alone: a query that sees nothing would give NaN
    allowed = np.broadcast_to(np.eye(width, dtype=bool), (len(rows), width, width)).copy()
    starts: list[int] = []
    for r, row in enumerate(rows):
        column = 0
        for q in row:
            tree, end = trees[q], column + len(trees[q])
            ids[r, column:end], positions[r, column:end] = tree.tokens, tree.depths
            allowed[r, column:end, column:end] = ancestors(tree)
            starts.append(r * width + column)
            column = end
    order = [q for row in rows for q in row]
    laid = [trees[q] for q in order]
    if not any(prefixes):
        return place(laid, order, starts, (ids, positions, allowed))
    distinct = tuple(dict.fromkeys(prefixes))
    batch = place(
        laid, order, starts, (ids, positions, np.concatenate([prefix_mask(prefixes, width), allowed], axis=2))
    )
    return replace(batch, prefixes=distinct, row_prefix=tuple(distinct.index(p) for p in prefixes))


def prefix_mask(prefixes: Sequence[tuple[int, ...]], width: int) -> Bool[np.ndarray, "batch width prefix"]:
    """Return which prefix keys each row sees: all of its own prefix, none of the padding after it."""
    lengths = np.array([len(p) for p in prefixes], dtype=np.int64)
    seen = np.arange(lengths.max())[None, :] < lengths[:, None]
    return np.broadcast_to(seen[:, None, :], (len(prefixes), width, seen.shape[1]))


def collate_plain(trees: Sequence[Tree], order: Sequence[int]) -> Batch:
    """Lay every option into a row of its own, padded on the right, under the model's own causal mask."""
    chains, numbers = [], []
    for tree in trees:
        for option in range(len(tree.paths)):
            chains.append(chain_of(tree, option))
            numbers.append(len(chains) - 1)
    width = max(len(c) for c in chains)
    ids = np.zeros((len(chains), width), dtype=np.int64)
    for r, chain in enumerate(chains):
        ids[r, : len(chain)] = chain.tokens
    positions = np.broadcast_to(np.arange(width), ids.shape).copy()
    starts = [r * width for r in numbers]
    batch = place(chains, numbers, starts, (ids, positions, None))
    return replace(
        batch,
        questions=tuple(order),
        names=tuple(tree.name for tree in trees),
        option_offsets=Options.of_sizes([len(tree.paths) for tree in trees]).edges,
    )


def place(
    trees: Sequence[Tree],
    order: Sequence[int],
    starts: Sequence[int],
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray | None],
) -> Batch:
    """Shift the nodes of each tree to where it starts in the batch."""
    ids, positions, allowed = arrays
    answer, before, lengths, stems, sizes, listed = [], [], [], [], [], []
    filled = torch.zeros(len(ids), dtype=torch.int64)
    for tree, start in zip(trees, starts, strict=True):
        sizes.append(len(tree.paths))
        row, column = divmod(start, ids.shape[1])
        filled[row] = column + len(tree)
        for stem, path in zip(tree.stems, tree.paths, strict=True):
            answer.append(path + start)
            before.append(np.concatenate([[stem], path[:-1]]) + start)
            lengths.append(len(path))
            stems.append(stem + start)
        # an option that is listed nowhere is read where it is scored
        listed += [nodes + start for nodes in tree.listed or tree.paths]
    tokens = torch.from_numpy(np.concatenate(answer))
    input_ids = torch.from_numpy(ids)
    return Batch(
        questions=tuple(order),
        names=tuple(tree.name for tree in trees),
        option_offsets=Options.of_sizes(sizes).edges,
        input_ids=input_ids,
        position_ids=torch.from_numpy(positions),
        lengths=filled,
        allowed=None if allowed is None else torch.from_numpy(allowed),
        answer_tokens=tokens,
        answer_offsets=torch.from_numpy(Options.of_sizes(lengths).edges),
        before_tokens=torch.from_numpy(np.concatenate(before)),
        targets=input_ids.reshape(-1)[tokens],
        stems=torch.tensor(stems),
        listed=tuple(listed) if any(tree.listed for tree in trees) else (),
    )


def prefix_batch(prefixes: Sequence[tuple[int, ...]]) -> Batch:
    """Return prefixes as a batch without options, for edits to see where they are."""
    width = max(len(p) for p in prefixes)
    ids = torch.tensor([[*p, *[0] * (width - len(p))] for p in prefixes])
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(
        questions=(),
        names=(),
        option_offsets=Options.of_sizes([]).edges,
        input_ids=ids,
        position_ids=torch.arange(width).expand(len(prefixes), -1),
        lengths=torch.tensor([len(p) for p in prefixes]),
        allowed=None,
        answer_tokens=none,
        answer_offsets=torch.zeros(1, dtype=torch.int64),
        before_tokens=none,
        targets=none,
        stems=none,
    )
