"""Trees, plans and batches: no token twice, no question lost, and every option sees its own past and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_lens.engine import packing as packing_module
from coral_lens.engine.batches import Batch, collate, lay_out, prefix_batch, prefix_mask
from coral_lens.engine.packing import (
    ROW_WIDTH,
    Packing,
    Plan,
    PlannedBatch,
    batch_questions,
    batch_rows,
    longest,
    pack_rows,
    plan_for,
    tree_size,
)
from coral_lens.engine.trees import PrefixGroup, Tree, ancestors, build_tree, chain_of, shared_context
from coral_lens.records import Prompt

Ids = tuple[int, ...]

BRANCHING = Prompt("branching", ((1, 2),) * 4, ((5, 6), (5, 7, 8), (5,), (5, 6)))
"""Options that begin alike, an option that begins another, and two equal options."""
OWN_CONTEXTS = Prompt("own contexts", ((1, 2), (1, 3)), ((9,), (9, 8)))
"""Contexts that differ, as where the option is part of the context."""

few_tokens = st.integers(1, 3)
sequences = st.lists(few_tokens, min_size=1, max_size=5).map(tuple)


Pieces = tuple[tuple[Ids, ...], tuple[Ids, ...]]


@st.composite
def pieces(draw: st.DrawFn) -> Pieces:
    """Contexts and options over three tokens only, so that they often begin alike."""
    options = draw(st.lists(sequences, min_size=2, max_size=4))
    if draw(st.booleans()):
        contexts = [draw(sequences)] * len(options)
    else:
        contexts = draw(st.lists(sequences, min_size=len(options), max_size=len(options)))
    return tuple(contexts), tuple(options)


def made(drawn: Pieces) -> Prompt:
    # not inside the strategy: beartype draws random numbers where it checks a Prompt
    return Prompt("drawn", *drawn)


def past(tree: Tree, node: int) -> list[int]:
    """The nodes from the root to `node`, by following parents."""
    nodes = [node]
    while tree.parents[nodes[0]] >= 0:
        nodes.insert(0, int(tree.parents[nodes[0]]))
    return nodes


def sequences_of(prompt: Prompt) -> list[Ids]:
    return [context + option for context, option in zip(prompt.contexts, prompt.options, strict=True)]


# ----------------------------------------------------------------------------------------------------------- trees


def test_a_tree_holds_the_context_once_and_shared_beginnings_once() -> None:
    tree = build_tree(BRANCHING)
    assert tree.tokens.tolist() == [1, 2, 5, 6, 7, 8]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 2, 4]
    assert tree.depths.tolist() == [0, 1, 2, 3, 3, 4]
    assert [path.tolist() for path in tree.paths] == [[2, 3], [2, 4, 5], [2], [2, 3]]
    assert tree.stems == (1, 1, 1, 1)
    assert (tree.trunk, len(tree)) == (2, 6)


def test_contexts_that_differ_share_only_their_beginning() -> None:
    tree = build_tree(OWN_CONTEXTS)
    assert tree.tokens.tolist() == [1, 2, 9, 3, 9, 8]
    assert tree.parents.tolist() == [-1, 0, 1, 0, 3, 4]
    assert tree.depths.tolist() == [0, 1, 2, 1, 2, 3]
    assert [path.tolist() for path in tree.paths] == [[2], [4, 5]]
    assert (tree.stems, tree.trunk) == ((1, 3), 0)


def test_a_context_may_run_along_another_options_tokens() -> None:
    tree = build_tree(Prompt("overlap", ((1,), (1, 2)), ((2, 3), (3,))))
    assert tree.tokens.tolist() == [1, 2, 3]
    assert [path.tolist() for path in tree.paths] == [[1, 2], [2]]
    assert tree.stems == (0, 1)


def test_contexts_that_differ_at_once_give_two_roots() -> None:
    tree = build_tree(Prompt("cut", ((2, 3), (1, 2, 3)), ((7, 7), (7,))))
    assert tree.parents.tolist() == [-1, 0, 1, 2, -1, 4, 5, 6]
    assert tree.depths.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


@given(pieces())
def test_every_option_can_be_read_back_from_its_tree(drawn: Pieces) -> None:
    prompt = made(drawn)
    tree = build_tree(prompt)
    for j, (stem, path) in enumerate(zip(tree.stems, tree.paths, strict=True)):
        assert tuple(tree.tokens[past(tree, stem)]) == prompt.contexts[j]
        assert tuple(tree.tokens[path]) == prompt.options[j]
        assert past(tree, int(path[-1])) == [*past(tree, stem), *path]


@given(pieces())
def test_a_tree_has_one_node_per_distinct_beginning(drawn: Pieces) -> None:
    prompt = made(drawn)
    beginnings = {whole[:end] for whole in sequences_of(prompt) for end in range(1, len(whole) + 1)}
    tree = build_tree(prompt)
    assert len(tree) == len(beginnings)
    assert (tree.parents < np.arange(len(tree))).all()


@given(pieces())
def test_a_node_sees_itself_and_its_past(drawn: Pieces) -> None:
    prompt = made(drawn)
    tree = build_tree(prompt)
    expected = np.zeros((len(tree), len(tree)), dtype=bool)
    for node in range(len(tree)):
        expected[node, past(tree, node)] = True
    assert (ancestors(tree) == expected).all()


def test_the_chain_of_an_option_is_its_whole_sequence() -> None:
    tree = build_tree(BRANCHING)
    chain = chain_of(tree, 1)
    assert chain.tokens.tolist() == [1, 2, 5, 7, 8]
    assert chain.parents.tolist() == [-1, 0, 1, 2, 3]
    assert chain.depths.tolist() == [0, 1, 2, 3, 4]
    assert [path.tolist() for path in chain.paths] == [[2, 3, 4]]
    assert (chain.stems, chain.trunk) == ((1,), 5)


@given(pieces())
def test_chains_are_the_trees_of_single_options(drawn: Pieces) -> None:
    prompt = made(drawn)
    tree = build_tree(prompt)
    for j in range(len(tree.paths)):
        chain = chain_of(tree, j)
        alone = build_tree(Prompt("alone", (prompt.contexts[j],), (prompt.options[j],)))
        assert chain.tokens.tolist() == alone.tokens.tolist() == list(sequences_of(prompt)[j])
        assert chain.paths[0].tolist() == alone.paths[0].tolist()
        assert chain.stems == alone.stems


def test_a_question_costs_its_tree_or_the_sum_of_its_sequences() -> None:
    assert tree_size(build_tree(BRANCHING), "tree") == 6
    assert tree_size(build_tree(BRANCHING), "plain") == 4 + 5 + 3 + 4


# ----------------------------------------------------------------------------------------------------------- plans

some_sizes = st.lists(st.integers(1, 40), max_size=30).map(lambda sizes: dict(enumerate(sizes)))
some_budget = st.integers(1, 120)
either_packing = st.sampled_from(["tree", "plain"])


def rows_of(batches: Sequence[PlannedBatch]) -> list[tuple[tuple[int, ...], ...]]:
    return [batch.rows for batch in batches]


def widths_of(batch: PlannedBatch, sizes: Mapping[int, int]) -> list[int]:
    return [sum(sizes[q] for q in row) for row in batch.rows]


def test_room_left_in_a_row_goes_to_the_largest_question_that_fits() -> None:
    batches = batch_questions(dict(enumerate([10, 6, 4, 3, 9, 1])), token_budget=20)
    assert rows_of(batches) == [((0,), (4, 5)), ((1,), (2,), (3,))]
    assert [batch.prefixes for batch in batches] == [(0, 0), (0, 0, 0)]
    assert [batch.questions for batch in batches] == [(0, 4, 5), (1, 2, 3)]


def test_questions_keep_the_numbers_they_are_given() -> None:
    assert rows_of(batch_questions({7: 10, 3: 6, 12: 4}, token_budget=20)) == [((7,), (3, 12))]


def test_equal_questions_keep_their_order() -> None:
    batches = batch_questions(dict.fromkeys(range(4), 5), token_budget=10)
    assert rows_of(batches) == [((0,), (1,)), ((2,), (3,))]


def test_no_questions_need_no_batches() -> None:
    assert plan_for([], token_budget=100) == Plan((), "tree")
    assert batch_questions({}, token_budget=100) == []


@given(some_sizes, some_budget, either_packing)
def test_every_question_is_planned_exactly_once(sizes: dict[int, int], budget: int, packing: Packing) -> None:
    batches = batch_questions(sizes, token_budget=budget, packing=packing)
    assert sorted(q for batch in batches for q in batch.questions) == list(range(len(sizes)))
    assert all(batch.prefixes == (0,) * len(batch.rows) for batch in batches)


@given(some_sizes, some_budget)
def test_no_row_is_wider_than_the_longest_question_of_its_batch(sizes: dict[int, int], budget: int) -> None:
    for batch in batch_questions(sizes, token_budget=budget):
        assert max(widths_of(batch, sizes)) == max(sizes[q] for q in batch.questions)


@given(some_sizes, some_budget, either_packing)
def test_a_batch_keeps_to_the_budget_unless_one_question_alone_exceeds_it(
    sizes: dict[int, int], budget: int, packing: Packing
) -> None:
    for batch in batch_questions(sizes, token_budget=budget, packing=packing):
        assert len(batch.rows) * max(widths_of(batch, sizes)) <= budget or len(batch.rows) == 1


@given(some_sizes, some_budget, either_packing)
def test_the_longest_come_first(sizes: dict[int, int], budget: int, packing: Packing) -> None:
    batches = batch_questions(sizes, token_budget=budget, packing=packing)
    widths = [max(widths_of(batch, sizes)) for batch in batches]
    assert widths == sorted(widths, reverse=True)
    assert all(sizes[batch.rows[0][0]] == width for batch, width in zip(batches, widths, strict=True))


@given(some_sizes, some_budget)
def test_a_plan_depends_on_sizes_alone(sizes: dict[int, int], budget: int) -> None:
    backwards = dict(reversed(sizes.items()))
    assert batch_questions(sizes, token_budget=budget) == batch_questions(backwards, token_budget=budget)


@given(some_sizes, some_budget)
def test_a_plain_row_holds_one_question(sizes: dict[int, int], budget: int) -> None:
    batches = batch_questions(sizes, token_budget=budget, packing="plain")
    assert all(len(row) == 1 for batch in batches for row in batch.rows)


# ------------------------------------------------------------------------------------------------- shared prefixes


def many(token: int, n: int) -> Ids:
    return (token,) * n


def asked(name: str, context: Ids, *lengths: int) -> Prompt:
    """A question whose options are runs of different tokens, so that no two begin alike."""
    return Prompt(name, (context,) * len(lengths), tuple(many(30 + j, n) for j, n in enumerate(lengths)))


def few_shot(n: int, *, shots: Ids, size: int) -> list[Prompt]:
    """Questions that begin with the same shots and take `size` tokens besides."""
    return [asked(f"{shots[0]} {i}", (*shots, *many(60 + i, size - 3)), 1, 2) for i in range(n)]


def test_questions_that_share_a_prefix_are_laid_side_by_side_without_it() -> None:
    prompts = [*few_shot(3, shots=many(1, 100), size=50), asked("other", many(2, 40), 3, 3)]
    plan = plan_for(prompts, token_budget=1000)
    assert plan.batches == (PlannedBatch(((0, 1, 2),), (100,)), PlannedBatch(((3,),), (0,)))


def test_rows_of_a_prefix_are_filled_up_to_their_width() -> None:
    prompts = few_shot(7, shots=many(1, 100), size=ROW_WIDTH // 3)
    plan = plan_for(prompts, token_budget=10_000)
    assert plan.batches == (PlannedBatch(((0, 1, 2), (3, 4, 5), (6,)), (100,) * 3),)


def test_a_question_wider_than_a_row_has_a_row_of_its_own() -> None:
    prompts = few_shot(2, shots=many(1, 100), size=ROW_WIDTH + 1)
    assert plan_for(prompts, token_budget=10_000).batches == (PlannedBatch(((0,), (1,)), (100, 100)),)


@given(st.lists(st.integers(4, ROW_WIDTH + 9), min_size=1, max_size=60))
def test_a_question_comes_into_the_first_row_with_room(sizes: list[int]) -> None:
    prompts = [asked(str(i), many(60, 100 + size - 3), 1, 2) for i, size in enumerate(sizes)]
    rows: list[list[int]] = []
    for q in sorted(range(len(sizes)), key=lambda q: (-sizes[q], q)):
        room = (i for i, row in enumerate(rows) if sum(sizes[o] for o in row) + sizes[q] <= ROW_WIDTH)
        at = next(room, len(rows))
        rows[at:] = rows[at:] or [[]]
        rows[at].append(q)
    assert pack_rows(PrefixGroup(100, tuple(range(len(sizes)))), prompts) == [tuple(row) for row in rows]


class Counted(int):
    """A number that counts how often numbers like it are compared."""

    compared = 0

    def __le__(self, other: int) -> bool:
        Counted.compared += 1
        return int(self) <= other


class Members(tuple[int, ...]):
    """Questions that count how often they are hashed."""

    hashed = 0

    def __hash__(self) -> int:
        Members.hashed += 1
        return super().__hash__()


def test_questions_of_a_prefix_are_laid_out_without_a_look_at_all_rows_or_all_members_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hundred thousand questions after the same examples would else take minutes, and a million many hours."""
    n, size = 400, ROW_WIDTH // 2 + 1
    prompts = few_shot(n, shots=many(1, 100), size=size)
    group = PrefixGroup(100, Members(range(n)))
    monkeypatch.setattr(packing_module, "len", lambda sized: Counted(len(sized)), raising=False)
    rows = pack_rows(group, prompts)
    assert len(rows) == n, "no two fit into a row"
    assert Counted.compared < 10 * n
    monkeypatch.undo()
    assert len(batch_rows([(group, row) for row in rows], prompts, token_budget=4 * size)) == n // 4
    assert Members.hashed == 0


