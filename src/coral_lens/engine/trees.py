"""What token sequences have in common, from their ids alone. Nothing here runs a model.

The tree of a question holds its context once and every option after it; options that begin with the same tokens share them
too. A prefix that many questions share (few-shot examples, an article) is worth computing once and keeping as a key-value
cache: only what each question adds to it is then left to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Int

from coral_lens.records import Prompt

SHORTEST = 32
"""A shorter prefix is not worth a pass of its own."""
LEAST_SAVED = 96
"""Tokens that a group must save."""
Ids = tuple[int, ...]


# ----------------------------------------------------------------------------------------------- the tree of a question


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
    listed: tuple[Int[np.ndarray, " _"], ...] = ()
    """For each option, the nodes of its text where the context lists it; empty where nobody reads them."""

    def __len__(self) -> int:
        return len(self.tokens)


def shared_context(prompt: Prompt) -> tuple[int, ...] | None:
    """Return the context of all options, or None where they differ."""
    first = prompt.contexts[0]
    return first if all(c is first or c == first for c in prompt.contexts) else None


def shareable_context(prompt: Prompt) -> tuple[int, ...] | None:
    """Return what other questions may share of the context of all options: where listed options are read, not their list."""
    context = shared_context(prompt)
    if context is None or not prompt.listed:
        return context
    return context[: min(start for start, _ in prompt.listed) + 1]


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

    paths, stems, listed = [], [], []
    for j, (context, option) in enumerate(zip(prompt.contexts, prompt.options, strict=True)):
        before = range(-skip, len(trunk)) if trunk else walk(-1, context)
        stems.append(before[-1])
        paths.append(np.array(walk(stems[-1], option), dtype=np.int64))
        if prompt.listed:
            listed.append(np.array(before[slice(*prompt.listed[j])], dtype=np.int64))
            assert listed[-1].min() >= 0, "what is read is in no prefix that is computed apart"
    return Tree(
        tokens=np.array(tokens, dtype=np.int64),
        parents=np.array(parents, dtype=np.int64),
        depths=np.array(depths, dtype=np.int64),
        trunk=len(trunk),
        paths=tuple(paths),
        stems=tuple(stems),
        name=prompt.id,
        listed=tuple(listed),
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


def chain_of(tree: Tree, option: int) -> Tree:
    """Return one option's whole sequence as a tree without branches."""
    path = tree.paths[option]
    nodes, node = [], tree.stems[option]
    while node >= 0:
        nodes.append(node)
        node = int(tree.parents[node])
    nodes = [*nodes[::-1], *path.tolist()]
    n = len(nodes)
    own = np.arange(n - len(path), n)
    # the nodes of a path ascend, so that their places in it are found by bisection
    listed = (np.searchsorted(nodes, tree.listed[option]),) if tree.listed else ()
    return Tree(tree.tokens[nodes], np.arange(-1, n - 1), np.arange(n), n, (own,), (int(own[0]) - 1,), listed=listed)


# ---------------------------------------------------------------------------------------- prefixes that questions share


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Prompts that begin with the same `length` tokens; 0 for prompts on their own."""

    length: int
    members: tuple[int, ...]


def find_prefixes(contexts: Sequence[Ids | None]) -> list[PrefixGroup]:
    """Partition prompts into groups with the prefixes that save the most tokens.

    `contexts` holds each prompt's shared context, or None where its options have contexts of their own. The last context
    token is never part of a prefix, because it predicts the options. In sorted order, the prefix of a run of contexts is
    that of its first and last, so every candidate group is a run, and runs nest.
    """
    order = sorted((i for i, c in enumerate(contexts) if c is not None), key=lambda i: contexts[i] or ())
    ids = [contexts[i] or () for i in order]
    steps = [common_length(a, b) for a, b in pairwise(ids)]
    groups: list[PrefixGroup] = []
    alone = [i for i, c in enumerate(contexts) if c is None]
    for low, high, length in best_runs(ids, steps):
        if length:
            groups.append(PrefixGroup(length, tuple(sorted(order[low:high]))))
        else:
            alone += order[low:high]
    if alone:
        groups.append(PrefixGroup(0, tuple(sorted(alone))))
    return sorted(groups, key=lambda g: (-g.length, g.members))


def common_length(a: Ids, b: Ids) -> int:
    """Return how many tokens two contexts share at their start, leaving at least one token of each."""
    n = min(len(a), len(b)) - 1
    if a[:n] == b[:n]:
        return max(n, 0)
    low, high = 0, n  # a[:low] equals b[:low], a[:high] does not equal b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle)
    return low


def best_runs(ids: Sequence[Ids], steps: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the runs (from, to, prefix length) that together save the most tokens; length 0 where nothing is saved."""
    runs = nested_runs(len(ids), steps)
    saved = [0] * len(runs)
    whole = [False] * len(runs)
    for i, (low, high, length, inner) in reversed(list(enumerate(runs))):
        own, parts = (high - low - 1) * length, sum(saved[j] for j in inner)
        whole[i] = length >= SHORTEST and own >= max(LEAST_SAVED, parts)
        saved[i] = own if whole[i] else parts
    best: list[tuple[int, int, int]] = []
    stack = [0] if runs else []
    while stack:
        i = stack.pop()
        low, high, length, inner = runs[i]
        if whole[i] or not saved[i]:
            best.append((low, high, length if whole[i] else 0))
        else:
            stack += inner
    return best


def nested_runs(n: int, steps: Sequence[int]) -> list[tuple[int, int, int, range]]:
    """Return every candidate run with its prefix length and the numbers of the runs that it falls into, which follow it."""
    todo = [(0, n)] if n else []
    runs: list[tuple[int, int, int, range]] = []
    while len(runs) < len(todo):
        low, high = todo[len(runs)]
        length = min(steps[low : high - 1], default=0)
        cuts = [low, *(i + 1 for i in range(low, high - 1) if steps[i] == length), high]
        parts = list(pairwise(cuts)) if high - low > 1 else []
        runs.append((low, high, length, range(len(todo), len(todo) + len(parts))))
        todo += parts
    return runs
