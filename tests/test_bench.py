"""What benchmarks compute by themselves; what they measure with is tested where it lives."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from coral_lens.metrics.scores import score
from coral_lens.records import Predictions


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))
    return import_module("pooled")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Modules of bench/ have no package, and are not left behind for other tests."""
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and "/bench/" in str(sys.modules[name].__file__):
            del sys.modules[name]


def draw(right: int, *, targets: np.ndarray | None = None) -> Predictions:
    """Ten questions answered with confidence 0.7, of which so many are right."""
    ids, answers = tuple(map(str, range(10))), (np.arange(10) >= right).astype(np.int64)
    probs = np.tile([0.7, 0.3], 10)
    return Predictions("lens", "m", "t", "s", ids, answers, np.arange(0, 21, 2), probs, targets=targets)


def test_errors_of_opposite_sign_in_two_draws_do_not_cancel(pooled: ModuleType) -> None:
    """Of ten answers at 0.7 nine are right in one draw and five in the other: 0.2 off each time, and not at all in a pool."""
    both = pooled.together([draw(9), draw(5)])
    assert score(both, "ece") == pytest.approx(0.0)
    assert pooled.score_of(both, "ece") == pytest.approx(0.2)
    assert pooled.score_of(both, "accuracy") == pytest.approx(0.7) == score(both, "accuracy")
    assert pooled.score_of(draw(9), "ece") == pytest.approx(0.2)


def test_a_resample_draws_the_same_questions_in_every_draw(pooled: ModuleType) -> None:
    """Two equal draws vary as one does, and a pair of equal rows not at all."""
    twice, once = pooled.together([draw(5), draw(5)]), pooled.together([draw(5)])
    spread = [pooled.resampled_in({"a": p}, ["ece"])["a"]["ece"].draws for p in (twice, once)]
    np.testing.assert_allclose(*(np.sort(one) for one in spread), atol=0.12)
    assert np.std(spread[0]) == pytest.approx(np.std(spread[1]), rel=0.1)
    found = pooled.difference_in(twice, twice, "ece")
    assert (found.low, found.value, found.high) == (0.0, 0.0, 0.0)


def test_soft_answers_of_draws_stay_soft(pooled: ModuleType) -> None:
    soft = np.tile([0.6, 0.4], 10)
    both = pooled.together([draw(10, targets=soft), draw(10, targets=soft)])
    assert both.targets.tolist() == [*soft, *soft]
    assert score(both, "nll") == pytest.approx(score(draw(10, targets=soft), "nll"))
    assert pooled.together([draw(9), draw(5)]).targets is None


def test_labels_are_drawn_in_whole_articles(pooled: ModuleType) -> None:
    groups = [f"article {i // 4}" for i in range(40)]
    labelled = import_module("answering_labels").whole_groups(groups, 10, 0)
    assert labelled.sum() == 12
    assert all(labelled[i : i + 4].all() or not labelled[i : i + 4].any() for i in range(0, 40, 4))
    assert import_module("answering_labels").whole_groups(list("abcdefgh"), 5, 0).sum() == 5
