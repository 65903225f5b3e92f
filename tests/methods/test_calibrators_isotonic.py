"""Isotonic regression agrees with pooling adjacent violators by hand, moves no answer, and never divides by zero."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coral_lens.methods.calibrators import apply_curve, fit_curve
from coral_lens.ragged import Options


def pooled(p: list[float], y: list[float]) -> dict[float, float]:
    """The increasing curve at its points: equal p are one block, and neighbours that decrease are pooled until none do."""
    blocks = []
    for x in sorted(set(p)):
        values = [b for a, b in zip(p, y, strict=True) if a == x]
        blocks.append(([x], sum(values), len(values)))
        while len(blocks) > 1 and blocks[-2][1] / blocks[-2][2] >= blocks[-1][1] / blocks[-1][2]:
            xs, total, n = blocks.pop()
            before = blocks.pop()
            blocks.append((before[0] + xs, before[1] + total, before[2] + n))
    return {x: total / n for xs, total, n in blocks for x in xs}


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=4, max_size=40))
def test_the_curve_is_that_of_pooling_adjacent_violators(rows: list[tuple[int, bool]]) -> None:
    p, y = [a / 12 for a, _ in rows], [float(b) for _, b in rows]
    curve = fit_curve(np.array(p), np.array(y))
    for x, value in pooled(p, y).items():
        assert abs(float(curve.predict([x])[0]) - value) < 1e-6


def test_a_curve_worked_by_hand() -> None:
    # 0.1: wrong; 0.3 right and 0.4 wrong are pooled to 1/2; 0.9: right. Between 0.4 and 0.9 it is a straight line
    curve = fit_curve(np.array([0.1, 0.3, 0.4, 0.9]), np.array([0.0, 1.0, 0.0, 1.0]))
    probs = apply_curve(np.array([0.35, 0.65, 0.1, 0.9]), Options.of_sizes([2, 2]), curve=curve)
    assert np.allclose(probs, [0.5 / 1.25, 0.75 / 1.25, 0.0, 1.0], atol=2e-6)


def test_where_all_options_map_to_zero_the_models_probabilities_stay() -> None:
    curve = fit_curve(np.array([0.2, 0.3, 0.35, 0.45, 0.9]), np.array([0.0, 0.0, 0.0, 0.0, 1.0]))
    p = np.array([0.3, 0.45, 0.25])
    assert np.allclose(apply_curve(p, Options.of_sizes([3]), curve=curve), p, atol=1e-12)


@given(st.lists(st.integers(2, 5), min_size=2, max_size=12), st.integers(0, 1000))
def test_no_answer_moves_and_ties_break_as_the_model_would(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    options = Options.of_sizes(sizes)
    p = options.softmax(rng.normal(size=options.n_rows) * 2)
    curve = fit_curve(rng.random(30), rng.integers(0, 2, 30).astype(float))
    moved = apply_curve(p, options, curve=curve)
    assert np.allclose(options.sum(moved), 1.0)
    for start, end in pairwise(options.edges):
        assert p[start:end].argmax() == moved[start:end].argmax()
