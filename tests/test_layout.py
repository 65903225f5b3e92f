"""Trees, plans and batches: no token twice, no question lost, and every option sees its own past and nothing else."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral_lens.engine import plan_for, tree_size
from coral_lens.layout import Batch, Packing, Tree, ancestors, build_tree, chain_of, collate, make_plan
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
    chain = chain_of(tree, tree.stems[1], tree.paths[1])
    assert chain.tokens.tolist() == [1, 2, 5, 7, 8]
    assert chain.parents.tolist() == [-1, 0, 1, 2, 3]
    assert chain.depths.tolist() == [0, 1, 2, 3, 4]
    assert [path.tolist() for path in chain.paths] == [[2, 3, 4]]
    assert (chain.stems, chain.trunk) == ((1,), 5)


@given(pieces())
def test_chains_are_the_trees_of_single_options(drawn: Pieces) -> None:
    prompt = made(drawn)
    tree = build_tree(prompt)
    for j, (stem, path) in enumerate(zip(tree.stems, tree.paths, strict=True)):
        chain = chain_of(tree, stem, path)
        alone = build_tree(Prompt("alone", (prompt.contexts[j],), (prompt.options[j],)))
        assert chain.tokens.tolist() == alone.tokens.tolist() == list(sequences_of(prompt)[j])
        assert chain.paths[0].tolist() == alone.paths[0].tolist()
        assert chain.stems == alone.stems


def test_a_question_costs_its_tree_or_the_sum_of_its_sequences() -> None:
    assert tree_size(build_tree(BRANCHING), "tree") == 6
    assert tree_size(build_tree(BRANCHING), "plain") == 4 + 5 + 3 + 4


# ----------------------------------------------------------------------------------------------------------- plans

some_sizes = st.lists(st.integers(1, 40), max_size=30)
some_budget = st.integers(1, 120)
either_packing = st.sampled_from(["tree", "plain"])


def test_room_left_in_a_row_goes_to_the_largest_question_that_fits() -> None:
    plan = make_plan([10, 6, 4, 3, 9, 1], token_budget=20)
    assert plan.batches == (((0,), (4, 5)), ((1,), (2,), (3,)))


def test_equal_questions_keep_their_order() -> None:
    assert make_plan([5, 5, 5, 5], token_budget=10).batches == (((0,), (1,)), ((2,), (3,)))


def test_no_questions_need_no_batches() -> None:
    assert plan_for([]).batches == ()


@given(some_sizes, some_budget, either_packing)
def test_every_question_is_planned_exactly_once(sizes: list[int], budget: int, packing: Packing) -> None:
    plan = make_plan(sizes, token_budget=budget, packing=packing)
    assert sorted(q for rows in plan.batches for row in rows for q in row) == list(range(len(sizes)))
    assert plan.packing == packing


@given(some_sizes, some_budget)
def test_no_row_is_wider_than_the_longest_question_of_its_batch(sizes: list[int], budget: int) -> None:
    for rows in make_plan(sizes, token_budget=budget).batches:
        width = max(sizes[q] for row in rows for q in row)
        assert max(sum(sizes[q] for q in row) for row in rows) == width


@given(some_sizes, some_budget, either_packing)
def test_a_batch_keeps_to_the_budget_unless_one_question_alone_exceeds_it(
    sizes: list[int], budget: int, packing: Packing
) -> None:
    for rows in make_plan(sizes, token_budget=budget, packing=packing).batches:
        width = max(sizes[q] for row in rows for q in row)
        assert len(rows) * width <= budget or len(rows) == 1


@given(some_sizes, some_budget, either_packing)
def test_the_longest_come_first(sizes: list[int], budget: int, packing: Packing) -> None:
    batches = make_plan(sizes, token_budget=budget, packing=packing).batches
    widths = [max(sizes[q] for row in rows for q in row) for rows in batches]
    assert widths == sorted(widths, reverse=True)
    assert all(sizes[rows[0][0]] == width for rows, width in zip(batches, widths, strict=True))


@given(some_sizes, some_budget)
def test_a_plan_depends_on_sizes_alone(sizes: list[int], budget: int) -> None:
    assert make_plan(sizes, token_budget=budget) == make_plan(list(sizes), token_budget=budget)


@given(some_sizes, some_budget)
def test_a_plain_row_holds_one_question(sizes: list[int], budget: int) -> None:
    plan = make_plan(sizes, token_budget=budget, packing="plain")
    assert all(len(row) == 1 for rows in plan.batches for row in rows)


# --------------------------------------------------------------------------------------------------------- batches


def test_a_batch_worked_by_hand() -> None:
    trees = {7: build_tree(OWN_CONTEXTS), 3: build_tree(Prompt("short", ((4,),) * 2, ((5,), (6,))))}
    batch = collate(trees, [(7,), (3,)])
    assert batch.questions == (7, 3)
    assert batch.option_offsets.tolist() == [0, 2, 4]
    assert batch.input_ids.tolist() == [[1, 2, 9, 3, 9, 8], [4, 5, 6, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 1, 2, 3], [0, 1, 1, 0, 0, 0]]
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


def seen_by(batch: Batch, flat: int) -> list[int]:
    """The flat positions that a position attends to, in the order of their position ids."""
    width = batch.input_ids.shape[1]
    row, column = divmod(flat, width)
    if batch.allowed is None:
        return list(range(row * width, flat + 1))
    keys = batch.allowed[row, column].nonzero()[:, 0].tolist()
    return sorted((row * width + key for key in keys), key=lambda at: int(batch.position_ids.reshape(-1)[at]))


@given(st.lists(pieces(), min_size=1, max_size=6), st.integers(5, 60), either_packing)
def test_every_answer_token_sees_exactly_its_own_past(drawn: list[Pieces], budget: int, packing: Packing) -> None:
    some = [made(pair) for pair in drawn]
    for rows in plan_for(some, token_budget=budget, packing=packing).batches:
        trees = {q: build_tree(some[q]) for row in rows for q in row}
        batch = collate(trees, rows, packing=packing)
        ids, positions = batch.input_ids.reshape(-1), batch.position_ids.reshape(-1)
        expected = [(some[q], j) for q in batch.questions for j in range(len(some[q].options))]
        assert np.diff(batch.option_offsets).tolist() == [len(some[q].options) for q in batch.questions]
        for (answer, before, targets, stem), (prompt, j) in zip(options_of(batch), expected, strict=True):
            context, option = prompt.contexts[j], prompt.options[j]
            assert tuple(targets) == option
            assert before == [stem, *answer[:-1]]
            whole = seen_by(batch, answer[-1])
            assert tuple(ids[whole].tolist()) == context + option
            assert positions[whole].tolist() == list(range(len(whole)))
            assert whole[len(context) - 1 :] == [stem, *answer]


@given(st.lists(pieces(), min_size=1, max_size=6), st.integers(5, 60))
def test_padding_attends_to_itself_alone_and_nothing_attends_to_padding(drawn: list[Pieces], budget: int) -> None:
    some = [made(pair) for pair in drawn]
    for rows in plan_for(some, token_budget=budget).batches:
        trees = {q: build_tree(some[q]) for row in rows for q in row}
        batch = collate(trees, rows)
        assert batch.allowed is not None
        for r, row in enumerate(rows):
            used = sum(len(trees[q]) for q in row)
            width = batch.input_ids.shape[1]
            assert (batch.allowed[r, used:].numpy() == np.eye(width, dtype=bool)[used:]).all()
            assert not batch.allowed[r, :used, used:].any()


@pytest.mark.parametrize("packing", ["tree", "plain"])
def test_collating_twice_gives_the_same_batch(packing: Packing) -> None:
    trees = {0: build_tree(BRANCHING), 1: build_tree(OWN_CONTEXTS)}
    first, second = (asdict(collate(trees, [(0,), (1,)], packing=packing)) for _ in range(2))
    for name, value in first.items():
        assert np.array_equal(np.asarray(value), np.asarray(second[name])), name
