"""Lay prompts out as token trees, trees as rows, rows as batches: no token is computed twice, and padding stays small.

The tree of a question holds its context once and every option after it; options that begin with the same tokens share
them too. It is found from the token ids alone. Nothing here runs a model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

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

    def __len__(self) -> int:
        return len(self.tokens)


def build_tree(prompt: Prompt) -> Tree:
    """Merge the sequences of a prompt's options into one tree."""
    trunk = (
        prompt.contexts[0] if all(c is prompt.contexts[0] or c == prompt.contexts[0] for c in prompt.contexts) else ()
    )
    tokens, parents, depths = list(trunk), list(range(-1, len(trunk) - 1)), list(range(len(trunk)))
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


@dataclass(frozen=True, slots=True)
class Plan:
    """Which question goes into which row of which batch. Row shapes change rounding, so a resumed run reuses its plan."""

    batches: tuple[tuple[tuple[int, ...], ...], ...]
    """Batches of rows of question numbers."""
    packing: Packing


def make_plan(sizes: Sequence[int], *, token_budget: int, packing: Packing = "tree") -> Plan:
    """Group questions of similar size into batches of about `token_budget` tokens, padding included.

    The longest come first, so that memory peaks at the start and the time left is never underestimated. Room left in a
    row is given to the largest question that still fits.
    """
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i], -i))
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
        batches.append(tuple(rows))
    return Plan(tuple(batches), packing)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows ready for the model, and where each option's tokens lie in them.

    `Flat` positions index the rows laid end to end: row * width + column. Options are listed question by question.
    """

    questions: tuple[int, ...]
    """Question numbers, in the order of the options below."""
    option_offsets: Int[np.ndarray, " edge"]
    """Options of the i-th question of this batch: option_offsets[i] to option_offsets[i + 1]."""
    input_ids: Int[Tensor, "batch width"]
    position_ids: Int[Tensor, "batch width"]
    allowed: Bool[Tensor, "batch width width"] | None
    """Which key each query may see; None where the rows are ordinary causal ones."""
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

    @property
    def n_options(self) -> int:
        return len(self.stems)


def collate(trees: Mapping[int, Tree], rows: Sequence[Sequence[int]], *, packing: Packing = "tree") -> Batch:
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
    return place([trees[q] for q in order], order, starts, (ids, positions, allowed))


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
    sizes = [len(tree.paths) for tree in trees]
    return Batch(
        tuple(order), offsets_of(sizes), batch.input_ids, batch.position_ids, None, batch.answer_tokens,
        batch.answer_offsets, batch.before_tokens, batch.targets, batch.stems,
    )  # fmt: skip


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
    for tree, start in zip(trees, starts, strict=True):
        sizes.append(len(tree.paths))
        for stem, path in zip(tree.stems, tree.paths, strict=True):
            answer.append(path + start)
            before.append(np.concatenate([[stem], path[:-1]]) + start)
            lengths.append(len(path))
            stems.append(stem + start)
    tokens = torch.from_numpy(np.concatenate(answer))
    input_ids = torch.from_numpy(ids)
    return Batch(
        questions=tuple(order),
        option_offsets=offsets_of(sizes),
        input_ids=input_ids,
        position_ids=torch.from_numpy(positions),
        allowed=None if allowed is None else torch.from_numpy(allowed),
        answer_tokens=tokens,
        answer_offsets=torch.from_numpy(offsets_of(lengths)),
        before_tokens=torch.from_numpy(np.concatenate(before)),
        targets=input_ids.reshape(-1)[tokens],
        stems=torch.tensor(stems),
    )
