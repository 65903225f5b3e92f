"""Lay prompts out as token trees, trees as rows, rows as batches: no token is computed twice, and padding stays small.

The tree of a question holds its context once and every option after it; options that begin with the same tokens share
them too. It is found from the token ids alone. Nothing here runs a model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from coral_lens.prefixes import PrefixGroup, find_prefixes
from coral_lens.records import Prompt, offsets_of

Packing = Literal["tree", "plain"]
"""`tree`: options share their context under a mask. `plain`: one ordinary causal row per option, for models that refuse."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Token sequences merged where they begin alike. Node i follows its parent, and parents come before children."""

    tokens: Int[np.ndarray, " node"]
    parents: Int[np.ndarray, " node"]
    depths: Int[np.ndarray, " node"]
    """Distance from the root: the position id of the token."""
    trunk: int
    """The first `trunk` nodes are a chain: the context that all branches share."""
    paths: tuple[Int[np.ndarray, " _"], ...]
    """For each option, the nodes of its own tokens, in order."""
    stems: tuple[int, ...]
    """For each option, the node of the last context token, which predicts the option's first token."""
    name: str = ""
    """Id of the question."""

    def __len__(self) -> int:
        return len(self.tokens)


def build_tree(prompt: Prompt, *, skip: int = 0) -> Tree:
    """Merge the sequences of a prompt's options into one tree, without the first `skip` tokens of their context."""
    trunk = (shared_context(prompt) or ())[skip:]
    assert trunk or not skip, "only a context that all options share has a prefix"
    tokens, parents, depths = list(trunk), list(range(-1, len(trunk) - 1)), list(range(skip, skip + len(trunk)))
    children: dict[tuple[int, int], int] = {}

    def walk(node: int, sequence: Sequence[int]) -> list[int]:
        nodes = []
        for token in sequence:
            if (node, token) not in children:
                children[node, token] = len(tokens)
                depths.append(depths[node] + 1 if node >= 0 else 0)
                tokens.append(token)
                parents.append(node)
            node = children[node, token]
            nodes.append(node)
        return nodes

    paths, stems = [], []
    for context, option in zip(prompt.contexts, prompt.options, strict=True):
        stem = len(trunk) - 1 if trunk else walk(-1, context)[-1]
        stems.append(stem)
        paths.append(np.array(walk(stem, option), dtype=np.int64))
    return Tree(
        tokens=np.array(tokens, dtype=np.int64),
        parents=np.array(parents, dtype=np.int64),
        depths=np.array(depths, dtype=np.int64),
        trunk=len(trunk),
        paths=tuple(paths),
        stems=tuple(stems),
        name=prompt.id,
    )


def ancestors(tree: Tree) -> Bool[np.ndarray, "node node"]:
    """Return which nodes each node may attend to: itself and what lies between it and the root."""
    n, trunk = len(tree), tree.trunk
    allowed = np.zeros((n, n), dtype=bool)
    allowed[:trunk, :trunk] = np.tri(trunk, dtype=bool)
    for node in range(trunk, n):
        if tree.parents[node] >= 0:
            allowed[node] = allowed[tree.parents[node]]
        allowed[node, node] = True
    return allowed