def test_two_prefixes_share_a_batch_where_both_fit_the_budget() -> None:
    prompts = [*few_shot(2, shots=many(1, 100), size=50), *few_shot(3, shots=many(2, 60), size=50)]
    # two rows of 150 columns, and the prefixes, padded to the longer one
    together = 2 * 150 + 2 * 100
    assert plan_for(prompts, token_budget=together).batches == (PlannedBatch(((0, 1), (2, 3, 4)), (100, 60)),)
    apart = plan_for(prompts, token_budget=together - 1).batches
    assert apart == (PlannedBatch(((0, 1),), (100,)), PlannedBatch(((2, 3, 4),), (60,)))


def test_a_prefix_of_many_questions_goes_on_over_several_batches() -> None:
    prompts = few_shot(7, shots=many(1, 100), size=ROW_WIDTH // 3)
    plan = plan_for(prompts, token_budget=ROW_WIDTH)
    assert [batch.rows for batch in plan.batches] == [((0, 1, 2),), ((3, 4, 5),), ((6,),)]
    assert {batch.prefixes for batch in plan.batches} == {(100,)}


def test_plain_packing_and_contexts_of_their_own_have_no_prefix() -> None:
    prompts = few_shot(4, shots=many(1, 100), size=20)
    assert all(set(batch.prefixes) == {0} for batch in plan_for(prompts, token_budget=500, packing="plain").batches)
    own = [replace(p, contexts=(p.contexts[0], (*p.contexts[0], 9))) for p in prompts]
    assert [shared_context(p) for p in own] == [None] * 4
    assert all(set(batch.prefixes) == {0} for batch in plan_for(own, token_budget=500).batches)


def test_a_question_beyond_the_border_has_a_batch_of_its_own() -> None:
    shots = many(1, 100)
    below = few_shot(3, shots=shots, size=20)
    # the context is the same length, but one option reaches further
    at, beyond, far = (asked(str(n), (*shots, 50, 51), 2, n) for n in (18, 19, 60))
    assert [longest(p) for p in (at, beyond, far)] == [120, 121, 162]
    prompts = [below[0], beyond, below[1], far, at, below[2]]
    plan = plan_for(prompts, token_budget=10_000, border=120)
    assert plan.batches[:2] == (PlannedBatch(((3,),), (0,), plain=True), PlannedBatch(((1,),), (0,), plain=True))
    (rest,) = plan.batches[2:]
    assert sorted(rest.questions) == [0, 2, 4, 5]
    assert set(rest.prefixes) == {100}
    assert len(plan_for(prompts, token_budget=10_000, border=None).batches) == 1


def test_only_a_question_on_both_sides_of_the_border_has_plain_rows() -> None:
    both, beyond = asked("both", many(1, 10), 2, 3), asked("beyond", many(1, 20), 2, 3)
    plan = plan_for([both, beyond], token_budget=10_000, border=12)
    assert plan.batches == (PlannedBatch(((1,),), (0,)), PlannedBatch(((0,),), (0,), plain=True))
    rows = [lay_out([both, beyond], batch).lengths.tolist() for batch in plan.batches]
    assert rows == [[len(build_tree(beyond))], [12, 13]]


def test_a_border_holds_for_plain_rows_too() -> None:
    prompts = [asked("a", many(1, 10), 1, 2), asked("b", many(2, 10), 1, 9), asked("c", many(3, 10), 1, 2)]
    plan = plan_for(prompts, token_budget=10_000, packing="plain", border=12)
    assert rows_of(plan.batches) == [((1,),), ((0,), (2,))]


def test_a_tree_without_its_prefix_keeps_its_positions() -> None:
    whole, rest = build_tree(BRANCHING), build_tree(BRANCHING, skip=1)
    assert rest.tokens.tolist() == whole.tokens[1:].tolist()
    assert rest.depths.tolist() == whole.depths[1:].tolist()
    assert rest.parents.tolist() == (whole.parents[1:] - 1).tolist()
    assert [path.tolist() for path in rest.paths] == [[1, 2], [1, 3, 4], [1], [1, 2]]
    assert (rest.stems, rest.trunk) == ((0,) * 4, 1)


def test_a_batch_with_two_prefixes_worked_by_hand() -> None:
    prompts = [
        Prompt("a", ((1, 2, 3),) * 2, ((5,), (6, 7))),
        Prompt("b", ((8, 9),) * 2, ((5,), (6,))),
        Prompt("c", ((1, 2, 4),) * 2, ((5,), (6,))),
    ]
    batch = lay_out(prompts, PlannedBatch(((0,), (1,), (2,)), (2, 1, 2)))
    assert batch.prefixes == ((1, 2), (8,))
    assert batch.row_prefix == (0, 1, 0)
    assert batch.input_ids.tolist() == [[3, 5, 6, 7], [9, 5, 6, 0], [4, 5, 6, 0]]
    assert batch.position_ids.tolist() == [[2, 3, 3, 4], [1, 2, 2, 0], [2, 3, 3, 0]]
    assert batch.lengths.tolist() == [4, 3, 3]
    assert batch.answer_tokens.tolist() == [1, 2, 3, 5, 6, 9, 10]
    assert batch.before_tokens.tolist() == [0, 0, 2, 4, 4, 8, 8]
    assert batch.stems.tolist() == [0, 0, 4, 4, 8, 8]
    assert batch.names == ("a", "b", "c")
    assert batch.allowed is not None
    # the second prefix is one token shorter: its padding is seen by nobody
    assert batch.allowed[0].int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1, 1],
    ]
    assert batch.allowed[1].int().tolist() == [
        [1, 0, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 0, 0, 0, 0, 1],
    ]


