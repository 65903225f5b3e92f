"""A token is drawn with its probability, from random numbers that belong to answer, step and token alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coral_lens.engine import draws
from coral_lens.engine.draws import NextToken, exponentials, stream_of
from coral_lens.errors import CoralError

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])


def frequencies(coming: NextToken, n: int = 20_000) -> np.ndarray:
    drawn = [coming.draw(stream_of("prompt", sample, 0), step=3) for sample in range(n)]
    return np.bincount(drawn, minlength=len(coming.scores)) / n


@pytest.mark.parametrize("far", [16.0, 1.5, 0.0])
def test_a_token_wins_with_its_probability_wherever_tokens_begin_to_share_a_clock(
    monkeypatch: pytest.MonkeyPatch, far: float
) -> None:
    monkeypatch.setattr(draws, "FAR", far)
    coming = NextToken.after(LOGITS, 0.7)
    assert len(coming.near) == {16.0: 5, 1.5: 2, 0.0: 1}[far]
    probs = (LOGITS / 0.7).softmax(dim=0).numpy()
    assert np.all(np.abs(frequencies(coming) - probs) < 4 * np.sqrt(probs * (1 - probs) / 20_000))


def test_random_numbers_are_exponential_and_those_of_neighbours_have_nothing_to_do_with_each_other() -> None:
    tokens = np.arange(50_000)
    first, next_step, next_stream = (exponentials(*key, tokens) for key in ((7, 0), (7, 1), (8, 0)))
    assert abs(first.mean() - 1) < 0.02
    assert abs(first.var() - 1) < 0.06
    assert abs(np.quantile(first, 0.99) - np.log(100)) < 0.15
    for other in (next_step, next_stream, np.roll(first, 1)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.02


def test_a_draw_depends_on_stream_step_and_token_and_not_on_who_else_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    coming = NextToken.after(LOGITS, 1.0)
    drawn = [[coming.draw(stream_of("a", sample, 0), step) for step in range(20)] for sample in range(20)]
    assert drawn == [[coming.draw(stream_of("a", sample, 0), step) for step in range(20)] for sample in range(20)]
    assert len({tuple(one) for one in drawn}) == 20
    assert len({tuple(one) for one in zip(*drawn, strict=True)}) == 20
    longer = NextToken.after(torch.cat([LOGITS, torch.full((1000,), -12.0)]), 1.0)
    same = sum(longer.draw(stream_of("a", i, 0), 0) == coming.draw(stream_of("a", i, 0), 0) for i in range(500))
    assert same > 490, "a thousand tokens that hardly ever win change nothing else"


def test_rounding_of_the_logits_hardly_ever_changes_who_wins() -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 3
    rounded = logits + 1e-4 * torch.randn(5000, generator=torch.Generator().manual_seed(1))
    one, other = (NextToken.after(row, 0.7) for row in (logits, rounded))
    same = sum(one.draw(stream_of("a", i, 0), 0) == other.draw(stream_of("a", i, 0), 0) for i in range(2000))
    assert same >= 1998


def test_temperature_0_takes_the_most_probable_token() -> None:
    assert {NextToken.after(LOGITS, 0.0).draw(stream_of("a", i, 0), i) for i in range(50)} == {0}


def test_impossible_tokens_are_never_drawn_and_no_number_at_all_is_said() -> None:
    masked = torch.tensor([float("-inf"), 1.0, float("-inf"), 1.0])
    coming = NextToken.after(masked, 1.0)
    assert {coming.draw(stream_of("a", i, 0), 0) for i in range(200)} == {1, 3}
    with pytest.raises(CoralError, match="no probability"):
        NextToken.after(torch.full((4,), float("nan")), 1.0)
