"""A correction is applied as its parts say, a folded and a saved one are the same, and an average is the mean of its members."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from safetensors.torch import load, save

from coral_lens.lens.correction import Correction, average
from coral_lens.lens.probes.mlp import MlpSettings, NetworkProbe, initial_mlp
from coral_lens.lens.probes.ridge import LinearProbe
from coral_lens.lens.probes.standardise import Standardiser
from coral_lens.lens.rules import RuleName
from coral_lens.ragged import Options

OPTIONS = Options.of_sizes([2, 3])
STATES = np.array([[1.0, 0.0], [3.0, 2.0], [0.0, 4.0], [2.0, 2.0], [4.0, 0.0]], dtype=np.float32)
P = np.array([0.75, 0.25, 0.5, 0.25, 0.25])
STANDARDISER = Standardiser(np.array([1.0, 0.0], np.float32), np.array([2.0, 4.0], np.float32))
LINEAR = LinearProbe(np.array([0.2, 0.4]), 0.05)
RULES: tuple[RuleName, ...] = ("residual", "listwise")


def correction(rule: RuleName = "residual", **changes: object) -> Correction:
    return replace(Correction(rule, (3,), (), STANDARDISER, LINEAR, base_weight=0.5), **changes)  # type: ignore[arg-type]


def test_the_papers_correction_worked_by_hand() -> None:
    """Standardised states are (0, 0), (1, 0.5), (-0.5, 1), (0.5, 0.5), (1.5, 0); each question's outputs lose their mean."""
    found = correction().scores(P, STATES, OPTIONS)
    assert found.scores == pytest.approx([0.05, 0.45, 0.35, 0.35, 0.35])
    steered = correction().apply(P, STATES, OPTIONS, gamma=1.0)
    assert steered == pytest.approx([0.75 - 0.2, 0.25 + 0.2, 0.5, 0.25, 0.25])


def test_the_listwise_correction_worked_by_hand() -> None:
    """Half of log p and twice the output: root 3 to 1, and the outputs 0.1 and 0.9 in the exponent."""
    odds = np.sqrt(3.0) * np.exp(2 * (0.05 - 0.45))
    first = correction("listwise").apply(P, STATES, OPTIONS, gamma=2.0)[:2]
    assert first == pytest.approx([odds / (1 + odds), 1 / (1 + odds)])


def test_its_scale_multiplies_the_output_like_a_larger_gamma() -> None:
    for rule in RULES:
        scaled = correction(rule, scale=2.0).apply(P, STATES, OPTIONS, gamma=0.5)
        assert scaled == pytest.approx(correction(rule).apply(P, STATES, OPTIONS, gamma=1.0))


def test_its_inputs_are_what_the_probe_sees() -> None:
    """Centred states of the first question are (-1, -1) and (1, 1), before they are standardised."""
    centred = correction(inputs=("centred",)).scores(P, STATES, OPTIONS).scores[:2]
    assert centred == pytest.approx([0.2 * -1 + 0.4 * -0.25 + 0.05, 0.2 * 0 + 0.4 * 0.25 + 0.05])


def test_outputs_of_some_rows_are_those_of_all() -> None:
    every, some = correction().outputs(STATES), correction().outputs(STATES, np.array([4, 1]))
    assert some.tolist() == every[[4, 1]].tolist()


@pytest.mark.parametrize("rule", RULES)
def test_folded_it_reads_plain_states_and_says_the_same(rule: RuleName) -> None:
    whole = correction(rule, scale=3.0)
    folded = whole.folded()
    assert (folded.scale, folded.standardiser.mean.tolist()) == (1.0, [0.0, 0.0])
    ours, theirs = (c.apply(P, STATES, OPTIONS, gamma=0.25) for c in (folded, whole))
    assert ours == pytest.approx(theirs, abs=1e-6)


def test_only_a_linear_probe_can_be_folded() -> None:
    network = NetworkProbe(initial_mlp(2, MlpSettings(hidden=(4,)), seed=0), (4,))
    with pytest.raises(AssertionError, match="linear probe"):
        correction(probe=network).folded()


@pytest.mark.parametrize("hidden", [None, (4,)])
def test_it_comes_back_from_its_json_and_tensors(hidden: tuple[int, ...] | None) -> None:
    probe = LINEAR if hidden is None else NetworkProbe(initial_mlp(2, MlpSettings(hidden=hidden), seed=0), hidden)
    before = correction("listwise", probe=probe, inputs=("centred",))
    again = Correction.from_json(before.to_json(), load(save(before.tensors())))
    assert (again.rule, again.layers, again.inputs, again.base_weight, again.scale) == (
        "listwise", (3,), ("centred",), 0.5, 1.0
    )  # fmt: skip
    ours, theirs = (c.apply(P, STATES, OPTIONS, gamma=1.0) for c in (again, before))
    assert ours.tobytes() == theirs.tobytes()


def test_a_scale_has_no_place_on_the_disk() -> None:
    with pytest.raises(AssertionError, match="no place"):
        correction(scale=2.0).to_json()


def test_an_average_reads_the_layers_side_by_side_and_gives_the_mean() -> None:
    other = correction("listwise", layers=(5,), probe=LinearProbe(np.array([-1.0, 0.0]), 0.15), base_weight=1.5)
    both = average([correction("listwise"), other])
    assert (both.layers, both.base_weight) == ((3, 5), 1.0)
    side_by_side = np.hstack([STATES, STATES[:, ::-1]])
    alone = correction("listwise").outputs(STATES), other.outputs(np.ascontiguousarray(STATES[:, ::-1]))
    assert both.outputs(side_by_side) == pytest.approx(np.mean(alone, axis=0))
