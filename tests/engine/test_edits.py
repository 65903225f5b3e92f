"""Edits act where they say and nowhere else: as a hook on an ordinary pass of each option would."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.models import cast_weights, make_model
from support.plain_passes import hook_counts, logprobs_of, options, plain_logprob, ragged_prompts, run
from torch import Tensor

from coral_lens.engine.batches import Batch, collate, prefix_batch
from coral_lens.engine.edits import AddDirection, EditPlace, ReplaceStates, edited_positions, head_directions
from coral_lens.engine.hooks import Edit, Site
from coral_lens.engine.model import Model
from coral_lens.engine.trees import build_tree
from coral_lens.errors import CoralError
from coral_lens.records import Prompt

pytestmark = pytest.mark.usefixtures("one_thread")

PLACES: tuple[EditPlace, ...] = ("stem_and_answer", "answer", "all")
SITE = Site("residual", 1)
OWN_CONTEXTS = Prompt("own contexts", ((1, 2), (1, 2, 3)), ((9,), (9, 8)))
"""The last context token of the first option lies within the context of the second."""


def two_question_batch() -> Batch:
    prompts = [Prompt("a", ((1, 2),) * 2, ((5,), (5, 7))), Prompt("b", ((3,),) * 2, ((8,), (9,)))]
    batch = collate({i: build_tree(p) for i, p in enumerate(prompts)}, [(0,), (1,)])
    assert batch.input_ids.tolist() == [[1, 2, 5, 7], [3, 8, 9, 0]]
    return batch


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------------------------- worked by hand


@pytest.mark.parametrize(
    ("where", "edited"),
    [("stem_and_answer", [0, 1, 1, 1, 1, 1, 1, 0]), ("answer", [0, 0, 1, 1, 0, 1, 1, 0]), ("all", [1] * 7 + [0])],
)
def test_each_position_is_edited_once_and_padding_never(where: EditPlace, edited: list[int]) -> None:
    batch, states = two_question_batch(), draw(2, 4, 3)
    before, direction = states.clone(), draw(3, seed=1)
    expected = states + 0.5 * direction * torch.tensor(edited).reshape(2, 4, 1)
    added = AddDirection({SITE: direction}, 0.5, where).edit(SITE, states, batch)
    assert torch.equal(added, expected)
    replaced = ReplaceStates(SITE, lambda some: some.add_(0.5 * direction), where).edit(SITE, states, batch)
    assert torch.equal(replaced, expected)
    assert torch.equal(states, before), "the argument must stay as it was"


def test_in_a_prefix_only_the_edit_of_all_positions_names_any() -> None:
    batch = prefix_batch([(1, 2, 3), (4,)])
    assert edited_positions(batch, "all").tolist() == [0, 1, 2, 3]
    assert len(edited_positions(batch, "answer")) == len(edited_positions(batch, "stem_and_answer")) == 0


def test_directions_of_heads_are_gathered_by_layer() -> None:
    chosen = {(1, 0): torch.tensor([1.0, 2.0]), (1, 2): torch.tensor([3.0, 4.0]), (3, 1): torch.tensor([5.0, 6.0])}
    gathered = head_directions(chosen, n_heads=3)
    assert {site: direction.tolist() for site, direction in gathered.items()} == {
        Site("heads", 1): [[1, 2], [0, 0], [3, 4]],
        Site("heads", 3): [[0, 0], [5, 6], [0, 0]],
    }


# ------------------------------------------------------------------------------------------------ against plain passes


def expected_logprobs(model: Model, prompts: Sequence[Prompt], shifts: dict[Site, Tensor], where: str) -> Tensor:
    rows = []
    for context, option in options(prompts):
        start = {"stem_and_answer": len(context) - 1, "answer": len(context), "all": 0}[where]

        def changes(shift: Tensor, start: int = start) -> object:
            return lambda states: torch.cat([states[:start], states[start:] + shift])

        rows.append(plain_logprob(model, context, option, {site: changes(shift) for site, shift in shifts.items()}))
    return torch.stack(rows)


@pytest.mark.parametrize("where", PLACES)
def test_a_direction_is_added_as_a_hook_on_plain_passes_would(any_tiny: Model, where: EditPlace) -> None:
    prompts = ragged_prompts()
    head_dim = any_tiny.hf.config.hidden_size // 4
    heads = head_directions({(2, 0): draw(head_dim, seed=3), (2, 3): draw(head_dim, seed=4)}, n_heads=4)
    directions = {Site("residual", layer): draw(32, seed=layer) for layer in (0, 3)} | heads
    found = run(any_tiny, prompts, edits=[AddDirection(directions, 0.7, where)])
    assert any(scored.batch.prefixes for scored in found)
    shifts = {site: 0.7 * direction.reshape(-1) for site, direction in directions.items()}
    expected = expected_logprobs(any_tiny, prompts, shifts, where)
    torch.testing.assert_close(logprobs_of(found), expected, atol=2e-4, rtol=1e-5)
    assert (expected - logprobs_of(run(any_tiny, prompts))).abs().max() > 0.1


def test_states_are_replaced_as_a_hook_on_plain_passes_would(any_tiny: Model) -> None:
    prompts, mix, site = ragged_prompts(), draw(32, 32) / 6, Site("residual", 2)

    def change(states: Tensor) -> Tensor:
        return states.tanh() @ mix

    found = run(any_tiny, prompts, edits=[ReplaceStates(site, change, "all")])
    rows = [plain_logprob(any_tiny, context, option, {site: change}) for context, option in options(prompts)]
    torch.testing.assert_close(logprobs_of(found), torch.stack(rows), atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("where", PLACES)
def test_plain_rows_are_edited_as_trees_are(plain_tiny: Model, where: EditPlace) -> None:
    prompts = ragged_prompts()[:3]
    edit = AddDirection({SITE: draw(32)}, 0.7, where)
    found = run(plain_tiny, prompts, packing="plain", edits=[edit])
    expected = expected_logprobs(plain_tiny, prompts, {SITE: 0.7 * draw(32)}, where)
    torch.testing.assert_close(logprobs_of(found), expected, atol=2e-4, rtol=1e-5)


def test_the_final_states_can_be_edited_too(any_tiny: Model) -> None:
    prompts, final = ragged_prompts(), Site("final", 0)
    found = run(any_tiny, prompts, edits=[AddDirection({final: draw(32)}, 0.7, "all")])
    expected = expected_logprobs(any_tiny, prompts, {final: 0.7 * draw(32)}, "all")
    torch.testing.assert_close(logprobs_of(found), expected, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("where", PLACES)
def test_an_edit_of_nothing_gives_the_unedited_bits(any_tiny: Model, where: EditPlace) -> None:
    prompts = ragged_prompts()
    residual = {Site("residual", layer): torch.full((32,), torch.inf) for layer in range(4)}
    none = AddDirection(residual | {Site("heads", 1): torch.ones(4, 8)}, 0.0, where)
    same = ReplaceStates(Site("residual", 2), lambda some: some, where)
    assert torch.equal(logprobs_of(run(any_tiny, prompts, edits=[none, same])), logprobs_of(run(any_tiny, prompts)))


def test_half_precision_states_stay_in_half_precision() -> None:
    model = make_model("llama")
    cast_weights(model, torch.bfloat16)
    edits = [AddDirection({SITE: draw(32)}, 0.5), ReplaceStates(SITE, lambda some: some.float() + 0.5)]
    assert logprobs_of(run(model, ragged_prompts(), edits=edits)).isfinite().all()


# ---------------------------------------------------------------------------------------------- errors, hooks


def test_contexts_that_run_into_each_other_are_refused_in_a_tree_and_exact_in_plain_rows(tiny: Model) -> None:
    edit = AddDirection({SITE: draw(32)}, 0.7, "stem_and_answer")
    with pytest.raises(CoralError, match=r"Question 'own contexts' .*run into each other.* packing 'plain'"):
        run(tiny, [OWN_CONTEXTS], edits=[edit])
    found = run(tiny, [OWN_CONTEXTS], packing="plain", edits=[edit])
    expected = expected_logprobs(tiny, [OWN_CONTEXTS], {SITE: 0.7 * draw(32)}, "stem_and_answer")
    torch.testing.assert_close(logprobs_of(found), expected, atol=1e-4, rtol=1e-5)
    answers_only = AddDirection({SITE: draw(32)}, 0.7, "answer")
    expected = expected_logprobs(tiny, [OWN_CONTEXTS], {SITE: 0.7 * draw(32)}, "answer")
    found = run(tiny, [OWN_CONTEXTS], edits=[answers_only])
    torch.testing.assert_close(logprobs_of(found), expected, atol=1e-4, rtol=1e-5)


def test_a_direction_of_the_wrong_size_is_refused(tiny: Model) -> None:
    with pytest.raises(
        CoralError, match=r"direction for heads of layer 2 has 30 numbers, but the states there have 32"
    ):
        run(tiny, ragged_prompts(), edits=[AddDirection({Site("heads", 2): torch.ones(5, 6)}, 1.0)])
    with pytest.raises(CoralError, match=r"Head 4 does not exist: the model has heads 0 to 3"):
        head_directions({(1, 4): torch.ones(8)}, n_heads=4)


class BreakError(Exception):
    """Raised by an edit that fails."""


def fail(_: Tensor) -> Tensor:
    raise BreakError


def test_no_hook_is_left_behind(any_tiny: Model) -> None:
    before = hook_counts(any_tiny)
    edits: list[Edit] = [AddDirection({SITE: draw(32)}, 1.0), ReplaceStates(Site("heads", 3), torch.tanh)]
    run(any_tiny, ragged_prompts(), edits=edits)
    assert hook_counts(any_tiny) == before
    with pytest.raises(BreakError):
        run(any_tiny, ragged_prompts(), edits=[*edits, ReplaceStates(Site("residual", 2), fail)])
    assert hook_counts(any_tiny) == before
