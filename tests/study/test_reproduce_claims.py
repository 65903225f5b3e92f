"""What an interval says about a claim of the paper, worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from coral_lens.study.reproduce.claim import between, interval_says, no_gain_says, number_of, stated, together
from coral_lens.study.reproduce.claims import all_claims
from coral_lens.study.reproduce.claims_inside import depth_claims, gamma_claim, sae_claims, side_by_side_claims


def score(value: float, low: float, high: float) -> dict[str, float]:
    return {"value": value, "low": low, "high": high}


@pytest.mark.parametrize(
    ("low", "high", "up", "down", "no_gain"),
    [
        (0.01, 0.05, "agrees", "does not agree", "does not agree"),
        (-0.05, -0.01, "does not agree", "agrees", "agrees"),
        (-0.02, 0.005, "cannot be told", "cannot be told", "agrees"),
        (-0.02, 0.02, "cannot be told", "cannot be told", "cannot be told"),
        (0.001, 0.009, "agrees", "does not agree", "agrees"),  # clear, and too little to matter
    ],
)
def test_an_interval_says_whether_there_is_a_gain_or_none(
    low: float, high: float, up: str, down: str, no_gain: str
) -> None:
    change = score((low + high) / 2, low, high)
    assert interval_says(change, better="up") == up
    assert interval_says(change, better="down") == down
    assert no_gain_says(change, better="up") == no_gain
    assert no_gain_says(score(0.0, -high, -low), better="down") == no_gain


def test_one_gain_is_enough_to_contradict_and_one_doubt_to_leave_it_open() -> None:
    assert together(["agrees", "cannot be told", "does not agree"]) == "does not agree"
    assert together(["agrees", "cannot be told"]) == "cannot be told"
    assert together(["agrees"]) == together([]) == "agrees"


def test_numbers_are_written_with_signs_and_units() -> None:
    assert between(score(0.032, -0.01, 0.051)) == "+3.2 [−1.0 to +5.1]"
    assert (stated("heads.needed"), number_of("layers.best_low")) == ("526 heads", "17")


def test_several_layers_and_other_strengths_agree_only_where_no_room_is_left() -> None:
    record: dict[str, Any] = {
        "top": [
            {"n_layers": n, "behind_single": {"accuracy": score(0.0, -0.02, high)}}
            for n, high in ((3, 0.004), (4, 0.04))
        ],
        "gammas": [
            {"gamma": 1.0, "scores": {"brier": score(0.5, 0.4, 0.6)}, "over_one": {"brier": score(0.0, 0.0, 0.0)}},
            {"gamma": 3.0, "scores": {"brier": score(0.4, 0.3, 0.5)}, "over_one": {"brier": score(-0.1, -0.2, -0.05)}},
        ],
    }
    assert [claim.said for claim in side_by_side_claims(record)] == ["agrees", "cannot be told"]
    assert gamma_claim(record).said == "does not agree"
    record["gammas"][1]["scores"]["brier"]["value"] = 0.7
    assert gamma_claim(record).said == "agrees"


@pytest.mark.parametrize(("deep", "said"), [(-0.2, "agrees"), (-0.05, "cannot be told"), (0.2, "does not agree")])
def test_deeper_probes_are_compared_with_a_linear_one_by_the_ends_that_lie_farthest_apart(
    deep: float, said: str
) -> None:
    def row(depth: int, value: float) -> dict[str, Any]:
        gain = score(value, value - 0.04, value + 0.04)
        return {"probe": f"depth {depth}", "transfer": False, "gain": {"accuracy": gain}}

    away = {**row(0, 0.9), "transfer": True}
    (claim,) = depth_claims({"rows": [row(0, 0.0), *(row(n, deep) for n in (1, 2, 3)), away]})
    assert claim.said == said
    assert claim.ours == f"{between(score(deep, deep - 0.08, deep + 0.08))} points of accuracy"
    assert list(depth_claims({"rows": [row(0, 0.0)]})) == []


def test_features_that_could_not_be_steered_by_are_said_so() -> None:
    quiet = {"ece": {"mean": score(0.0, -0.001, 0.001), "quartiles": (-1e-4, 0.0, 1e-4)}}
    ablation = {"plan": {"by": "correlation"}, "groups": {"correlation": quiet}, "chosen": [1, 2, 3]}
    one, nothing = sae_claims({"ablation": ablation, "steering": {"failed": "There is nothing to steer by."}})
    assert (one.said, nothing.said) == ("agrees", "cannot be told")
    assert nothing.sentence == "Cannot be told: There is nothing to steer by."

    def steered(features: int, low: float, high: float) -> dict[str, Any]:
        change = {"accuracy": score(0.0, low, high), "ece": score(0.0, -0.005, 0.005)}
        return {"gamma": 1.0, "features": features, "less base": change}

    rows = [steered(5, -0.01, 0.004), steered(160, -0.01, 0.03), {**steered(9, 0.1, 0.2), "gamma": 0.0}]
    _, open_claim = sae_claims({"ablation": ablation, "steering": {"rows": rows}})
    assert open_claim.said == "cannot be told"
    assert "of 2 steerings by 5 to 160 features 0 clearly raise accuracy or lower ECE, and 1 may" in open_claim.sentence


def test_a_claim_says_which_model_it_is_of_unless_it_counts_over_all() -> None:
    group = {"layers": "0 to 4", "last_half": score(0.1, 0.05, 0.2), "for_90": 3}
    record = {"groups": [group], "rows": [{"layers": "0 to 4", "components": 100, "r2": score(0.1, 0.0, 0.2)}]}
    claims = all_claims({}, {"dimensions": {"one": record, "other": record}})
    assert [claim.model for claim in claims] == ["one", "one", "other", "other"]