def test_the_prefixes_as_a_batch_have_no_options() -> None:
    batch = prefix_batch([(1, 2, 3), (8,)])
    assert batch.input_ids.tolist() == [[1, 2, 3], [8, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2]] * 2
    assert batch.lengths.tolist() == [3, 1]
    assert (batch.n_options, batch.questions, batch.names) == (0, (), ())
    assert batch.option_offsets.tolist() == batch.answer_offsets.tolist() == [0]


def test_a_row_sees_all_of_its_prefix_and_nothing_after_it() -> None:
    mask = prefix_mask([(1, 2, 3), (8,), ()], 2)
    assert mask.astype(int).tolist() == [[[1, 1, 1]] * 2, [[1, 0, 0]] * 2, [[0, 0, 0]] * 2]


long_blocks = st.lists(st.tuples(st.sampled_from([1, 33, 50, 97]), few_tokens), min_size=1, max_size=3)
long_pieces = st.tuples(long_blocks, st.lists(sequences, min_size=2, max_size=3))


def made_long(drawn: Sequence[tuple[list[tuple[int, int]], list[Ids]]]) -> list[Prompt]:
    """Prompts whose contexts are long enough to have prefixes."""
    return [
        Prompt(f"{i}", (tuple(t for n, t in blocks for _ in range(n)),) * len(options), tuple(options))
        for i, (blocks, options) in enumerate(drawn)
    ]


