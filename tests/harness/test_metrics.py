"""ECE, cwECE and Brier inside lm-eval runs are those of `coral eval`, for any model; outside the block nothing changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.api.task import ConfigurableTask
from support.lm_eval_runs import evaluate, write_task
from support.models import make_hflm
from support.questions import toy_questions

from coral_lens.engine.model import Model
from coral_lens.harness.logs import load_log
from coral_lens.harness.metrics import calibration, gap, item_of
from coral_lens.metrics.scores import score

pytestmark = pytest.mark.usefixtures("one_thread")
ASKED = toy_questions(14, seed=3)
ADDED = ("ece", "cwece", "brier")


def calibrated(model: Model, folder: Path, **arguments: Any) -> dict[str, Any]:
    with calibration():
        return evaluate(make_hflm(model, batch_size=8), folder, **arguments)


def test_metrics_over_ragged_options_are_ours(tiny: Model, tmp_path: Path) -> None:
    found = calibrated(tiny, write_task(tmp_path, ASKED))
    (results,) = found["results"].values()
    path = tmp_path / "samples_toy.jsonl"
    path.write_text("".join(json.dumps(s) + "\n" for s in found["samples"]["toy"]), "utf-8")
    ours = load_log(path).predictions("sum")
    assert len({len(q.options) for q in ASKED}) > 1
    assert {m: results[f"{m},none"] for m in ADDED} == pytest.approx({m: score(ours, m) for m in ADDED})
    assert results["acc,none"] == score(ours, "accuracy")
    assert not any(found["higher_is_better"]["toy"][m] for m in ADDED)


def test_outside_the_block_lm_eval_is_as_it_was(tiny: Model, tmp_path: Path) -> None:
    folder = write_task(tmp_path, ASKED)
    before = {name: getattr(ConfigurableTask, name) for name in ("process_results", "aggregation", "higher_is_better")}
    with pytest.raises(ZeroDivisionError), calibration():
        _ = 1 / 0
    assert all(getattr(ConfigurableTask, name) is function for name, function in before.items())
    plain = evaluate(make_hflm(tiny), folder)["results"]["toy"]
    assert not any(f"{m},none" in plain for m in ADDED)
    both = calibrated(tiny, folder)["results"]["toy"]
    assert {k: v for k, v in both.items() if k.split(",")[0].removesuffix("_stderr") not in ADDED} == plain


def test_requests_of_mutual_information_are_not_counted_as_options(tiny: Model, tmp_path: Path) -> None:
    plain = calibrated(tiny, write_task(tmp_path / "a", ASKED))["results"]["toy"]
    mutual = calibrated(tiny, write_task(tmp_path / "b", ASKED, metrics=["acc", "acc_mutual_info"]))["results"]["toy"]
    assert [mutual[f"{m},none"] for m in ADDED] == pytest.approx([plain[f"{m},none"] for m in ADDED], abs=1e-6)


def test_tasks_without_one_right_option_keep_their_own_metrics(tiny: Model, tmp_path: Path) -> None:
    several = write_task(tmp_path / "several", ASKED, doc_to_target="{{[0, 1]}}", metrics=["acc"])
    found = calibrated(tiny, several)
    assert not any(f"{m},none" in found["results"]["toy"] for m in ADDED)
    assert "acc,none" in found["results"]["toy"]
    assert (
        "ece,none" not in calibrated(tiny, write_task(tmp_path / "plain", ASKED), predict_only=True)["results"]["toy"]
    )


class Task:
    """As much of lm-eval's task as is looked at."""

    multiple_input = False

    def doc_to_choice(self, doc: dict[str, Any]) -> list[str]:
        return list(doc["options"])

    def doc_to_target(self, doc: dict[str, Any]) -> Any:
        return doc["answer"]


def test_an_item_worked_by_hand() -> None:
    results = [(float(np.log(p)), False) for p in (0.2, 0.6, 0.2)]
    item = item_of(Task(), {"options": ["x", "y", "z"], "answer": "y"}, results)
    assert item is not None
    assert item[0] == 1
    assert item[1] == pytest.approx([0.2, 0.6, 0.2])
    assert item_of(Task(), {"options": ["x", "y", "z"], "answer": "w"}, results) is None
    # one confidence of 0.6 that is right, one of 0.9 that is wrong: (0.4 + 0.9) / 2
    assert gap("ece", [(1, [0.4, 0.6]), (0, [0.1, 0.9])]) == pytest.approx(0.65)
