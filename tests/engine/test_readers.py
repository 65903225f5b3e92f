"""Readers give what hooks on ordinary passes see, token by token and head by head."""

from __future__ import annotations

import pytest
import torch
from support.models import make_model
from support.plain_passes import by_option, hook_counts, logprobs_of, options, plain_states, ragged_prompts, run

from coral_lens.engine.batches import Batch, collate
from coral_lens.engine.hooks import Site
from coral_lens.engine.model import Model
from coral_lens.engine.readers import FinalStates, HeadInputs, PooledResidual, ResidualTokens, iter_logits
from coral_lens.engine.trees import build_tree
from coral_lens.errors import CoralError
from coral_lens.records import Prompt

pytestmark = pytest.mark.usefixtures("one_thread")

CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def two_question_batch() -> Batch:
    prompts = [Prompt("a", ((1, 2),) * 2, ((5,), (6, 7))), Prompt("b", ((3,),) * 2, ((8, 9, 4), (8,)))]
    batch = collate({i: build_tree(p) for i, p in enumerate(prompts)}, [(0,), (1,)])
    assert batch.input_ids.tolist() == [[1, 2, 5, 6, 7], [3, 8, 9, 4, 0]]
    return batch


# ----------------------------------------------------------------------------------------------------- worked by hand


@pytest.mark.parametrize(
    ("where", "expected"),
    [("last", [2, 4, 8, 6]), ("mean", [2, 3.5, 7, 6]), ("stem", [1, 1, 5, 5])],
)
def test_head_inputs_worked_by_hand(where: str, expected: list[float]) -> None:
    """The state at flat position n is (n, 10 n): two heads of one dimension."""
    states = torch.arange(10.0).reshape(2, 5, 1) * torch.tensor([1.0, 10.0])
    reader = HeadInputs((3,), n_heads=2, where=where)  # type: ignore[arg-type]
    reader.read(Site("heads", 3), states, two_question_batch())
    assert reader.take()["heads.3"].tolist() == [[[x], [10 * x]] for x in expected]
    assert reader.take() == {}


@pytest.mark.parametrize(
    ("where", "positions", "offsets"),
    [
        ("answer", [2, 3, 4, 6, 7, 8], [0, 3, 6]),
        ("context", [0, 1, 5], [0, 2, 3]),
        ("all", [0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 5, 9]),
    ],
)
def test_every_token_is_read_once_and_padding_never(where: str, positions: list[int], offsets: list[int]) -> None:
    reader = ResidualTokens((1,), where=where)  # type: ignore[arg-type]
    reader.read(Site("residual", 1), torch.arange(10.0).reshape(2, 5, 1), two_question_batch())
    found = reader.take()
    assert found["tokens.1"].reshape(-1).tolist() == positions
    assert found["tokens.offsets"].tolist() == offsets
    assert reader.take() == {}


def test_final_states_are_those_before_each_answer_token() -> None:
    reader = FinalStates()
    reader.read(Site("final", 0), torch.arange(10.0).reshape(2, 5, 1), two_question_batch())
    found = reader.take()
    assert found["final"].reshape(-1).tolist() == [1, 1, 3, 5, 6, 7, 5]
    assert found["final.offsets"].tolist() == [0, 1, 3, 6, 7]
    assert reader.take() == {}


# ------------------------------------------------------------------------------------------------ against plain passes


def test_head_inputs_are_what_the_projection_is_given(any_tiny: Model) -> None:
    prompts, places = ragged_prompts(), ("last", "mean", "stem")
    found = {where: run(any_tiny, prompts, readers=[HeadInputs((1, 3), 4, where)]) for where in places}
    assert any(scored.batch.prefixes for scored in found["last"])
    for layer in (1, 3):
        whole = [(plain_states(any_tiny, c, o, Site("heads", layer)), len(c)) for c, o in options(prompts)]
        expected = {
            "last": [states[-1] for states, _ in whole],
            "mean": [states[start:].mean(dim=0) for states, start in whole],
            "stem": [states[start - 1] for states, start in whole],
        }
        for where, batches in found.items():
            rows = by_option(batches, [scored.readings[f"heads.{layer}"] for scored in batches])
            torch.testing.assert_close(rows, torch.stack(expected[where]).reshape(rows.shape), **CLOSE)