@settings(max_examples=50)
@given(st.lists(long_pieces, max_size=12), st.integers(20, 900), st.none() | st.integers(30, 200))
def test_a_plan_with_prefixes_holds_every_question_once_and_keeps_to_its_limits(
    drawn: list[Any], budget: int, border: int | None
) -> None:
    prompts = made_long(drawn)
    plan = plan_for(prompts, token_budget=budget, border=border)
    assert sorted(q for batch in plan.batches for q in batch.questions) == list(range(len(prompts)))
    assert plan == plan_for(prompts, token_budget=budget, border=border)
    for batch in plan.batches:
        laid = lay_out(prompts, batch)
        n_rows, width = laid.input_ids.shape
        apart = sum(len(p) > 0 for p in laid.prefixes) > 1
        extra = len(laid.prefixes) * max(map(len, laid.prefixes)) if apart else 0
        assert n_rows == 1 or n_rows * width + extra <= budget
        crossing = [q for q in batch.questions if border is not None and longest(prompts[q]) > border]
        assert not crossing or batch.questions == (crossing[0],)


# --------------------------------------------------------------------------------------------------------- batches


def test_a_batch_worked_by_hand() -> None:
    trees = {7: build_tree(OWN_CONTEXTS), 3: build_tree(Prompt("short", ((4,),) * 2, ((5,), (6,))))}
    batch = collate(trees, [(7,), (3,)])
    assert batch.questions == (7, 3)
    assert batch.option_offsets.tolist() == [0, 2, 4]
    assert batch.input_ids.tolist() == [[1, 2, 9, 3, 9, 8], [4, 5, 6, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 1, 2, 3], [0, 1, 1, 0, 0, 0]]
    assert batch.lengths.tolist() == [6, 3]
    assert batch.answer_tokens.tolist() == [2, 4, 5, 7, 8]
    assert batch.answer_offsets.tolist() == [0, 1, 3, 4, 5]
    assert batch.before_tokens.tolist() == [1, 3, 4, 6, 6]
    assert batch.targets.tolist() == [9, 9, 8, 5, 6]
    assert batch.stems.tolist() == [1, 3, 6, 6]
    assert batch.n_options == 4
    assert batch.allowed is not None
    assert batch.allowed[1].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_a_plain_batch_worked_by_hand() -> None:
    trees = {7: build_tree(OWN_CONTEXTS), 3: build_tree(Prompt("short", ((4,),) * 2, ((5,), (6,))))}
    batch = collate(trees, [(7,), (3,)], packing="plain")
    assert batch.questions == (7, 3)
    assert batch.option_offsets.tolist() == [0, 2, 4]
    assert batch.input_ids.tolist() == [[1, 2, 9, 0], [1, 3, 9, 8], [4, 5, 0, 0], [4, 6, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 4
    assert batch.lengths.tolist() == [3, 4, 2, 2]
    assert batch.allowed is None
    assert batch.answer_tokens.tolist() == [2, 6, 7, 9, 13]
    assert batch.before_tokens.tolist() == [1, 5, 6, 8, 12]
    assert batch.targets.tolist() == [9, 9, 8, 5, 6]
    assert batch.stems.tolist() == [1, 5, 8, 12]


def options_of(batch: Batch) -> list[tuple[list[int], list[int], list[int], int]]:
    """For each option: flat positions of its tokens and of their predictors, its targets, its stem."""
    edges = batch.answer_offsets.tolist()
    return [
        (
            batch.answer_tokens[start:end].tolist(),
            batch.before_tokens[start:end].tolist(),
            batch.targets[start:end].tolist(),
            int(stem),
        )
        for start, end, stem in zip(edges[:-1], edges[1:], batch.stems, strict=True)
    ]


def seen_by(batch: Batch, flat: int) -> tuple[list[tuple[int, int]], list[int]]:
    """The (position, token) pairs that a position attends to, in order, and the flat positions of those in its row."""
    width = batch.input_ids.shape[1]
    row, column = divmod(flat, width)
    ids, positions = batch.input_ids.reshape(-1).tolist(), batch.position_ids.reshape(-1).tolist()
    if batch.allowed is None:
        own, cached = list(range(row * width, flat + 1)), ()
    else:
        n_cached = batch.allowed.shape[2] - width
        keys = batch.allowed[row, column].nonzero()[:, 0].tolist()
        own = sorted((row * width + key - n_cached for key in keys if key >= n_cached), key=lambda at: positions[at])
        cached = batch.prefixes[batch.row_prefix[row]] if n_cached else ()
        assert [key for key in keys if key < n_cached] == list(range(len(cached)))
    return [*enumerate(cached), *((positions[at], ids[at]) for at in own)], own


def assert_every_answer_token_sees_its_past(prompts: Sequence[Prompt], plan: Plan) -> None:
    for planned in plan.batches:
        batch = lay_out(prompts, planned, packing=plan.packing)
        assert batch.questions == planned.questions
        assert batch.names == tuple(prompts[q].id for q in batch.questions)
        expected = [(prompts[q], j) for q in batch.questions for j in range(len(prompts[q].options))]
        assert np.diff(batch.option_offsets).tolist() == [len(prompts[q].options) for q in batch.questions]
        for (answer, before, targets, stem), (prompt, j) in zip(options_of(batch), expected, strict=True):
            context, option = prompt.contexts[j], prompt.options[j]
            assert tuple(targets) == option
            assert before == [stem, *answer[:-1]]
            whole, own = seen_by(batch, answer[-1])
            assert whole == list(enumerate(context + option))
            assert own[-len(option) - 1 :] == [stem, *answer]


@settings(max_examples=50)
@given(st.lists(pieces(), min_size=1, max_size=6), st.integers(5, 60), either_packing)
def test_every_answer_token_sees_exactly_its_own_past(drawn: list[Pieces], budget: int, packing: Packing) -> None:
    prompts = [made(pair) for pair in drawn]
    assert_every_answer_token_sees_its_past(prompts, plan_for(prompts, token_budget=budget, packing=packing))


@settings(max_examples=50)
@given(st.lists(long_pieces, min_size=1, max_size=8), st.integers(20, 900), either_packing)
def test_every_answer_token_sees_its_prefix_too(drawn: list[Any], budget: int, packing: Packing) -> None:
    prompts = made_long(drawn)
    assert_every_answer_token_sees_its_past(prompts, plan_for(prompts, token_budget=budget, packing=packing))


@settings(max_examples=50)
@given(st.lists(pieces(), min_size=1, max_size=6), st.integers(5, 60))
def test_padding_attends_to_itself_alone_and_nothing_attends_to_padding(drawn: list[Pieces], budget: int) -> None:
    some = [made(pair) for pair in drawn]
    for planned in plan_for(some, token_budget=budget).batches:
        batch = lay_out(some, planned)
        assert batch.allowed is not None
        for r, row in enumerate(planned.rows):
            used = sum(len(build_tree(some[q])) for q in row)
            width = batch.input_ids.shape[1]
            assert (batch.allowed[r, used:].numpy() == np.eye(width, dtype=bool)[used:]).all()
            assert not batch.allowed[r, :used, used:].any()


@pytest.mark.parametrize("packing", ["tree", "plain"])
def test_collating_twice_gives_the_same_batch(packing: Packing) -> None:
    trees = {0: build_tree(BRANCHING), 1: build_tree(OWN_CONTEXTS)}
    first, second = (asdict(collate(trees, [(0,), (1,)], packing=packing)) for _ in range(2))
    for name, value in first.items():
        assert np.array_equal(np.asarray(value), np.asarray(second[name])), name
