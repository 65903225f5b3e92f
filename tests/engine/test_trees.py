"""Prefixes are found from token ids alone: every prompt once, never a token that is not shared, and the most is saved."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral_lens.engine.trees import LEAST_SAVED, SHORTEST, PrefixGroup, common_length, find_prefixes

Ids = tuple[int, ...]


def run_of(n: int, token: int) -> Ids:
    return (token,) * n


def groups_of(contexts: Sequence[Ids | None]) -> list[tuple[int, tuple[int, ...]]]:
    return [(group.length, group.members) for group in find_prefixes(contexts)]


def saving(groups: Sequence[PrefixGroup]) -> int:
    """Tokens that need not be computed: all but one of the members skip the prefix."""
    return sum((len(group.members) - 1) * group.length for group in groups)


# --------------------------------------------------------------------------------------------------- worked by hand


def test_two_groups_and_a_prompt_on_its_own() -> None:
    shots, article = run_of(100, 1), run_of(60, 2)
    contexts = [(*shots, 7, 8), (*article, 7), (*shots, 9), (5, 5), (*article, 8, 8), (*article, 9)]
    assert groups_of(contexts) == [(100, (0, 2)), (60, (1, 4, 5)), (0, (3,))]


def test_the_longer_prefix_of_a_few_is_taken_where_it_saves_more() -> None:
    description = run_of(40, 1)
    first, second = description + run_of(200, 2), description + run_of(150, 3)
    contexts = [(*first, 7), (*second, 7), (*first, 8), (*second, 8)]
    # one group would save 3 * 40 tokens, two save 240 + 190
    assert groups_of(contexts) == [(240, (0, 2)), (190, (1, 3))]


def test_the_shorter_prefix_of_many_is_taken_where_it_saves_more() -> None:
    description = run_of(100, 1)
    contexts = [(*description, *run_of(10, token), end) for token in (2, 3, 4) for end in (7, 8)]
    # one group saves 5 * 100 tokens, three would save 110 each
    assert groups_of(contexts) == [(100, (0, 1, 2, 3, 4, 5))]


def test_parts_that_save_too_little_each_do_not_break_up_a_group() -> None:
    description = run_of(40, 1)
    contexts = [(*description, *run_of(25, token), end) for token in (2, 3) for end in (7, 8)]
    # two groups would save 65 + 65, more than the 3 * 40 of one, but none of them is worth a pass of its own
    assert 65 < LEAST_SAVED < 3 * 40 < 65 + 65
    assert groups_of(contexts) == [(40, (0, 1, 2, 3))]


def test_the_best_prefix_may_lie_two_levels_down() -> None:
    top, middle = run_of(50, 1), run_of(3, 2)
    deep = [(*top, *middle, *run_of(300, token), end) for token in (3, 4) for end in (7, 8)]
    contexts = [*deep, *((*top, token) for token in (5, 6))]
    # one group of six saves 5 * 50, one of the four 3 * 53, two of two 353 each
    assert groups_of(contexts) == [(353, (0, 1)), (353, (2, 3)), (0, (4, 5))]


def test_nothing_shared_means_one_group_without_a_prefix() -> None:
    assert groups_of([(token, *run_of(200, 9)) for token in range(5)]) == [(0, (0, 1, 2, 3, 4))]
    assert groups_of([(1, 2, 3)]) == [(0, (0,))]
    assert groups_of([]) == []


def test_a_prefix_shorter_than_the_shortest_is_left_alone_however_many_share_it() -> None:
    contexts = [(*run_of(SHORTEST - 1, 1), token, 9) for token in range(50)]
    assert groups_of(contexts) == [(0, tuple(range(50)))]
    assert groups_of([(1, *context) for context in contexts]) == [(SHORTEST, tuple(range(50)))]


def test_a_prefix_must_save_enough_to_be_worth_a_pass() -> None:
    too_short, enough = run_of(LEAST_SAVED - 1, 1), run_of(LEAST_SAVED, 1)
    assert groups_of([(*too_short, 7, 9), (*too_short, 8, 9)]) == [(0, (0, 1))]
    assert groups_of([(*enough, 7, 9), (*enough, 8, 9)]) == [(LEAST_SAVED, (0, 1))]


def test_identical_contexts_keep_their_last_token_out_of_the_prefix() -> None:
    assert groups_of([run_of(120, 1)] * 3) == [(119, (0, 1, 2))]


def test_a_context_that_begins_another_keeps_its_last_token_out_of_the_prefix() -> None:
    short = run_of(120, 1)
    assert groups_of([(*short, 5, 6, 7), short, (*short, 5, 6, 8)]) == [(119, (0, 1, 2))]


def test_prompts_without_a_shared_context_stay_alone() -> None:
    shots = run_of(200, 1)
    assert groups_of([None, (*shots, 5), None, (*shots, 6)]) == [(200, (1, 3)), (0, (0, 2))]
    assert groups_of([None, None]) == [(0, (0, 1))]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((1, 2, 3), (1, 2, 4), 2),
        ((1, 2, 3), (1, 2, 3), 2),
        ((1, 2, 3), (1, 2, 3, 4, 5), 2),
        ((1, 2, 3, 4), (1, 9, 3, 4), 1),
        ((1,), (1, 2), 0),
        ((2, 2), (3, 2), 0),
        ((), (1, 2), 0),
    ],
)
def test_what_two_contexts_share_leaves_a_token_of_each(a: Ids, b: Ids, expected: int) -> None:
    assert common_length(a, b) == common_length(b, a) == expected


# ------------------------------------------------------------------------------------------------------- properties

blocks = st.lists(st.tuples(st.sampled_from([1, 2, 9, 20, 33, 50, 101]), st.integers(1, 3)), min_size=1, max_size=4)
"""Runs of equal tokens: contexts of few long blocks often begin alike, and end at the border of a block."""
some_contexts = st.lists(
    st.none() | blocks.map(lambda drawn: tuple(token for n, token in drawn for _ in range(n))), max_size=14
)


@given(some_contexts)
def test_every_prompt_is_in_exactly_one_group(contexts: list[Ids | None]) -> None:
    groups = find_prefixes(contexts)
    assert sorted(i for group in groups for i in group.members) == list(range(len(contexts)))
    assert all(list(group.members) == sorted(group.members) for group in groups)
    assert sum(group.length == 0 for group in groups) <= 1


@given(some_contexts)
def test_members_share_their_prefix_and_have_a_token_after_it(contexts: list[Ids | None]) -> None:
    for length, members in groups_of(contexts):
        if length:
            some = [contexts[i] for i in members]
            assert len({context[:length] for context in some if context is not None}) == 1
            assert all(context is not None and len(context) > length for context in some)


@given(some_contexts)
def test_a_prefix_is_as_long_as_its_members_allow(contexts: list[Ids | None]) -> None:
    for length, members in groups_of(contexts):
        if length:
            some = [contexts[i] or () for i in members]
            assert length == min(common_length(a, b) for a in some for b in some if a is not b)


@given(some_contexts)
def test_no_prefix_is_too_short_or_saves_too_little(contexts: list[Ids | None]) -> None:
    for group in find_prefixes(contexts):
        assert group.length == 0 or group.length >= SHORTEST
        assert group.length == 0 or saving([group]) >= LEAST_SAVED


@given(some_contexts)
def test_no_single_group_would_save_more(contexts: list[Ids | None]) -> None:
    """Nor would no group at all: what is saved is never negative."""
    found = saving(find_prefixes(contexts))
    known = [context for context in contexts if context is not None]
    for end in {context[:n] for context in known for n in range(SHORTEST, len(context))}:
        alone = (sum(c[: len(end)] == end and len(c) > len(end) for c in known) - 1) * len(end)
        assert found >= alone or alone < LEAST_SAVED
    assert found >= 0


def most_saved(ids: Sequence[Ids]) -> int:
    """Every choice of disjoint groups is tried, where a group is all contexts that go on after the same tokens."""
    beginnings = {context[:n] for context in ids for n in range(SHORTEST, len(context))}
    sharing: dict[frozenset[int], int] = {}
    for begin in beginnings:
        members = frozenset(i for i, c in enumerate(ids) if c[: len(begin)] == begin and len(c) > len(begin))
        sharing[members] = max(sharing.get(members, 0), len(begin))
    worth = {m: (len(m) - 1) * n for m, n in sharing.items() if (len(m) - 1) * n >= LEAST_SAVED}
    choices = (some for k in range(len(worth) + 1) for some in combinations(worth, k))
    return max(sum(worth[m] for m in some) for some in choices if sum(map(len, some)) == len(frozenset().union(*some)))


@given(some_contexts.map(lambda contexts: contexts[:8]))
def test_no_other_choice_of_groups_would_save_more(contexts: list[Ids | None]) -> None:
    assert saving(find_prefixes(contexts)) == most_saved([c for c in contexts if c is not None])


@given(some_contexts, st.randoms(use_true_random=False))
def test_the_order_of_prompts_does_not_change_the_prefixes(contexts: list[Ids | None], random: st.randoms) -> None:
    order = list(range(len(contexts)))
    random.shuffle(order)
    shuffled = find_prefixes([contexts[i] for i in order])
    named = sorted((g.length, tuple(sorted(order[i] for i in g.members))) for g in shuffled)
    # equal contexts may change places, so groups are compared by what they hold
    held = [(length, sorted(repr(contexts[i]) for i in members)) for length, members in named]
    assert sorted(held) == sorted((n, sorted(repr(contexts[i]) for i in members)) for n, members in groups_of(contexts))