def test_final_states_are_what_the_head_reads(any_tiny: Model) -> None:
    prompts = ragged_prompts()
    batches = run(any_tiny, prompts, readers=[FinalStates()])
    whole = []
    for scored in batches:
        states, offsets = scored.readings["final"], scored.readings["final.offsets"]
        whole += [states[offsets[j] : offsets[j + 1]] for j in range(scored.batch.n_options)]
        logits = torch.cat([piece for _, piece in iter_logits(any_tiny, states)])
        chosen = logits.double().log_softmax(dim=-1).gather(1, scored.batch.targets[:, None])[:, 0]
        sums = torch.segment_reduce(chosen, "sum", offsets=offsets)
        torch.testing.assert_close(sums, scored.logprobs, **CLOSE)
    order = by_option(batches, list(torch.arange(len(whole)).split([s.batch.n_options for s in batches])))
    for number, (context, option) in zip(order.tolist(), options(prompts), strict=True):
        expected = plain_states(any_tiny, context, option, Site("final", 0))[len(context) - 1 : -1]
        torch.testing.assert_close(whole[number], expected, **CLOSE)


def test_token_states_are_those_of_plain_passes(any_tiny: Model) -> None:
    prompts = ragged_prompts()[:3]
    readers = [ResidualTokens((0, 2, 3), where="all")]
    for scored in run(any_tiny, prompts, readers=readers):
        batch, width = scored.batch, scored.batch.input_ids.shape[1]
        offsets = scored.readings["tokens.offsets"]
        assert offsets[-1] == batch.lengths.sum()
        for layer in (0, 2, 3):
            for i, question in enumerate(batch.questions):
                for j, (context, option) in enumerate(options([prompts[question]]), start=batch.option_offsets[i]):
                    at = batch.answer_tokens[batch.answer_offsets[j] : batch.answer_offsets[j + 1]]
                    # without padding in the rows before, and from the start of its own row
                    number = offsets[at // width] + at % width
                    found = scored.readings[f"tokens.{layer}"][number]
                    expected = plain_states(any_tiny, context, option, Site("residual", layer))[len(context) :]
                    torch.testing.assert_close(found, expected, **CLOSE)


ALL_READERS = (HeadInputs((1, 2), 4, "mean"), FinalStates(), ResidualTokens((0, 3), "answer"), PooledResidual((2,)))


def test_reading_changes_no_score_and_leaves_no_hook(any_tiny: Model) -> None:
    prompts, before = ragged_prompts(), hook_counts(any_tiny)
    found = run(any_tiny, prompts, readers=ALL_READERS)
    names = {"heads.1", "heads.2", "final", "final.offsets", "tokens.0", "tokens.3", "tokens.offsets", "layer.2"}
    assert set(found[0].readings) == names
    assert torch.equal(logprobs_of(found), logprobs_of(run(any_tiny, prompts)))
    assert hook_counts(any_tiny) == before


def test_plain_rows_are_read_as_trees_are(tiny: Model) -> None:
    prompts = ragged_prompts()
    readers = [HeadInputs((1, 2), 4, "mean")]
    tree, plain = (run(tiny, prompts, packing=packing, readers=readers) for packing in ("tree", "plain"))
    for name in ("heads.1", "heads.2"):
        rows = [by_option(batches, [s.readings[name] for s in batches]) for batches in (tree, plain)]
        torch.testing.assert_close(*rows, **CLOSE)


# ------------------------------------------------------------------------------------------------------------- logits


def test_logits_come_in_pieces_that_make_the_whole(tiny: Model) -> None:
    states = torch.randn(7, tiny.width)
    pieces = list(iter_logits(tiny, states, 3))
    assert [(piece.start, piece.stop) for piece, _ in pieces] == [(0, 3), (3, 6), (6, 7)]
    torch.testing.assert_close(torch.cat([logits for _, logits in pieces]), tiny.logits(states))


# -------------------------------------------------------------------------------------------------------------- errors


def test_the_heads_of_a_model_without_attention_are_refused() -> None:
    model = make_model("mamba")
    before = hook_counts(model)
    with pytest.raises(CoralError, match="no attention output projection"):
        run(model, ragged_prompts()[1:2], packing="plain", readers=[FinalStates(), HeadInputs((1,), 4)])
    assert hook_counts(model) == before