def shared_context(prompt: Prompt) -> tuple[int, ...] | None:
    """Return the context of all options, or None where they differ."""
    first = prompt.contexts[0]
    return first if all(c is first or c == first for c in prompt.contexts) else None


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The rows of a batch, each a tuple of question numbers, and how many tokens of each row lie in its prefix."""

    rows: tuple[tuple[int, ...], ...]
    prefixes: tuple[int, ...]
    """For each row, the length of the prefix that its questions share and that is computed apart; mostly 0."""
    plain: bool = False
    """Whether every option has a row of its own, whatever the plan's packing."""

    @property
    def questions(self) -> tuple[int, ...]:
        return tuple(q for row in self.rows for q in row)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which question goes into which row of which batch. Row shapes change rounding, so a resumed run reuses its plan."""

    batches: tuple[PlannedBatch, ...]
    packing: Packing


def plan_for(
    prompts: Sequence[Prompt], *, token_budget: int, packing: Packing = "tree", border: int | None = None
) -> Plan:
    """Return the packing plan of prompts; it depends on their token ids alone.

    A question with an option beyond `border` gets a batch of its own, for models (LongRoPE) in which the longest sequence
    of a batch changes how all of it is computed; if its options lie on both sides, each of them has a row of its own.
    """
    crossing = [q for q, p in enumerate(prompts) if border is not None and longest(p) > border]
    own = [
        PlannedBatch(((q,),), (0,), plain=min(lengths(prompts[q])) <= (border or 0))
        for q in sorted(crossing, key=lambda q: -longest(prompts[q]))
    ]
    alone = set(crossing) if packing == "tree" else set(range(len(prompts)))
    groups = find_prefixes([None if q in alone else shared_context(p) for q, p in enumerate(prompts)])
    rows = [(g, row) for g in groups if g.length for row in pack_rows(g, prompts)]
    single = {q for g in groups if not g.length for q in g.members} - set(crossing)
    sizes = {q: tree_size(build_tree(prompts[q]), packing) for q in sorted(single)}
    shared = batch_rows(rows, prompts, token_budget=token_budget)
    return Plan((*own, *shared, *batch_questions(sizes, token_budget=token_budget, packing=packing)), packing)


def longest(prompt: Prompt) -> int:
    """Return the length of a prompt's longest sequence."""
    return max(lengths(prompt))


def lengths(prompt: Prompt) -> list[int]:
    """Return the length of each option's whole sequence."""
    return [len(c) + len(o) for c, o in zip(prompt.contexts, prompt.options, strict=True)]


def tree_size(tree: Tree, packing: Packing) -> int:
    """Return how many tokens a question costs: its tree's, or those of all its options' whole sequences."""
    if packing == "tree":
        return len(tree)
    return sum(int(tree.depths[path[-1]]) + 1 for path in tree.paths)


ROW_WIDTH = 256
"""Questions that share a prefix are put side by side up to this width: every row holds a copy of the prefix's cache."""


