"""Many edits of the same questions score as each would alone, and what none of them reaches is computed once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models import make_model
from support.plain_passes import draw_ids, hook_counts, logprobs_of, ragged_prompts, run

from coral_lens.engine import variants
from coral_lens.engine.batches import Batch
from coral_lens.engine.edits import AddDirection
from coral_lens.engine.hooks import Site
from coral_lens.engine.model import Model
from coral_lens.engine.packing import Packing
from coral_lens.engine.scoring import score_batch
from coral_lens.engine.variants import Variants, one_row, plan_variants, score_variants
from coral_lens.errors import CoralError
from coral_lens.records import Prompt
from coral_lens.storage.resumable import locked

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [*ragged_prompts(), Prompt("own contexts", ((1, 2), (1, 2, 3)), ((9,), (9, 8)))]


def direction(seed: int) -> AddDirection:
    rng = torch.Generator().manual_seed(seed)
    sites = {Site("heads", layer): torch.randn(4, 8, generator=rng) for layer in (1, 3)}
    return AddDirection(sites, 0.8)


def three() -> Variants:
    return Variants([[], [direction(1)], [direction(2)]], {"seeds": [1, 2]})


def test_each_variant_scores_as_it_does_alone(any_tiny: Model, tmp_path: Path) -> None:
    before = hook_counts(any_tiny)
    found = score_variants(any_tiny, PROMPTS, three(), tmp_path, packing="tree")
    for row, edits in zip(found, three().edits, strict=True):
        expected = logprobs_of(run(any_tiny, PROMPTS, packing="plain", edits=edits))
        torch.testing.assert_close(torch.from_numpy(row), expected, atol=2e-4, rtol=1e-5)
    assert abs(found[1] - found[0]).max() > 0.05
    assert hook_counts(any_tiny) == before


def test_a_model_that_takes_no_tree_is_scored_option_by_option(tmp_path: Path) -> None:
    model, edit = make_model("bloom"), AddDirection({Site("residual", 1): torch.ones(32)}, 0.5)
    found = score_variants(model, PROMPTS[:3], Variants([[edit]], {}), tmp_path, packing="plain")
    expected = logprobs_of(run(model, PROMPTS[:3], packing="plain", edits=[edit]))
    torch.testing.assert_close(torch.from_numpy(found[0]), expected, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("packing", ["tree", "plain"])
def test_nothing_but_the_last_context_token_and_the_options_is_computed_again(packing: Packing) -> None:
    context = draw_ids(40, 1)
    prompts = [Prompt("q", (context,) * 2, ((1,), (2, 3)))]
    plan = plan_variants(prompts, packing=packing, border=None)
    (batch,) = plan
    assert batch.prefixes == ((39,) if packing == "tree" else (0,))
    assert batch.plain == (packing == "plain")
    if packing == "tree":
        assert one_row(prompts, batch).input_ids.tolist() == [[context[-1], 1, 2, 3]]


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "TOKENS", 100)
    whole = score_variants(tiny, PROMPTS, three(), tmp_path / "whole", packing="tree")
    calls = 0

    def failing(model: Model, batch: Batch, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt
        return score_batch(model, batch, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(variants, "score_batch", failing)
        with pytest.raises(KeyboardInterrupt):
            score_variants(tiny, PROMPTS, three(), tmp_path / "killed", packing="tree")
    done: list[int] = []
    again = score_variants(tiny, PROMPTS, three(), tmp_path / "killed", packing="tree", progress=done.append)
    assert (again == whole).all()
    assert sum(done) == 3 * len(PROMPTS)
    files = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert len(files) > 4
    for name in files:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()


def test_results_of_other_edits_are_not_taken_for_these(tiny: Model, tmp_path: Path) -> None:
    score_variants(tiny, PROMPTS[:2], three(), tmp_path, packing="tree")
    with pytest.raises(CoralError, match="holds results of something else"):
        score_variants(tiny, PROMPTS[:2], Variants([[]], {"seeds": []}), tmp_path, packing="tree")


def test_a_second_process_may_not_score_into_the_same_folder(tiny: Model, tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(CoralError, match="is being written by another process"):
        score_variants(tiny, PROMPTS[:2], three(), tmp_path, packing="tree")
    assert score_variants(tiny, PROMPTS[:2], three(), tmp_path, packing="tree").shape[0] == 3
