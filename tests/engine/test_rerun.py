"""Going on from stored states gives what a whole pass under the same edit gives, and computes only what changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from support.models import ROPE_BORDER, SIZES, make_model, make_tokenizer
from support.plain_passes import draw_ids, hook_counts, ragged_prompts
from torch import Tensor
from transformers import GPTJConfig, GPTJForCausalLM

from coral_lens.engine.batches import Batch, collate, lay_out, prefix_batch
from coral_lens.engine.edits import EditPlace, ReplaceStates, edited_positions
from coral_lens.engine.hooks import Site
from coral_lens.engine.model import Model, wrap
from coral_lens.engine.packing import Packing, plan_for
from coral_lens.engine.rerun import Checkpoint, capture, prefix_states, rerun
from coral_lens.engine.scoring import PrefixCaches, score_batch
from coral_lens.engine.trees import build_tree
from coral_lens.errors import CoralError
from coral_lens.records import Prompt

pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = {"atol": 1e-4, "rtol": 1e-5}


def laid_out(prompts: Sequence[Prompt], *, packing: Packing = "tree", border: int | None = None) -> list[Batch]:
    plan = plan_for(prompts, token_budget=200, packing=packing, border=border)
    return [lay_out(prompts, planned, packing=packing) for planned in plan.batches]


def bend(states: Tensor) -> Tensor:
    return states.tanh() + 0.1


def bent(states: Tensor, batch: Batch, where: EditPlace) -> Tensor:
    """The states of a whole batch with the positions of an edit changed."""
    flat = states.clone().reshape(-1, states.shape[-1])
    at = edited_positions(batch, where)
    flat[at] = bend(flat[at])
    return flat.reshape(states.shape)


def few_shot_batches(model: Model) -> list[Batch]:
    return laid_out(ragged_prompts(), border=model.rope_border)


# -------------------------------------------------------------------------------------------- against whole passes


@pytest.mark.parametrize("where", ["stem_and_answer", "answer"])
def test_going_on_gives_what_a_whole_pass_under_the_edit_gives(any_tiny: Model, where: EditPlace) -> None:
    batches = few_shot_batches(any_tiny)
    assert any(batch.prefixes for batch in batches)
    for layer in (0, 1, 3):
        edit = ReplaceStates(Site("residual", layer), bend, where)
        for batch in batches:
            checkpoint = capture(any_tiny, batch, layer)
            found = rerun(any_tiny, checkpoint, bent(checkpoint.states, batch, where))
            expected = score_batch(any_tiny, batch, edits=[edit]).logprobs
            torch.testing.assert_close(found, expected, **CLOSE)
            assert (found - checkpoint.logprobs).abs().max() > 1e-3


def test_an_edit_of_all_positions_reaches_the_prefix_too(any_tiny: Model) -> None:
    for layer in (0, 2, 3):
        edit = ReplaceStates(Site("residual", layer), bend, "all")
        for batch in few_shot_batches(any_tiny):
            checkpoint = capture(any_tiny, batch, layer)
            prefix = None
            if batch.prefixes:
                prefix = bent(prefix_states(any_tiny, batch, layer), prefix_batch(batch.prefixes), "all")
            with tokens_counted(any_tiny, 1) as below:
                found = rerun(any_tiny, checkpoint, bent(checkpoint.states, batch, "all"), prefix=prefix)
            assert not below or layer == 0, "blocks below the layer do not run"
            expected = score_batch(any_tiny, batch, edits=[edit]).logprobs
            torch.testing.assert_close(found, expected, **CLOSE)


def test_variants_of_an_edit_are_computed_from_the_edited_run(any_tiny: Model) -> None:
    """As an ablated reconstruction is, from the reconstruction: here 1 is added to all states, and 2 at one token."""
    prompt = Prompt("q", ((1, 2, 3, 4),) * 2, ((10, 11, 12), (13, 14)))
    batch = collate({0: build_tree(prompt)}, [(0,)])
    base = ReplaceStates(Site("residual", 1), lambda some: some + 1.0, "all")
    checkpoint = capture(any_tiny, batch, 1, edits=[base])
    assert torch.equal(checkpoint.logprobs, score_batch(any_tiny, batch, edits=[base]).logprobs)
    variant = checkpoint.states.clone()
    variant[0, 4] += 1.0
    with tokens_counted(any_tiny, 3) as counts:
        found = rerun(any_tiny, checkpoint, variant)
    assert counts == [2]
    more = torch.tensor([1.0, 1, 1, 1, 2, 1, 1, 1, 1])[:, None]
    both = ReplaceStates(Site("residual", 1), lambda some: some + more, "all")
    torch.testing.assert_close(found, score_batch(any_tiny, batch, edits=[both]).logprobs, **CLOSE)


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_plain_rows_go_on_as_wholes(plain_tiny: Model, layer: int) -> None:
    (batch,) = laid_out(ragged_prompts()[1:2], packing="plain")
    checkpoint = capture(plain_tiny, batch, layer)
    found = rerun(plain_tiny, checkpoint, bent(checkpoint.states, batch, "answer"))
    edit = ReplaceStates(Site("residual", layer), bend, "answer")
    torch.testing.assert_close(found, score_batch(plain_tiny, batch, edits=[edit]).logprobs, **CLOSE)


def test_blocks_that_return_tuples_are_skipped_too() -> None:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4, "n_positions": 256}
    hf = GPTJForCausalLM(GPTJConfig(vocab_size=SIZES["vocab_size"], **sizes))
    model = wrap(hf, make_tokenizer(), name="tiny-gptj")
    batch = laid_out(ragged_prompts()[:3])[0]
    checkpoint = capture(model, batch, 2)
    assert checkpoint.in_tuple
    found = rerun(model, checkpoint, bent(checkpoint.states, batch, "answer"))
    edit = ReplaceStates(Site("residual", 2), bend, "answer")
    torch.testing.assert_close(found, score_batch(model, batch, edits=[edit]).logprobs, **CLOSE)


def test_a_question_beyond_the_border_of_longrope_keeps_its_factors() -> None:
    model = make_model("phi3-longrope")
    context = draw_ids(ROPE_BORDER - 3, 5)
    (batch,) = laid_out([Prompt("long", (context,) * 2, (draw_ids(2, 6), draw_ids(9, 7)))], border=model.rope_border)
    checkpoint = capture(model, batch, 1)
    found = rerun(model, checkpoint, bent(checkpoint.states, batch, "stem_and_answer"))
    edit = ReplaceStates(Site("residual", 1), bend, "stem_and_answer")
    torch.testing.assert_close(found, score_batch(model, batch, edits=[edit]).logprobs, **CLOSE)


@pytest.mark.parametrize("changed", [0, 1])
def test_an_option_on_either_side_of_the_border_keeps_its_own_factors(changed: int) -> None:
    model = make_model("phi3-longrope")
    context = draw_ids(ROPE_BORDER - 3, 5)
    prompt = Prompt("both", (context,) * 2, (draw_ids(2, 6), draw_ids(9, 7)))
    (batch,) = laid_out([prompt], border=model.rope_border)
    checkpoint = capture(model, batch, 1)
    states = checkpoint.states.clone()
    states[changed] = bent(states, batch, "stem_and_answer")[changed]
    found = rerun(model, checkpoint, states)
    edit = ReplaceStates(Site("residual", 1), bend, "stem_and_answer")
    after, before = (score_batch(model, batch, edits=edits).logprobs for edits in ([edit], []))
    torch.testing.assert_close(found[changed], after[changed], **CLOSE)
    assert found[1 - changed] == before[1 - changed]


# --------------------------------------------------------------------------------------------- what is not computed


@contextmanager
def tokens_counted(model: Model, layer: int, part: str = "Attention") -> Iterator[list[int]]:
    """Count the positions, padding included, that go through the attention, or the MLP, of block `layer` itself."""
    counts: list[int] = []
    module = next(m for m in model.blocks[layer - 1].children() if part in type(m).__name__)
    module = next(module.children()) if part == "MLP" else module  # inside, behind what may stand before it
    handle = module.register_forward_pre_hook(
        lambda _, args, kwargs: counts.append((args[0] if args else kwargs["hidden_states"]).shape[:2].numel()),
        with_kwargs=True,
    )
    try:
        yield counts
    finally:
        handle.remove()


def one_row(model: Model) -> tuple[Batch, Checkpoint]:
    """A context of four tokens; option 0 is 10 11 12, option 1 is 10 13, option 2 is 14 15 16 17."""
    prompt = Prompt("q", ((1, 2, 3, 4),) * 3, ((10, 11, 12), (10, 13), (14, 15, 16, 17)))
    batch = collate({0: build_tree(prompt)}, [(0,)])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 10, 11, 12, 13, 14, 15, 16, 17]]
    return batch, capture(model, batch, 1)


@pytest.mark.parametrize(
    ("column", "computed", "predicting", "options"),
    [
        (0, 9, 6, [0, 1, 2]),  # the context, and 10, 11, 14, 15, 16; of the context only 4 predicts a token
        (3, 6, 6, [0, 1, 2]),
        (4, 2, 2, [0, 1]),  # 10 and 11: nothing is predicted from 12 and 13
        (5, 1, 1, [0]),
        (6, 0, 0, []),
        (9, 2, 2, [2]),
    ],
)
def test_only_positions_that_change_a_prediction_are_computed(
    any_tiny: Model, column: int, computed: int, predicting: int, options: list[int]
) -> None:
    batch, checkpoint = one_row(any_tiny)
    states = checkpoint.states.clone()
    states[0, column] = bend(states[0, column])
    with (
        tokens_counted(any_tiny, 1) as below,
        tokens_counted(any_tiny, 3) as above,
        tokens_counted(any_tiny, 2, "MLP") as between,
        tokens_counted(any_tiny, 3, "MLP") as last,
    ):
        found = rerun(any_tiny, checkpoint, states)
    assert (sum(below), sum(above)) == (0, computed)
    assert (sum(between), sum(last)) == (computed, predicting), "the last block's MLP runs where a token is predicted"
    whole = score_batch(any_tiny, batch, edits=[ReplaceStates(Site("residual", 1), lambda _: states[0], "all")])
    torch.testing.assert_close(found, whole.logprobs, **CLOSE)
    others = [j for j in range(3) if j not in options]
    assert torch.equal(found[others], checkpoint.logprobs[others])
    assert all(found[j] != checkpoint.logprobs[j] for j in options)


def test_states_that_have_not_changed_give_the_bits_of_the_engine(any_tiny: Model) -> None:
    prefixes = PrefixCaches(any_tiny)
    for batch in few_shot_batches(any_tiny):
        checkpoint = capture(any_tiny, batch, 2, prefixes=prefixes)
        assert torch.equal(checkpoint.logprobs, score_batch(any_tiny, batch, prefixes=prefixes).logprobs)
        with tokens_counted(any_tiny, 3) as counts:
            assert torch.equal(rerun(any_tiny, checkpoint, checkpoint.states.clone()), checkpoint.logprobs)
        assert not counts


def test_rows_may_be_left_out_and_come_several_times(any_tiny: Model) -> None:
    batch = next(batch for batch in few_shot_batches(any_tiny) if len(batch.input_ids) > 1)
    checkpoint = capture(any_tiny, batch, 1)
    rows = torch.tensor([1, 0, 1, 1])
    whole = [checkpoint.states, bent(checkpoint.states, batch, "answer"), checkpoint.states + 0.5]
    entries = torch.stack([whole[1][1], whole[2][0], whole[0][1], whole[2][1]])
    found = rerun(any_tiny, checkpoint, entries, rows=rows)
    each = [rerun(any_tiny, checkpoint, states) for states in whole]
    of_row = [checkpoint.options_of(torch.tensor([row])) for row in range(2)]
    expected = [each[1][of_row[1]], each[2][of_row[0]], each[0][of_row[1]], each[2][of_row[1]]]
    torch.testing.assert_close(found, torch.cat(expected), **CLOSE)
    numbers = checkpoint.options_of(rows)
    assert numbers.tolist() == torch.cat([of_row[row] for row in rows.tolist()]).tolist()
    width = batch.input_ids.shape[1]
    assert (
        batch.stems[numbers] // width == torch.repeat_interleave(rows, torch.tensor([len(of_row[r]) for r in rows]))
    ).all()


def test_no_rows_give_no_scores(tiny: Model) -> None:
    _, checkpoint = one_row(tiny)
    assert len(rerun(tiny, checkpoint, checkpoint.states[:0], rows=torch.zeros(0, dtype=torch.int64))) == 0


# ------------------------------------------------------------------------------------------------------- afterwards


def test_the_model_is_left_as_it_was(any_tiny: Model) -> None:
    before = hook_counts(any_tiny)
    batch, checkpoint = one_row(any_tiny)
    rerun(any_tiny, checkpoint, checkpoint.states + 1)
    assert hook_counts(any_tiny) == before
    assert torch.equal(score_batch(any_tiny, batch).logprobs, checkpoint.logprobs)


class BreakError(Exception):
    """Raised in the middle of a pass."""


def test_a_failure_leaves_the_model_as_it_was(tiny: Model) -> None:
    before = hook_counts(tiny)
    batch, checkpoint = one_row(tiny)

    def fail(*_: object) -> None:
        raise BreakError

    handle = tiny.blocks[1].register_forward_hook(fail)
    with pytest.raises(BreakError):
        rerun(tiny, checkpoint, checkpoint.states + 1)
    handle.remove()
    assert hook_counts(tiny) == before
    with pytest.raises(CoralError, match="Layer 9 does not exist"):
        capture(tiny, batch, 9)
    assert hook_counts(tiny) == before


def test_a_forward_that_others_have_replaced_is_put_back() -> None:
    """As accelerate does, to move states between devices."""
    model = make_model("llama")
    block, calls = model.blocks[0], []
    original = block.forward
    block.forward = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    theirs = block.forward
    _, checkpoint = one_row(model)
    assert len(calls) == 1
    rerun(model, checkpoint, checkpoint.states + 1)
    assert len(calls) == 1
    assert block.forward is theirs


def test_states_that_break_the_scores_are_refused_by_name(tiny: Model) -> None:
    _, checkpoint = one_row(tiny)
    with pytest.raises(CoralError, match="not finite for question 'q': its weights"):
        rerun(tiny, checkpoint, torch.full_like(checkpoint.states, torch.nan))
