"""Plan which questions share a row and which rows share a batch: little padding, and no prefix computed twice.

A plan depends on token ids alone, and is made before anything runs; `batches` lays it out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from coral_lens.engine.trees import PrefixGroup, Tree, build_tree, find_prefixes, shareable_context
from coral_lens.records import Prompt

Packing = Literal["tree", "plain"]
"""`tree`: options share their context under a mask. `plain`: one ordinary causal row per option, for models that refuse."""
ROW_WIDTH = 256
"""Questions that share a prefix are put side by side up to this width: every row holds a copy of the prefix's cache."""


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
    prompts: Sequence[Prompt],
    *,
    token_budget: int,
    packing: Packing = "tree",
    border: int | None = None,
    kept: Sequence[int] | None = None,
) -> Plan:
    """Return the packing plan of prompts; it depends on their token ids alone, and on what is kept of them.

    `kept` says of each prompt how many tokens at its start are to be kept from one call to the next, mostly 0: they are a
    prefix even where nobody shares it, and a batch has one prefix.

    A question with an option beyond `border` gets a batch of its own, for models (LongRoPE) in which the longest sequence
    of a batch changes how all of it is computed; if its options lie on both sides, each of them has a row of its own.
    """
    crossing = [q for q, p in enumerate(prompts) if border is not None and longest(p) > border]
    own = [
        PlannedBatch(((q,),), (0,), plain=min(lengths(prompts[q])) <= (border or 0))
        for q in sorted(crossing, key=lambda q: -longest(prompts[q]))
    ]
    alone = set(crossing) if packing == "tree" else set(range(len(prompts)))
    known = [] if kept is None else kept_groups(prompts, {q: n for q, n in enumerate(kept) if n and q not in alone})
    alone |= {q for group in known for q in group.members}
    groups = find_prefixes([None if q in alone else shareable_context(p) for q, p in enumerate(prompts)])
    single = {q for g in groups if not g.length for q in g.members} - set(crossing)
    single -= {q for group in known for q in group.members}
    sizes = {q: tree_size(build_tree(prompts[q]), packing) for q in sorted(single)}
    rows = [[(g, row) for row in pack_rows(g, prompts)] for g in (*known, *groups) if g.length]
    together = [[row for group in rows for row in group]] if kept is None else rows
    shared = [batch for some in together for batch in batch_rows(some, prompts, token_budget=token_budget)]
    return Plan((*own, *shared, *batch_questions(sizes, token_budget=token_budget, packing=packing)), packing)


def kept_groups(prompts: Sequence[Prompt], lengths: Mapping[int, int]) -> list[PrefixGroup]:
    """Return the groups of questions whose first tokens, so many of each, are the same and are to be kept."""
    members: dict[tuple[int, ...], list[int]] = {}
    for q, n in lengths.items():
        members.setdefault((shareable_context(prompts[q]) or ())[:n], []).append(q)
    return [PrefixGroup(len(prefix), tuple(found)) for prefix, found in members.items() if prefix]


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


def pack_rows(group: PrefixGroup, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Lay the questions of a prefix group side by side, the longest first, each into the first row that has room."""
    sizes = {q: len(build_tree(prompts[q], skip=group.length)) for q in group.members}
    rows: list[list[int]] = []
    # by how much room is left, the rows that have it, the first on top: a hundred thousand rows are never looked through
    having: dict[int, list[int]] = {}
    for q in sorted(sizes, key=lambda q: (-sizes[q], q)):
        at, room = min(
            ((numbers[0], room) for room, numbers in having.items() if numbers and room >= sizes[q]),
            default=(len(rows), max(ROW_WIDTH, sizes[q])),
        )
        if at == len(rows):
            rows.append([])
        else:
            heappop(having[room])
        rows[at].append(q)
        heappush(having.setdefault(room - sizes[q], []), at)
    return [tuple(row) for row in rows]


def batch_rows(
    rows: Sequence[tuple[PrefixGroup, tuple[int, ...]]], prompts: Sequence[Prompt], *, token_budget: int
) -> list[PlannedBatch]:
    """Put rows with prefixes into batches, rows of one prefix next to each other: it is computed once."""
    batches: list[PlannedBatch] = []
    open_rows: list[tuple[PrefixGroup, tuple[int, ...]]] = []
    widths: list[int] = []

    def cost(group: PrefixGroup, width: int) -> int:
        # not told apart by their members: to hash a hundred thousand of them for each row takes minutes
        lengths = {id(g): g.length for g, _ in open_rows} | {id(group): group.length}
        prefixes = max(lengths.values()) * len(lengths) if len(lengths) > 1 else 0
        return max(width, *widths) * (len(widths) + 1) + prefixes

    def close() -> None:
        if open_rows:
            batches.append(PlannedBatch(tuple(row for _, row in open_rows), tuple(g.length for g, _ in open_rows)))
            open_rows.clear()
            widths.clear()

    for group, row in rows:
        width = sum(len(build_tree(prompts[q], skip=group.length)) for q in row)
        if open_rows and cost(group, width) > token_budget:
            close()
        open_rows.append((group, row))
        widths.append(width)
    close()
    return batches


def batch_questions(sizes: Mapping[int, int], *, token_budget: int, packing: Packing = "tree") -> list[PlannedBatch]:
    """Group questions of similar size into batches of about `token_budget` tokens, padding included.

    The longest come first: memory then peaks at the start, and the time left is never underestimated. Room left in a row
    is given to the largest question that still fits.
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
