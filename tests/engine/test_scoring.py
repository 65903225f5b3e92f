"""The packed tree gives what plain passes give, readers and edits act where they say, and the model is left as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from support.models import ROPE_BORDER, WINDOW, WINDOW_FAMILIES, make_model, paths_of, rewrapped, with_mask
from support.questions import toy_questions
from torch import Tensor, nn

from coral_lens.data.settings import Style
from coral_lens.engine import _head as head_module
from coral_lens.engine import architectures, batches
from coral_lens.engine import packing as packing_module
from coral_lens.engine.batches import Batch, collate, lay_out
from coral_lens.engine.hooks import Edit, Reader, Site
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model, PrefixCache, wrap
from coral_lens.engine.packing import Packing, PlannedBatch, plan_for
from coral_lens.engine.prompts import fit_length, render, tokenize
from coral_lens.engine.readers import PooledResidual
from coral_lens.engine.scoring import ScoredBatch, score, score_batch
from coral_lens.engine.self_check import check_prompts, choose_packing, self_check
from coral_lens.engine.trees import PrefixGroup, Tree, build_tree
from coral_lens.errors import CoralError
from coral_lens.records import Prompt

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = (0, 1, 2, 3)


# ------------------------------------------------------------------------------------------------- what is compared


@dataclass
class Scores:
    """One row per (question, option), in the order of the questions."""

    logprobs: Tensor
    readings: dict[str, Tensor]


def run(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    budget: int = 300,
    packing: Packing = "tree",
    readers: Sequence[Reader] | None = None,
    edits: Sequence[Edit] = (),
) -> Scores:
    """Score prompts and put the rows of all batches into the order of the questions."""
    readers = [PooledResidual(LAYERS)] if readers is None else readers
    plan = plan_for(prompts, token_budget=budget, packing=packing, border=model.rope_border)
    return in_order(score(model, prompts, plan, readers=readers, edits=edits), range(len(prompts)))


def in_order(batches: Iterable[ScoredBatch], order: Sequence[int]) -> Scores:
    """Put the rows of all batches into the given order of their questions."""
    logprobs: dict[int, Tensor] = {}
    readings: dict[int, dict[str, Tensor]] = {}
    for scored in batches:
        edges = scored.batch.option_offsets
        for i, question in enumerate(scored.batch.questions):
            logprobs[question] = scored.logprobs[edges[i] : edges[i + 1]]
            readings[question] = {k: v[edges[i] : edges[i + 1]] for k, v in scored.readings.items()}
    return Scores(
        torch.cat([logprobs[q] for q in order]),
        {name: torch.cat([readings[q][name] for q in order]) for name in readings[order[0]]},
    )


@contextmanager
def hooked(module: nn.Module, found: list[Tensor], *, inputs: bool = False) -> Iterator[None]:
    """Keep what a module returns, or what it is given."""
    if inputs:
        handle = module.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    else:
        handle = module.register_forward_hook(
            lambda _, __, output: found.append(output[0] if isinstance(output, tuple) else output)
        )
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def reference(model: Model, prompts: Sequence[Prompt]) -> Scores:
    """One ordinary pass per option through the Hugging Face model: nothing of the engine is used."""
    hf, logprobs, states = model.hf, [], []
    paths = paths_of(hf)
    blocks, norm = hf.get_submodule(paths.blocks), hf.get_submodule(paths.norm)
    for prompt in prompts:
        for context, option in zip(prompt.contexts, prompt.options, strict=True):
            last: list[Tensor] = []
            with hooked(blocks[-1], last):
                out = hf(torch.tensor([context + option]), output_hidden_states=True)
            predicted = out.logits[0, len(context) - 1 : -1].double().log_softmax(dim=-1)
            logprobs.append(predicted.gather(1, torch.tensor(option)[:, None]).sum())
            # Hugging Face's last state is after the norm; the layer's own output is before it
            torch.testing.assert_close(norm(last[0]), out.hidden_states[-1])
            raw = [*out.hidden_states[:-1], last[0]]
            if hf.config.model_type == "mamba":  # whose states begin after the first block
                raw = [hf.get_input_embeddings()(torch.tensor([context + option])), *out.hidden_states[:-1]]
            states.append([state[0, len(context) :].double().mean(dim=0).float() for state in raw])
    readings = {f"layer.{i}": torch.stack([row[i] for row in states]) for i in LAYERS}
    return Scores(torch.stack(logprobs), readings)


def assert_close(found: Scores, expected: Scores) -> None:
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-4, rtol=1e-5)
    assert found.readings.keys() == expected.readings.keys()
    for name, states in found.readings.items():
        torch.testing.assert_close(states, expected.readings[name], atol=1e-4, rtol=1e-4, msg=name)


def assert_same_bits(found: Scores, expected: Scores) -> None:
    assert torch.equal(found.logprobs, expected.logprobs)
    assert all(torch.equal(states, expected.readings[name]) for name, states in found.readings.items())


def toy_prompts(model: Model, n: int) -> list[Prompt]:
    questions = toy_questions(n)
    return tokenize(questions, [render(q, Style(), model) for q in questions], model)


def draw_ids(n: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def many_ids(n: int) -> tuple[int, ...]:
    return (7,) * n


def ragged_prompts() -> list[Prompt]:
    """Contexts and options shorter and much longer than the window, and contexts that differ between options."""
    long, short = draw_ids(70, 1), draw_ids(3, 2)
    lengths = (1, 40, 7, 17, 25)
    tails = tuple(draw_ids(n, 10 + n) for n in lengths)
    assert len(short) < WINDOW < min(len(long), max(lengths))
    return [
        Prompt("long context", (long,) * 5, tails),
        Prompt("short context", (short,) * 3, tails[1:4]),
        Prompt("one token", ((5,),) * 2, ((1,), (2, 3))),
        Prompt("shared beginnings", (long[:30],) * 4, (tails[4], tails[4][:20], (*tails[4][:20], 9), tails[4])),
        Prompt("own contexts", (long, long[5:], long[:40]), (tails[2], tails[1], tails[3])),
    ]


# -------------------------------------------------------------------------------------------- packed against plain


def test_the_packed_tree_scores_and_pools_as_plain_passes_do(any_tiny: Model) -> None:
    prompts = [*ragged_prompts(), *toy_prompts(any_tiny, 7)]
    rows = [row for batch in plan_for(prompts, token_budget=300).batches for row in batch.rows]
    assert max(len(row) for row in rows) > 1, "several questions should share a row"
    assert_close(run(any_tiny, prompts), reference(any_tiny, prompts))


def test_plain_packing_gives_the_same(any_tiny: Model) -> None:
    prompts = ragged_prompts()
    assert_close(run(any_tiny, prompts, packing="plain"), reference(any_tiny, prompts))


@pytest.mark.parametrize("budget", [1, 64, 1000, 100_000])
def test_the_plan_does_not_change_the_scores(tiny: Model, budget: int) -> None:
    prompts = [*ragged_prompts(), *toy_prompts(tiny, 7)]
    assert_close(run(tiny, prompts, budget=budget), run(tiny, prompts))


def test_the_same_plan_gives_the_same_bits(any_tiny: Model) -> None:
    prompts = toy_prompts(any_tiny, 7)
    assert_same_bits(run(any_tiny, prompts), run(any_tiny, prompts))


def test_the_order_of_the_questions_does_not_change_the_scores(tiny: Model) -> None:
    prompts = ragged_prompts()
    backwards = run(tiny, prompts[::-1])
    sizes = [len(p.options) for p in prompts]
    again = torch.cat(backwards.logprobs.split(sizes[::-1])[::-1])
    torch.testing.assert_close(again, run(tiny, prompts).logprobs, atol=1e-4, rtol=1e-5)


def test_the_head_may_run_in_pieces(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(tiny, ragged_prompts())
    monkeypatch.setattr(head_module, "BLOCK", 100)
    assert_close(run(tiny, ragged_prompts()), whole)


def test_probabilities_of_all_single_tokens_sum_to_one(any_tiny: Model) -> None:
    prompt = Prompt("all", (draw_ids(20, 3),) * 258, tuple((token,) for token in range(258)))
    scores = run(any_tiny, [prompt], readers=[])
    assert float(scores.logprobs.exp().sum()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_are_finite_and_close(any_tiny: Model, dtype: torch.dtype) -> None:
    half = wrap(deepcopy(any_tiny.hf).to(dtype), any_tiny.tokenizer, name="half")
    full = wrap(deepcopy(half.hf).float(), any_tiny.tokenizer, name="full")
    prompts = [*ragged_prompts(), *few_shot_prompts()]
    found, expected = run(half, prompts), run(full, prompts)
    assert found.logprobs.isfinite().all()
    relative = (found.logprobs - expected.logprobs).abs() / expected.logprobs.abs()
    of_scores, of_states = (0.015, 0.1) if dtype == torch.bfloat16 else (0.002, 0.01)
    assert float(relative.max()) < of_scores
    for name, states in found.readings.items():
        assert states.dtype == torch.float32
        scale = float(expected.readings[name].abs().max())
        assert float((states - expected.readings[name]).abs().max()) < of_states * scale


# -------------------------------------------------------------------------------------------------- shared prefixes


def few_shot_prompts() -> list[Prompt]:
    """Questions after two sets of shots of different length, both beyond the window, and one without shots."""
    long, short = draw_ids(61, 101), draw_ids(47, 102)
    assert len(long) > len(short) > 2 * WINDOW
    tails = tuple(draw_ids(n, 110 + n) for n in (1, 18, 6, 2, 24))
    prompts = []
    for i, shots in enumerate([long, short] * 4):
        context = (*shots, *draw_ids(3 + 5 * i, 120 + i))
        options = tails[i % 3 : i % 3 + 3]
        prompts.append(Prompt(f"few-shot {i}", (context,) * 3, options))
    return [*prompts, Prompt("zero-shot", (long[:20],) * 2, tails[:2])]


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The lengths of the prefixes of each pass that computes some."""
    seen: list[list[int]] = []
    real = Model.prefill

    def counting(model: Model, prefixes: Sequence[tuple[int, ...]], *, last: int | None = None) -> PrefixCache:
        seen.append([len(prefix) for prefix in prefixes])
        return real(model, prefixes, last=last)

    monkeypatch.setattr(Model, "prefill", counting)
    return seen


