"""What an interval says about a claim of the paper, worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from coral_lens.metrics.comparisons import Difference
from coral_lens.metrics.scores import Metrics
from coral_lens.report.tables.study import StudyRow, StudyTable
from coral_lens.study.reproduce.claim import (
    between,
    interval_says,
    is_nothing,
    most_chosen,
    no_gain_says,
    number_of,
    stated,
    together,
)
from coral_lens.study.reproduce.claims import claims_of_record, claims_of_tables, table_claims
from coral_lens.study.reproduce.claims_inside import (
    ablation_claim,
    depth_claims,
    dimension_claims,
    early_claim,
    gamma_claim,
    highest_claim,
    middle_claim,
    sae_claims,
    side_by_side_claims,
    spread_claim,
    steering_claim,
)


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
    for change, said in {(0.1, 0.05, 0.2): "agrees", (0.02, -0.03, 0.07): "cannot be told"}.items():
        record["gammas"][1] |= {"scores": {"brier": score(0.7, 0.6, 0.8)}, "over_one": {"brier": score(*change)}}
        assert gamma_claim(record).said == said, "that 1 is lowest is no more than a value"


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


def test_what_changed_nothing_at_all_is_told_from_what_changed_little() -> None:
    assert is_nothing(Difference(0.0, 0.0, 0.0, 1.0))
    assert not is_nothing(Difference(0.0, -0.001, 0.001, 1.0))


def test_a_claim_says_which_model_it_is_of_unless_it_counts_over_all() -> None:
    group = {"layers": "0 to 4", "last_half": score(0.1, 0.05, 0.2), "for_90": 3}
    record = {"groups": [group], "rows": [{"layers": "0 to 4", "components": 100, "r2": score(0.1, 0.0, 0.2)}]}
    assert [claim.model for claim in claims_of_record("dimensions", "one", record)] == ["one", "one"]
    assert [claim.model for claim in claims_of_tables({})] == []


def layers(n: int, **more: Any) -> dict[str, Any]:
    """The record of an analysis of layers, with the same row at each."""
    return {"rows": [{"layer": i, **more} for i in range(n + 1)], "base": {"accuracy": score(0.3, 0.2, 0.4)}}


@pytest.mark.parametrize(
    ("chosen", "low", "said"),
    [
        ([16, 18, 20, 17, 16], 0.01, "agrees"),
        ([16, 18, 20, 17, 16], -0.01, "cannot be told"),  # the change is not clear, although 16 is a middle layer
        ([2, 3, 2, 2, 30], 0.01, "does not agree"),
        ([16, 16, 16, 2, 16], 0.01, "cannot be told"),  # folds differ
    ],
)
def test_the_best_layer_is_counted_over_folds_and_the_gain_is_paired(chosen: list[int], low: float, said: str) -> None:
    record = layers(30) | {"single_layers": chosen, "single_gain": {"accuracy": score(0.05, low, 0.1)}}
    claim = middle_claim(record)
    assert claim.said == said
    assert f"changes accuracy by {between(score(0.05, low, 0.1))} points" in claim.sentence
    assert "of 5 folds, which is a count" in claim.sentence


def test_of_layers_chosen_equally_often_the_lowest_is_taken() -> None:
    assert most_chosen([20, 9, 20, 9, 3]) == 9


@pytest.mark.parametrize(
    ("low", "high", "said"), [(-0.2, -0.1, "agrees"), (-0.1, 0.1, "cannot be told"), (0.1, 0.2, "does not agree")]
)
def test_early_layers_are_judged_at_the_strength_of_the_paper(low: float, high: float, said: str) -> None:
    at_one = {"at_one": {"accuracy": score(0.25, 0.2, 0.3)}, "at_one_gain": {"accuracy": score(low, low, high)}}
    harmless = {"chosen": {"accuracy": score(0.3, 0.2, 0.4)}}  # gamma 0 was chosen: the model as it is
    claim = early_claim(layers(30, **at_one, **harmless))
    assert claim.said == said
    assert "the first 7 layers have 25.0 % accuracy on average" in claim.sentence


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-0.001, 0.001, "agrees"),
        (-0.02, 0.001, "cannot be told"),
        (0.01, 0.02, "does not agree"),
        (-0.02, -0.01, "does not agree"),
    ],
)
def test_a_clear_change_by_single_features_does_not_agree(low: float, high: float, said: str) -> None:
    mean = {"ece": {"mean": score((low + high) / 2, low, high), "quartiles": (0.0, 0.0, 0.0)}}
    claim = ablation_claim({"plan": {"by": "correlation"}, "groups": {"correlation": mean}, "chosen": [1]})
    assert claim.said == said


def test_where_no_feature_was_selected_and_no_strength_tried_it_cannot_be_told() -> None:
    nothing = ablation_claim({"plan": {"by": "correlation"}, "groups": {}, "chosen": []})
    assert nothing.sentence == "Cannot be told: no feature was selected by correlation."
    assert steering_claim({"rows": [{"gamma": 0.0}]}).sentence == "Cannot be told: no strength above 0 was tried."


def heads(*r2: tuple[float, float, float]) -> dict[str, Any]:
    values = [score(*one) for one in r2]
    above = {"0.05": sum(v["value"] > 0.05 for v in values), "0.1": sum(v["value"] > 0.1 for v in values)}
    share, clear = score(0.1, 0.05, 0.2), sum(v["low"] > 0 for v in values)
    return {"rows": [{"r2": v} for v in values], "above": above, "clear": clear, "needed": score(1.0, 1.0, 1.0),
            "needed_share": share, "top_share": share, "mean": values[0], "highest": max(v["value"] for v in values)}  # fmt: skip


def test_heads_without_signal_do_not_contradict_that_it_is_spread() -> None:
    assert spread_claim(heads((0.001, -0.01, 0.01), (-0.02, -0.03, -0.01))).said == "cannot be told"
    assert spread_claim(heads((0.05, 0.03, 0.07))).said == "does not agree"


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ((0.08, 0.06, 0.095), "agrees"),
        ((0.08, 0.04, 0.12), "cannot be told"),
        ((0.12, 0.08, 0.16), "cannot be told"),
        ((0.15, 0.11, 0.2), "does not agree"),
    ],
)
def test_a_head_is_above_a_limit_only_where_its_interval_is(head: tuple[float, float, float], said: str) -> None:
    assert highest_claim(heads((0.02, 0.0, 0.04), head)).said == said


def test_more_components_than_were_tried_are_not_called_a_number() -> None:
    rows = [{"layers": "0 to 4", "components": k, "r2": score(0.1, 0.0, 0.2)} for k in (1, 100)]
    group = {"layers": "0 to 4", "last_half": score(0.1, 0.05, 0.2), "for_90": 101}
    *_, claim = dimension_claims({"groups": [group], "rows": rows})
    assert claim.ours == "more than 100 components in layers 0 to 4, a count"
    assert "101" not in claim.sentence
    *_, claim = dimension_claims({"groups": [{**group, "for_90": 100}], "rows": rows})
    assert (claim.ours, claim.said) == ("100 components in layers 0 to 4, a count", "does not agree")


@pytest.mark.parametrize(
    ("best", "said"), [(("coral",), "agrees"), ((), "cannot be told"), (("iti",), "does not agree")]
)
def test_the_best_accuracy_is_one_that_clearly_leads(
    best: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CORAL has the highest value each time: what is told apart is whether a paired test says so."""
    monkeypatch.setattr("coral_lens.study.reproduce.claims.best_and_second", lambda *_: ({"CORAL"}, set()))
    row = StudyRow("coral", Metrics("coral", "", "", "", 300, 0, 0.01, 25, 100, 0, {}), {})
    table = StudyTable("m", "mix", "race_question:test", "held-out", 300, (row,), (), {"accuracy": best})
    claim = next(table_claims([table], ("RACE",), "steering"))
    assert (claim.said, claim.ours) == (said, "1 of 1")
