"""The token budget is timed once per model and machine, kept, and left alone where there is nothing to win."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models import make_model

from coral_lens.engine import _machine, budget, self_check
from coral_lens.engine import planned as planned_module
from coral_lens.engine._machine import record_path
from coral_lens.engine.architectures import Family
from coral_lens.engine.budget import BUDGETS, choose_budget, fastest, made_up, seconds
from coral_lens.engine.model import Model
from coral_lens.engine.packing import plan_for
from coral_lens.engine.planned import Extraction, fill_defaults
from coral_lens.engine.scoring import TOKEN_BUDGET
from coral_lens.engine.self_check import SelfCheck, packing_of
from coral_lens.records import Prompt

FAST_512 = {512: 1.0, 1024: 2.0, 2048: 2.5, 4096: 3.0}
Timer = Callable[[Model, Sequence[Prompt], int], float]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A tiny model that counts as large, and a cache of its own."""
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_machine, "SMALLEST", 1)
    monkeypatch.setattr(budget, "is_busy", lambda: False)
    return make_model("llama")


def made_timer(speeds: dict[int, float], calls: list[int]) -> Timer:
    """A timer by which each budget takes the given time per thousand prompts."""

    def timer(_: Model, prompts: Sequence[Prompt], budget: int) -> float:
        calls.append(budget)
        return speeds[budget] * len(prompts) / 1000

    return timer


def never(_: Model, __: Sequence[Prompt], ___: int) -> float:
    raise AssertionError("nothing is to be timed")


def test_a_budget_wins_only_beyond_the_noise() -> None:
    assert fastest({512: [1.0], 1024: [1.04], 4096: [1.2]}) == 1024
    assert fastest({512: [1.0], 1024: [1.2], 4096: [1.1]}) == 512
    # faster in the median, but slower than the default in one round
    assert fastest({512: [1.0, 1.0, 1.0], 1024: [1.2, 1.2, 0.9]}) == 1024


def test_the_choice_is_timed_once_and_kept(model: Model) -> None:
    calls: list[int] = []
    assert choose_budget(model, 1000, timer=made_timer(FAST_512, calls)) == 512
    assert set(calls) == set(BUDGETS)
    assert choose_budget(model, 1000, timer=never) == 512
    assert json.loads(record_path(model, "budgets").read_text())["token_budget"] == 512


def test_a_slow_model_keeps_the_default_after_two_short_runs(model: Model) -> None:
    calls: list[int] = []
    assert choose_budget(model, 1000, timer=made_timer(dict.fromkeys(BUDGETS, 1e6), calls)) == TOKEN_BUDGET
    assert calls == [TOKEN_BUDGET] * 2


def test_a_small_model_is_never_timed() -> None:
    assert choose_budget(make_model("llama"), 1000, timer=never) == TOKEN_BUDGET


def test_few_questions_and_a_busy_machine_are_not_timed_and_nothing_is_kept(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_budget(model, 63, timer=never) == TOKEN_BUDGET
    monkeypatch.setattr(budget, "is_busy", lambda: True)
    assert choose_budget(model, 1000, timer=never) == TOKEN_BUDGET
    monkeypatch.setattr(budget, "is_busy", lambda: False)
    assert choose_budget(model, 64, timer=made_timer(FAST_512, [])) == 512
    assert choose_budget(model, 1, timer=never) == 512


def test_a_machine_is_busy_when_others_use_most_of_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine.os, "cpu_count", lambda: 4)
    for load, busy in ((2.3, False), (2.5, True)):
        monkeypatch.setattr(_machine.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert _machine.is_busy() == busy


@pytest.mark.parametrize("damage", ["{", "[]", '{"token_budget": 7}'])
def test_a_damaged_record_is_measured_again(model: Model, damage: str) -> None:
    path = record_path(model, "budgets")
    path.parent.mkdir(parents=True)
    path.write_text(damage)
    assert choose_budget(model, 1000, timer=made_timer(FAST_512 | {4096: 0.5}, [])) == 4096
    assert choose_budget(model, 1000, timer=never) == 4096


def test_a_cache_that_cannot_be_written_is_no_error(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path / "file"))
    assert choose_budget(model, 1000, timer=made_timer(FAST_512, [])) == 512


def test_other_threads_or_weights_have_a_record_of_their_own(model: Model) -> None:
    first = record_path(model, "budgets")
    assert record_path(replace(model, fingerprint={**model.fingerprint, "weights": "other"}), "budgets") != first
    n = torch.get_num_threads()
    torch.set_num_threads(n + 1)
    try:
        assert record_path(model, "budgets") != first
    finally:
        torch.set_num_threads(n)


def test_made_up_prompts_fill_batches_and_can_be_scored(model: Model) -> None:
    prompts = made_up(model, 4096)
    assert [len(plan_for(prompts, token_budget=b).batches) for b in BUDGETS] == [8, 4, 2, 1]
    assert seconds(model, made_up(model, 128), 1024) > 0


def test_a_set_budget_and_a_recorded_one_come_before_the_calibration(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned_module, "choose_budget", lambda *_: 4096)
    what = Extraction(layers=(0,), packing="tree")
    assert fill_defaults(model, tmp_path, what, 1000).token_budget == 4096
    assert fill_defaults(model, tmp_path, replace(what, packing="plain"), 1000).token_budget == TOKEN_BUDGET
    (tmp_path / "manifest.json").write_text(json.dumps({"token_budget": 1024, "packing": "tree"}))
    assert fill_defaults(model, tmp_path, what, 1000).token_budget == 1024
    assert fill_defaults(model, tmp_path, replace(what, token_budget=300), 1000).token_budget == 300


# ---------------------------------------------------------------------------------------------------- the self-check


def never_checked(_: Model, __: Sequence[Prompt]) -> SelfCheck:
    raise AssertionError("the model is not to be checked again")


def test_a_model_is_checked_once_in_a_process_and_its_record_serves_the_next(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert packing_of(model) == "tree"
    monkeypatch.setattr(self_check, "self_check", never_checked)
    assert packing_of(model) == "tree"
    again = make_model("llama")
    assert again.hf is not model.hf
    assert packing_of(again) == "tree"
    record_path(model, "packings").write_text("damaged")
    with pytest.raises(AssertionError, match="checked again"):
        packing_of(make_model("llama"))


def test_another_family_or_dtype_is_checked_by_itself(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert packing_of(model) == "tree"
    monkeypatch.setattr(self_check, "self_check", never_checked)
    for other in (replace(model, family=Family("sliding")), make_model("qwen2")):
        with pytest.raises(AssertionError, match="checked again"):
            packing_of(other)


def test_rows_of_their_own_are_not_remembered_so_the_warning_comes_again(model: Model) -> None:
    wrong = make_model("bloom")
    for _ in range(2):
        with pytest.warns(UserWarning, match="every option is scored in a row of its own"):
            assert packing_of(wrong) == "plain"