def share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "find_prefixes", lambda contexts: [PrefixGroup(0, tuple(range(len(contexts))))])


def test_two_prefixes_in_one_batch_score_and_pool_as_plain_passes_do(
    any_tiny: Model, prefills: list[list[int]]
) -> None:
    prompts = few_shot_prompts()
    first, second = plan_for(prompts, token_budget=1000).batches
    assert (set(first.prefixes), second.prefixes) == ({61, 47}, (0,))
    assert_close(run(any_tiny, prompts, budget=1000), reference(any_tiny, prompts))
    assert prefills == [[61, 47]]


def test_a_prefix_is_computed_once_for_all_its_batches(
    any_tiny: Model, prefills: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = few_shot_prompts()
    monkeypatch.setattr(packing_module, "ROW_WIDTH", 90)
    lengths = [batch.prefixes for batch in plan_for(prompts, token_budget=200).batches]
    assert lengths == [(61, 61), (61,), (47, 47), (47,), (0,)]
    assert_close(run(any_tiny, prompts, budget=200), reference(any_tiny, prompts))
    assert prefills == [[61], [47]]


def test_a_pass_that_ends_early_reads_what_the_whole_one_reads(any_tiny: Model, prefills: list[list[int]]) -> None:
    """With shared prefixes, whose blocks above the layer are not computed either; a layer below is read too."""
    prompts = few_shot_prompts()
    plan = plan_for(prompts, token_budget=1000)
    whole, short = (
        list(score(any_tiny, prompts, plan, readers=[PooledResidual((0, 1))], last=last)) for last in (None, 1)
    )
    assert len(prefills) == 2
    for one, other in zip(whole, short, strict=True):
        assert one.batch.questions == other.batch.questions
        for name, states in one.readings.items():
            assert torch.equal(states, other.readings[name])
        assert set(other.logprobs.tolist()) == {0.0}


def test_a_prefix_that_was_computed_with_a_longer_one_is_used_again_without_it(
    tiny: Model, prefills: list[list[int]]
) -> None:
    prompts = few_shot_prompts()
    batches = [
        PlannedBatch(((0, 2), (1,)), (61, 47)),
        PlannedBatch(((3, 5), (7,)), (47, 47)),
        PlannedBatch(((4,), (6,)), (61, 61)),
        PlannedBatch(((8,),), (0,)),
    ]
    found = {}
    for scored in score(tiny, prompts, packing_module.Plan(tuple(batches), "tree")):
        rows = scored.logprobs.split(np.diff(scored.batch.option_offsets).tolist())
        found.update(zip(scored.batch.questions, rows, strict=True))
    assert prefills == [[61, 47]]
    expected = reference(tiny, prompts).logprobs
    torch.testing.assert_close(torch.cat([found[q] for q in range(9)]), expected, atol=1e-4, rtol=1e-5)


def test_other_prefixes_of_the_same_lengths_are_not_mistaken_for_the_last_ones(tiny: Model) -> None:
    tail = ((5,), (6, 7, 8))
    prompts = [
        Prompt(f"{seed} {i}", ((*draw_ids(100, seed), i, i + 1),) * 2, tail) for seed in (1, 2, 3) for i in range(2)
    ]
    assert [batch.prefixes for batch in plan_for(prompts, token_budget=20).batches] == [(100,)] * 3
    assert_close(run(tiny, prompts, budget=20), reference(tiny, prompts))


@pytest.mark.parametrize("budget", [1, 150, 500])
def test_how_prefixes_are_batched_does_not_change_the_scores(tiny: Model, budget: int) -> None:
    prompts = [*few_shot_prompts(), *ragged_prompts()]
    assert_close(run(tiny, prompts, budget=budget), run(tiny, prompts, budget=100_000))


def test_a_context_that_is_all_prefix_but_its_last_token(any_tiny: Model, prefills: list[list[int]]) -> None:
    context = draw_ids(100, 5)
    prompts = [Prompt("a", (context,) * 2, ((1,), (2, 3))), Prompt("b", (context,) * 2, ((4, 4), (5,)))]
    assert_close(run(any_tiny, prompts), reference(any_tiny, prompts))
    assert prefills == [[99]]


def test_shared_and_unshared_runs_agree_also_under_an_edit_of_all_positions(
    any_tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = few_shot_prompts()
    sites = (Site("residual", 0), Site("residual", 2), Site("heads", 2), Site("heads", 3))
    edits = [Apply(sites, lambda states, _: 0.7 * states + 0.3)]
    shared = run(any_tiny, prompts, edits=edits)
    with monkeypatch.context() as patch:
        share_nothing(patch)
        assert {length for batch in plan_for(prompts, token_budget=300).batches for length in batch.prefixes} == {0}
        unshared = run(any_tiny, prompts, edits=edits)
    assert_close(shared, unshared)
    assert (shared.logprobs - run(any_tiny, prompts).logprobs).abs().max() > 1e-2


def test_an_edit_is_told_which_positions_are_the_prefix(tiny: Model) -> None:
    seen: list[tuple[tuple[int, ...], int]] = []

    def look(states: Tensor, batch: Batch) -> Tensor:
        assert states.shape[:2] == batch.input_ids.shape
        seen.append((tuple(batch.input_ids[0].tolist()), batch.n_options))
        return states

    prompts = [p for p in few_shot_prompts() if p.contexts[0][:61] == draw_ids(61, 101) and len(p.contexts[0]) > 61]
    run(tiny, prompts, budget=1000, edits=[Apply((Site("residual", 1),), look)])
    assert seen[0] == (draw_ids(61, 101), 0)
    assert [n for _, n in seen] == [0, 12]


def test_readers_see_no_prefix(tiny: Model) -> None:
    reader = Counting((0, 1, 2, 3))
    run(tiny, few_shot_prompts(), budget=1000, readers=[reader])
    assert reader.reads == 2 * 4


@dataclass
class Counting(PooledResidual):
    """Counts what it reads."""

    reads: int = 0

    def read(self, site: Site, states: Tensor, batch: Batch) -> None:
        self.reads += 1
        super().read(site, states, batch)


# --------------------------------------------------------------------------------------------------------- readers


def two_question_batch() -> Batch:
    prompts = [Prompt("a", ((1, 2),) * 2, ((5,), (6, 7))), Prompt("b", ((3,),) * 2, ((8, 9, 4), (8,)))]
    return collate({i: build_tree(p) for i, p in enumerate(prompts)}, [(0,), (1,)])


def test_pooling_worked_by_hand() -> None:
    batch = two_question_batch()
    assert batch.input_ids.tolist() == [[1, 2, 5, 6, 7], [3, 8, 9, 4, 0]]
    states = torch.arange(10.0).reshape(2, 5, 1) ** 2
    reader = PooledResidual((1,))
    reader.read(Site("residual", 1), states, batch)
    expected = [4, (9 + 16) / 2, (36 + 49 + 64) / 3, 36]
    torch.testing.assert_close(reader.take()["layer.1"], torch.tensor(expected)[:, None])
    assert reader.take() == {}


def test_a_subset_of_layers_is_read_as_all_layers_are(tiny: Model) -> None:
    prompts = toy_prompts(tiny, 5)
    everything = run(tiny, prompts)
    some = run(tiny, prompts, readers=[PooledResidual((2, 0))])
    assert set(some.readings) == {"layer.0", "layer.2"}
    assert_same_bits(some, everything)


def test_reading_does_not_change_the_scores(any_tiny: Model) -> None:
    prompts = toy_prompts(any_tiny, 5)
    assert torch.equal(run(any_tiny, prompts).logprobs, run(any_tiny, prompts, readers=[]).logprobs)


@dataclass
class LastHeads:
    """Reads what the attention output projections are given at each option's last token."""

    layers: tuple[int, ...]
    found: dict[str, Tensor] = field(default_factory=dict)

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(Site("heads", layer) for layer in self.layers)

    def read(self, site: Site, states: Tensor, batch: Batch) -> None:
        ends = batch.answer_tokens[batch.answer_offsets[1:] - 1]
        self.found[f"heads.{site.layer}"] = states.reshape(-1, states.shape[-1])[ends]

    def fresh(self) -> LastHeads:
        return LastHeads(self.layers)

    def take(self) -> dict[str, Tensor]:
        found, self.found = self.found, {}
        return found


def projection_of(model: Model, layer: int) -> nn.Module:
    paths = paths_of(model.hf)
    return model.hf.get_submodule(f"{paths.blocks}.{layer - 1}.{paths.projection}")


@torch.no_grad()
def reference_heads(model: Model, prompts: Sequence[Prompt], layer: int) -> Tensor:
    rows = []
    for prompt in prompts:
        for context, option in zip(prompt.contexts, prompt.options, strict=True):
            given: list[Tensor] = []
            with hooked(projection_of(model, layer), given, inputs=True):
                model.hf(torch.tensor([context + option]))
            rows.append(given[0][0, -1])
    return torch.stack(rows)


def test_the_heads_site_is_the_input_of_the_output_projection(any_tiny: Model) -> None:
    prompts = ragged_prompts()
    found = run(any_tiny, prompts, readers=[LastHeads((1, 3)), PooledResidual((2,))]).readings
    assert set(found) == {"heads.1", "heads.3", "layer.2"}
    for layer in (1, 3):
        expected = reference_heads(any_tiny, prompts, layer)
        torch.testing.assert_close(found[f"heads.{layer}"], expected, atol=1e-4, rtol=1e-4)


# ----------------------------------------------------------------------------------------------------------- edits

ALL_SITES = (*(Site("residual", layer) for layer in LAYERS), *(Site("heads", layer) for layer in LAYERS[1:]))


@dataclass
class Apply:
    """Applies one function at its sites."""

    sites: tuple[Site, ...]
    change: Callable[[Tensor, Batch], Tensor]

    def edit(self, site: Site, states: Tensor, batch: Batch) -> Tensor:
        return self.change(states, batch)


RAMP = torch.linspace(-1, 1, 32)
"""Not the same for all features: a layer norm would not notice."""


def shift(states: Tensor, _: Batch) -> Tensor:
    return states + RAMP


def test_an_edit_that_changes_nothing_gives_the_unedited_bits(any_tiny: Model) -> None:
    prompts = toy_prompts(any_tiny, 5)
    same = Apply(ALL_SITES, lambda states, _: states)
    assert_same_bits(run(any_tiny, prompts, edits=[same]), run(any_tiny, prompts))


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_an_edit_of_a_layer_changes_that_layer_and_what_follows(any_tiny: Model, layer: int) -> None:
    prompts = toy_prompts(any_tiny, 4)
    before = run(any_tiny, prompts)
    after = run(any_tiny, prompts, edits=[Apply((Site("residual", layer),), shift)])
    for other in LAYERS:
        name = f"layer.{other}"
        assert torch.equal(after.readings[name], before.readings[name]) == (other < layer), name
    # readers see what the edit left, and the edit is exactly what was asked for
    torch.testing.assert_close(after.readings[f"layer.{layer}"], before.readings[f"layer.{layer}"] + RAMP)
    assert (after.logprobs - before.logprobs).abs().max() > 1e-3


def test_edits_of_one_site_follow_one_another(tiny: Model) -> None:
    site = (Site("residual", 2),)
    steps = [Apply(site, shift), Apply(site, lambda states, _: 2 * states)]
    base = run(tiny, ragged_prompts()).readings["layer.2"]
    both = run(tiny, ragged_prompts(), edits=steps).readings["layer.2"]
    torch.testing.assert_close(both, 2 * (base + RAMP))


def test_an_edit_of_one_options_tokens_leaves_every_other_option_as_it_was(any_tiny: Model) -> None:
    prompts = ragged_prompts()[:3]
    (planned,) = plan_for(prompts, token_budget=100_000).batches
    laid = lay_out(prompts, planned)
    reader = PooledResidual(LAYERS)
    before = score_batch(any_tiny, laid, readers=[reader])
    for chosen in range(laid.n_options):
        start, end = laid.answer_offsets[chosen : chosen + 2].tolist()

        def push(states: Tensor, batch: Batch, start: int = start, end: int = end) -> Tensor:
            flat = states.clone().reshape(-1, states.shape[-1])
            flat[batch.answer_tokens[start:end]] += 3.0
            return flat.reshape(states.shape)

        after = score_batch(any_tiny, laid, readers=[reader], edits=[Apply((Site("residual", 1),), push)])
        others = torch.arange(laid.n_options) != chosen
        assert torch.equal(after.logprobs[others], before.logprobs[others])
        for name, states in after.readings.items():
            assert torch.equal(states[others], before.readings[name][others])
        assert not torch.equal(after.readings["layer.3"][chosen], before.readings["layer.3"][chosen])


def test_an_edit_of_the_heads_is_what_a_hook_on_the_projection_would_do(any_tiny: Model) -> None:
    prompts = ragged_prompts()

    def silence(states: Tensor, _: Batch | None = None) -> Tensor:
        return torch.cat([torch.zeros_like(states[..., :8]), states[..., 8:]], dim=-1)

    edited = run(any_tiny, prompts, edits=[Apply((Site("heads", 2),), silence)])
    handle = projection_of(any_tiny, 2).register_forward_pre_hook(lambda _, args: (silence(args[0]),))
    try:
        expected = reference(any_tiny, prompts)
    finally:
        handle.remove()
    assert_close(edited, expected)
    assert (edited.logprobs - run(any_tiny, prompts).logprobs).abs().max() > 1e-2


# ----------------------------------------------------------------------------------------------------------- hooks


def hook_counts(model: Model) -> list[tuple[int, int]]:
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.hf.modules()]


class BreakError(Exception):
    """Raised by readers and edits that fail."""


def fail(*_: object) -> Tensor:
    raise BreakError


@dataclass
class BrokenReader(PooledResidual):
    """Fails when it reads."""

    def read(self, site: Site, states: Tensor, batch: Batch) -> None:
        raise BreakError


def test_scoring_leaves_no_hook_behind(any_tiny: Model) -> None:
    before = hook_counts(any_tiny)
    run(any_tiny, ragged_prompts(), edits=[Apply(ALL_SITES, shift)], readers=[PooledResidual(LAYERS), LastHeads((1,))])
    assert hook_counts(any_tiny) == before


@pytest.mark.parametrize(
    ("readers", "edits", "error"),
    [
        ([PooledResidual(LAYERS), BrokenReader((2,))], [], BreakError),
        ([PooledResidual(LAYERS)], [Apply((Site("heads", 3),), fail)], BreakError),
        ([PooledResidual((0, 1, 9))], [], CoralError),
    ],
    ids=["a reader fails", "an edit fails", "a layer does not exist"],
)
def test_a_failure_leaves_no_hook_behind(
    tiny: Model, readers: list[Reader], edits: list[Edit], error: type[Exception]
) -> None:
    before = hook_counts(tiny)
    with pytest.raises(error):
        run(tiny, ragged_prompts(), readers=readers, edits=edits)
    assert hook_counts(tiny) == before


def test_an_edit_that_fails_in_the_prefix_leaves_no_hook_behind(tiny: Model) -> None:
    before = hook_counts(tiny)
    with pytest.raises(BreakError):
        run(tiny, few_shot_prompts(), readers=[PooledResidual(LAYERS)], edits=[Apply((Site("residual", 1),), fail)])
    assert hook_counts(tiny) == before


def test_stopping_in_the_middle_leaves_no_hook_behind(tiny: Model) -> None:
    prompts = toy_prompts(tiny, 5)
    before = hook_counts(tiny)
    batches = score(tiny, prompts, plan_for(prompts, token_budget=1), readers=[PooledResidual(LAYERS)])
    next(batches)
    assert hook_counts(tiny) == before


def test_hooks_of_others_stay_and_work(tiny: Model) -> None:
    calls: list[Tensor] = []
    with hooked(tiny.blocks[1], calls):
        run(tiny, ragged_prompts(), budget=100_000)
        assert len(calls) == 1
        run(tiny, ragged_prompts(), budget=100_000)
        assert len(calls) == 2


def test_scoring_changes_no_weight(any_tiny: Model) -> None:
    before = deepcopy(any_tiny.hf.state_dict())
    run(any_tiny, ragged_prompts(), edits=[Apply(ALL_SITES, shift)])
    assert all(torch.equal(weight, before[name]) for name, weight in any_tiny.hf.state_dict().items())


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("site", [Site("residual", 4), Site("residual", -1), Site("heads", 0), Site("heads", 4)])
def test_a_layer_that_does_not_exist_is_refused(tiny: Model, site: Site) -> None:
    edit = Apply((site,), shift)
    with pytest.raises(CoralError, match=rf"Layer {site.layer} does not exist: 'tiny-llama' has layers 0 to 3\."):
        run(tiny, ragged_prompts(), edits=[edit])


def break_token(model: Model, token: int, value: float = float("nan")) -> Model:
    """Give one token an embedding that is not finite."""
    model.hf.get_input_embeddings().weight[token] = value
    return rewrapped(model)


def test_a_model_with_broken_weights_is_refused() -> None:
    model = make_model("llama")
    model.hf.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(CoralError, match=r"'tiny-llama' gives scores or states that are not finite for question"):
        run(rewrapped(model), ragged_prompts())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("packing", ["tree", "plain"])
def test_the_question_at_which_scores_break_is_named_and_not_its_neighbours(packing: Packing, value: float) -> None:
    model = break_token(make_model("llama"), 77, value)
    prompts = [Prompt(name, ((1, 2),) * 2, ((token, 3), (4,))) for name, token in (("a", 5), ("b", 6), ("bad", 77))]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        with pytest.raises(CoralError, match=r"not finite for question 'bad': its weights or dtype are broken"):
            run(model, [prompts[i] for i in order], packing=packing, budget=1000)


def test_a_question_that_breaks_after_a_shared_prefix_is_named() -> None:
    model = break_token(make_model("llama"), 255)
    prompts = [Prompt(f"q{i}", ((*many_ids(100), i),) * 2, ((3,), (4,))) for i in range(3)]
    prompts[1] = replace(prompts[1], options=((3,), (255, 5)))
    with pytest.raises(CoralError, match="for question 'q1': "):
        run(model, prompts)


def sound_and_broken(prompts: Sequence[Prompt], token: int) -> list[Prompt]:
    """The prompts, and broken ones among them: by their context, and by an option."""
    in_context = Prompt("in context", ((1, token, 2),) * 2, ((3,), (4, 5)))
    in_option = Prompt("in option", ((1, 9, 2),) * 3, ((3,), (token, 5), (4,)))
    return [prompts[0], in_context, *prompts[1:], in_option]


@pytest.mark.parametrize("packing", ["tree", "plain"])
def test_questions_beside_a_broken_one_are_scored_and_pooled_as_plain_passes_do(
    any_tiny: Model, packing: Packing
) -> None:
    token = 255
    model = break_token(wrap(deepcopy(any_tiny.hf), any_tiny.tokenizer, name="broken"), token)
    sound = [p for p in [*ragged_prompts(), *few_shot_prompts()] if all(token not in c + o for c, o in pairs(p))]
    prompts = sound_and_broken(sound, token)
    plan = plan_for(prompts, token_budget=300, packing=packing, border=model.rope_border)
    broken: list[int] = []
    readers = [PooledResidual(LAYERS)]
    batches = list(score(model, prompts, plan, readers=readers, on_broken=broken.append))
    assert sorted(broken) == [1, len(prompts) - 1]
    kept = [i for i in range(len(prompts)) if i not in broken]
    assert_close(in_order(batches, kept), reference(model, [prompts[i] for i in kept]))


def pairs(prompt: Prompt) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return list(zip(prompt.contexts, prompt.options, strict=True))


def test_states_that_are_not_finite_are_noticed_where_the_scores_are_finite(tiny: Model) -> None:
    # nothing is predicted from an option's last token, and above the last block no token sees another
    def overflow(states: Tensor, batch: Batch) -> Tensor:
        return states.masked_fill((batch.input_ids == 77)[:, :, None], float("inf"))

    edits = [Apply((Site("residual", 3),), overflow)]
    prompts = [Prompt("good", ((1, 2),) * 2, ((5, 3), (4,))), Prompt("bad", ((1, 2),) * 2, ((5, 77), (4,)))]
    for packing in ("tree", "plain"):
        assert (
            run(tiny, prompts, packing=packing, readers=[PooledResidual((2,))], edits=edits).logprobs.isfinite().all()
        )
        with pytest.raises(CoralError, match="states that are not finite for question 'bad': "):
            run(tiny, prompts, packing=packing, edits=edits)


def test_a_batch_of_several_questions_names_one_and_says_how_many_it_could_be() -> None:
    model = break_token(make_model("llama"), 77)
    prompts = [Prompt("good", ((1, 2),) * 2, ((5, 3), (4,))), Prompt("bad", ((1, 2),) * 2, ((77, 5), (4,)))]
    batch = collate(dict(enumerate(map(build_tree, prompts))), [(0, 1)])
    with pytest.raises(CoralError, match="for question 'good' or one of the 1 scored with it"):
        score_batch(model, batch)


# --------------------------------------------------------------------------------------------------------- longrope


def test_questions_under_the_rope_border_are_packed_and_one_beyond_it_is_alone() -> None:
    model = make_model("phi3-longrope")
    assert model.rope_border == ROPE_BORDER == 128
    below = [Prompt(f"below {n}", (draw_ids(n, n),) * 2, (draw_ids(4, 1), draw_ids(8, 2))) for n in (60, 40, 120, 20)]
    beyond = [Prompt(f"beyond {n}", (draw_ids(n, n),) * 2, (draw_ids(4, 3), draw_ids(9, 4))) for n in (130, 200)]
    prompts = [beyond[0], *below, beyond[1]]
    plan = plan_for(prompts, token_budget=100_000, border=model.rope_border)
    assert [batch.rows for batch in plan.batches[:2]] == [((5,),), ((0,),)]
    assert len(plan.batches) == 3
    assert_close(run(model, prompts, budget=100_000), reference(model, prompts))
    assert_close(run(model, prompts, budget=100_000, packing="plain"), reference(model, prompts))


def test_without_the_border_one_long_question_would_spoil_the_others() -> None:
    model = make_model("phi3-longrope")
    prompts = [Prompt(f"{n}", (draw_ids(n, n),) * 2, (draw_ids(4, 1), draw_ids(8, 2))) for n in (200, 60)]
    plan = plan_for(prompts, token_budget=100_000)
    (scored,) = score(model, prompts, plan)
    assert (scored.logprobs - reference(model, prompts).logprobs)[2:].abs().max() > 0.05


def test_questions_that_share_shots_stay_shared_under_the_border(prefills: list[list[int]]) -> None:
    model = make_model("phi3-longrope")
    beyond = Prompt("beyond", ((*draw_ids(61, 101), *draw_ids(70, 7)),) * 2, (draw_ids(4, 3), draw_ids(9, 4)))
    prompts = [*few_shot_prompts(), beyond]
    assert_close(run(model, prompts, budget=1000), reference(model, prompts))
    assert prefills == [[61, 47]]


def straddling_prompts() -> list[Prompt]:
    """Options on both sides of the border: by their own length, after shots that others share, and by their contexts."""
    shots, near = draw_ids(61, 101), draw_ids(ROPE_BORDER - 3, 5)
    tails = tuple(draw_ids(n, 40 + n) for n in (1, 3, 4, 20, 2))
    after_shots = [Prompt(f"shots {i}", ((*shots, *draw_ids(60, 50 + i)),) * 5, tails) for i in range(2)]
    contexts = (near, near[:50], draw_ids(140, 6), near, near)
    return [Prompt("own", (near,) * 5, tails), *after_shots, Prompt("contexts", contexts, tails)]


@pytest.mark.parametrize("packing", ["tree", "plain"])
@pytest.mark.parametrize("budget", [1, 1000, 100_000])
def test_options_on_both_sides_of_the_border_score_and_pool_as_their_own_passes(packing: Packing, budget: int) -> None:
    model = make_model("phi3-longrope")
    prompts = [*few_shot_prompts(), *straddling_prompts(), *ragged_prompts()]
    before = hook_counts(model)
    found = run(model, prompts, budget=budget, packing=packing)
    assert hook_counts(model) == before
    assert_close(found, reference(model, prompts))


def test_with_the_long_factors_for_all_the_short_options_would_be_wrong() -> None:
    model, prompt = make_model("phi3-longrope"), straddling_prompts()[0]
    wrong = score_batch(model, collate({0: build_tree(prompt)}, [(0,)])).logprobs
    gaps = (wrong - reference(model, [prompt]).logprobs).abs()
    assert float(gaps[3]) < 1e-4
    assert float(gaps[[0, 1, 4]].max()) > 0.05


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gpt2"])
def test_other_models_have_no_border(family: str) -> None:
    assert make_model(family).rope_border is None


# ------------------------------------------------------------------------------------------------------ self-check


def test_every_family_passes_its_self_check(any_tiny: Model) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_packing(any_tiny) == "tree"
    assert self_check(any_tiny, check_prompts(any_tiny)).difference < 1e-4


HALF = [torch.bfloat16, torch.float16]


def in_half(model: Model, dtype: torch.dtype) -> Model:
    return wrap(deepcopy(model.hf).to(dtype), model.tokenizer, name=f"half-{model.name}")


@pytest.mark.parametrize("dtype", HALF)
def test_every_family_passes_its_self_check_in_half_precision(any_tiny: Model, dtype: torch.dtype) -> None:
    half = in_half(any_tiny, dtype)
    check = self_check(half, check_prompts(half))
    assert check.sound
    assert check.excess < 0.5, "rounding should be far from an alarm"


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("family", WINDOW_FAMILIES)
def test_a_wrong_mask_is_noticed_in_half_precision(family: str, dtype: torch.dtype) -> None:
    wrong = with_mask(in_half(make_model(family), dtype), "full")
    check = self_check(wrong, check_prompts(wrong))
    assert check.excess > 5
    with pytest.warns(UserWarning, match=r"packed and plain log-probabilities differ by .* in a row of its own"):
        assert choose_packing(wrong) == "plain"


def leak(tree: Tree) -> np.ndarray:
    """A mask under which options see the options before them."""
    return np.tri(len(tree), dtype=bool)


@pytest.mark.parametrize("dtype", HALF)
def test_options_that_see_each_other_are_noticed_in_half_precision(
    any_tiny: Model, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = in_half(any_tiny, dtype)
    monkeypatch.setattr(batches, "ancestors", leak)
    assert self_check(half, check_prompts(half)).excess > 2


@pytest.mark.filterwarnings("default:float16 is several times slower:UserWarning")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_real_model_passes_its_self_check_in_half_precision_and_a_leak_does_not(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model("smollm2", dtype=dtype)
    prompts = check_prompts(model)
    assert self_check(model, prompts).excess < 0.5
    monkeypatch.setattr(batches, "ancestors", leak)
    assert self_check(model, prompts).excess > 2


def test_a_model_that_gives_nothing_finite_is_refused_before_any_question() -> None:
    model = make_model("llama")
    model.hf.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(CoralError, match=r"'tiny-llama' gives scores that are not finite, whatever it is asked"):
        choose_packing(rewrapped(model))


def test_a_model_that_fails_a_part_of_its_self_check_is_scored_plainly() -> None:
    model = make_model("llama")
    only_first = set(check_prompts(model)[0].contexts[0]) - {
        t for c, o in pairs(check_prompts(model)[1]) for t in c + o
    }
    model = break_token(model, only_first.pop())
    with pytest.warns(UserWarning, match="not all scores and states of its self-check are finite"):
        assert choose_packing(model) == "plain"


def test_the_self_check_holds_ragged_options_that_begin_alike(tiny: Model) -> None:
    prompts = check_prompts(tiny)
    trees = [build_tree(p) for p in prompts]
    wholes = [sum(map(len, p.options)) + len(p.contexts[0]) for p in prompts]
    assert len({len(option) for p in prompts for option in p.options}) > 2
    assert len(trees[0]) < wholes[0]


def test_a_family_that_takes_no_tree_falls_back_with_one_warning_and_is_exact(plain_tiny: Model) -> None:
    with pytest.warns(UserWarning, match="refuses the tree's attention mask .* in a row of its own") as caught:
        packing = choose_packing(plain_tiny)
    assert (packing, len(caught)) == ("plain", 1)
    assert plain_tiny.name in str(caught[0].message)
    prompts = [*ragged_prompts(), *few_shot_prompts(), *toy_prompts(plain_tiny, 4)]
    assert_close(run(plain_tiny, prompts, packing=packing), reference(plain_tiny, prompts))


def test_edits_of_a_family_that_falls_back_change_their_layer_and_what_follows(plain_tiny: Model) -> None:
    prompts = toy_prompts(plain_tiny, 4)
    before = run(plain_tiny, prompts, packing="plain")
    after = run(plain_tiny, prompts, packing="plain", edits=[Apply((Site("residual", 2),), shift)])
    assert torch.equal(after.readings["layer.1"], before.readings["layer.1"])
    torch.testing.assert_close(after.readings["layer.2"], before.readings["layer.2"] + RAMP)
    assert (after.logprobs - before.logprobs).abs().max() > 1e-3


@pytest.mark.parametrize("readers", [True, False])
def test_a_model_without_attention_has_no_heads_to_read_or_edit(readers: bool) -> None:
    model = make_model("mamba")
    before = hook_counts(model)
    some = {"readers": [LastHeads((2,))]} if readers else {"edits": [Apply((Site("heads", 2),), shift)]}
    with pytest.raises(CoralError, match=r"'tiny-mamba' has no attention output projection"):
        run(model, ragged_prompts(), packing="plain", **some)
    assert hook_counts(model) == before


@pytest.mark.parametrize("family", WINDOW_FAMILIES)
def test_a_wrong_mask_is_noticed_and_plain_rows_are_then_exact(family: str) -> None:
    model = with_mask(make_model(family), "full")
    prompts = ragged_prompts()
    expected = reference(model, prompts)
    assert (run(model, prompts).logprobs - expected.logprobs).abs().max() > 0.05
    with pytest.warns(UserWarning, match=r"packed and plain log-probabilities differ by .* in a row of its own"):
        packing = choose_packing(model)
    assert packing == "plain"
    assert_close(run(model, prompts, packing=packing), expected)


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_a_mask_that_the_model_refuses_is_noticed_too(family: str) -> None:
    model = with_mask(make_model(family), "by_layer")
    with pytest.warns(UserWarning, match="refuses the tree's attention mask"):
        packing = choose_packing(model)
    assert packing == "plain"
    assert_close(run(model, ragged_prompts(), packing=packing), reference(model, ragged_prompts()))


def test_an_unlisted_family_with_a_window_is_scored_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_packing(make_model("mistral-window")) == "tree"
    monkeypatch.delitem(architectures.FAMILIES, "mistral")
    with pytest.warns(UserWarning, match="sliding window that is not known"):
        assert choose_packing(make_model("mistral-window")) == "plain"


def test_a_cut_prompt_of_a_model_with_learned_positions_can_be_scored_plainly() -> None:
    model = make_model("gpt2")
    context, options = tuple(range(100)) * 3, ((5, 6), (7,))
    full = fit_length(toy_questions(1)[0].id, [(context, o) for o in options], model.max_length)
    scores = []
    for packing in ("tree", "plain"):
        (batch,) = score(model, [full], plan_for([full], token_budget=4096, packing=packing))
        scores.append(batch.logprobs)
    torch.testing.assert_close(scores[0], scores[1], atol=1e-4, rtol=1e-5)