def pack_rows(group: PrefixGroup, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Lay the questions of a prefix group side by side, the longest first."""
    sizes = {q: len(build_tree(prompts[q], skip=group.length)) for q in group.members}
    rows: list[list[int]] = []
    room: list[int] = []
    for q in sorted(sizes, key=lambda q: (-sizes[q], q)):
        at = next((i for i, free in enumerate(room) if free >= sizes[q]), None)
        if at is None:
            rows.append([])
            room.append(max(ROW_WIDTH, sizes[q]))
            at = len(rows) - 1
        rows[at].append(q)
        room[at] -= sizes[q]
    return [tuple(row) for row in rows]


def batch_rows(
    rows: Sequence[tuple[PrefixGroup, tuple[int, ...]]], prompts: Sequence[Prompt], *, token_budget: int
) -> list[PlannedBatch]:
    """Put rows with prefixes into batches, rows of one prefix next to each other so that it is computed once."""
    batches: list[PlannedBatch] = []
    some: list[tuple[PrefixGroup, tuple[int, ...]]] = []

    def cost(candidates: Sequence[tuple[PrefixGroup, tuple[int, ...]]]) -> int:
        widths = [sum(len(build_tree(prompts[q], skip=g.length)) for q in row) for g, row in candidates]
        lengths = {g.members: g.length for g, _ in candidates}
        return max(widths) * len(widths) + (max(lengths.values()) * len(lengths) if len(lengths) > 1 else 0)

    def close() -> None:
        if some:
            batches.append(PlannedBatch(tuple(row for _, row in some), tuple(g.length for g, _ in some)))
            some.clear()

    for row in rows:
        if some and cost([*some, row]) > token_budget:
            close()
        some.append(row)
    close()
    return batches


def batch_questions(sizes: Mapping[int, int], *, token_budget: int, packing: Packing = "tree") -> list[PlannedBatch]:
    """Group questions of similar size into batches of about `token_budget` tokens, padding included.

    The longest come first, so that memory peaks at the start and the time left is never underestimated. Room left in a
    row is given to the largest question that still fits.
    """
    order = sorted(sizes, key=lambda i: (sizes[i], -i))
    keys = [sizes[i] for i in order]
    batches = []
    while order:
        width = keys[-1]
        rows = []
        for _ in range(max(1, token_budget // width)):
            row, room = [], width
            while (at := bisect_right(keys, room) - 1) >= 0:
                row.append(order.pop(at))
                room -= keys.pop(at)
                if packing == "plain":
                    break
            if not row:
                break
            rows.append(tuple(row))
        batches.append(PlannedBatch(tuple(rows), (0,) * len(rows)))
    return batches


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
    prefixes = [
        prompts[row[0]].contexts[0][:length] for row, length in zip(planned.rows, planned.prefixes, strict=True)
    ]
    packing = "plain" if planned.plain else packing
    if joined and packing == "tree" and len(set(prefixes)) == 1:
        batch = collate(trees, [planned.questions], prefixes=prefixes[:1])
        # with a prefix, whole rows are a block: its keys are then read once for all questions of the row
        parts = planned.rows if prefixes[0] else [(q,) for q in planned.questions]
        edges = offsets_of([sum(len(trees[q]) for q in part) for part in parts]).tolist()
        return replace(batch, blocks=tuple(pairwise(edges)))
    return collate(trees, planned.rows, packing=packing, prefixes=prefixes)


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


def prefix_batch(prefixes: Sequence[tuple[int, ...]]) -> Batch:
    """Return prefixes as a batch without options, for edits to see where they are."""
    width = max(len(p) for p in prefixes)
    ids = torch.tensor([[*p, *[0] * (width - len(p))] for p in prefixes])
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(
        questions=(),
        names=(),
        option_offsets=offsets_of([]),
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


def prefix_mask(prefixes: Sequence[tuple[int, ...]], width: int) -> Bool[np.ndarray, "batch width prefix"]:
    """Return which prefix keys each row sees: all of its own prefix, none of the padding after it."""
    lengths = np.array([len(p) for p in prefixes], dtype=np.int64)
    seen = np.arange(lengths.max())[None, :] < lengths[:, None]
    return np.broadcast_to(seen[:, None, :], (len(prefixes), width, seen.shape[1]))


def collate_plain(trees: Sequence[Tree], order: Sequence[int]) -> Batch:
    """Lay every option into a row of its own, padded on the right, under the model's own causal mask."""
    chains, numbers = [], []
    for tree in trees:
        for stem, path in zip(tree.stems, tree.paths, strict=True):
            chains.append(chain_of(tree, stem, path))
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
        option_offsets=offsets_of([len(tree.paths) for tree in trees]),
    )


def chain_of(tree: Tree, stem: int, path: Int[np.ndarray, " token"]) -> Tree:
    """Return one option's whole sequence as a tree without branches."""
    nodes, node = [], stem
    while node >= 0:
        nodes.append(node)
        node = int(tree.parents[node])
    nodes = [*nodes[::-1], *path.tolist()]
    n = len(nodes)
    own = np.arange(n - len(path), n)
    return Tree(tree.tokens[nodes], np.arange(-1, n - 1), np.arange(n), n, (own,), (int(own[0]) - 1,))


def place(
    trees: Sequence[Tree],
    order: Sequence[int],
    starts: Sequence[int],
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray | None],
) -> Batch:
    """Shift the nodes of each tree to where it starts in the batch."""
    ids, positions, allowed = arrays
    answer, before, lengths, stems, sizes = [], [], [], [], []
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
    tokens = torch.from_numpy(np.concatenate(answer))
    input_ids = torch.from_numpy(ids)
    return Batch(
        questions=tuple(order),
        names=tuple(tree.name for tree in trees),
        option_offsets=offsets_of(sizes),
        input_ids=input_ids,
        position_ids=torch.from_numpy(positions),
        lengths=filled,
        allowed=None if allowed is None else torch.from_numpy(allowed),
        answer_tokens=tokens,
        answer_offsets=torch.from_numpy(offsets_of(lengths)),
        before_tokens=torch.from_numpy(np.concatenate(before)),
        targets=input_ids.reshape(-1)[tokens],
        stems=torch.tensor(stems),
    )
