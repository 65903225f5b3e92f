"""The browser of questions holds what the run holds, in few bytes, and hostile text cannot leave its place."""

import base64
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from coral_lens.errors import CoralError
from coral_lens.ragged import Options
from coral_lens.records import Predictions, Question
from coral_lens.report.pages.explorer import bytes_of, choose_questions, questions_data, script_text, shares
from coral_lens.report.pages.run import render_report
from coral_lens.report.runs import Evaluation, Run, View, load_run, save_run
from coral_lens.report.tables.run import results_table

NASTY = "</script><script>alert('x')</script><!-- <img src=x onerror=alert(1)>"
LENS = {"model": {"name": "tiny"}, "rule": "residual"}


def evaluation(n: int, *, n_changed: int = 0, layers: tuple[int, ...] = (0, 5, 10)) -> Evaluation:
    """Two options each; the base prefers the first, the lens the second on the first `n_changed` questions."""
    ids = tuple(f"t/{i}" for i in range(n))
    questions = tuple(Question(i, i, f"What is {i}? {NASTY}", (f"yes {NASTY}", "no"), 1) for i in ids)
    offsets, answers = Options.of_sizes([2] * n).edges, np.ones(n, dtype=np.int64)
    base = np.tile([0.75, 0.25], n)
    coral = np.array([x for i in range(n) for x in ((0.4, 0.6) if i < n_changed else (0.7, 0.3))])
    predictions = {
        m: Predictions(m, "tiny", "t", "", ids, answers, offsets, p) for m, p in (("base", base), ("coral", coral))
    }
    changes = np.linspace(-1, 1, len(layers) * 2 * n).reshape(len(layers), -1)
    return Evaluation("t", questions, predictions, view=View("coral", (5,), layers, changes, np.linspace(1, 2, n)))


def test_a_question_is_packed_whole() -> None:
    data = questions_data(Run("r", (evaluation(3, n_changed=1),), LENS), before="base", after="coral")
    assert data is not None
    assert (data["layers"], data["own"]) == ([0, 5, 10], [5])
    task, name, text, options, answer, before, after, shift, changes = data["questions"][0]
    assert (task, name, answer, before, after, shift) == (0, "t/0", 1, [750, 250], [400, 600], 1.0)
    assert text == f"What is t/0? {NASTY}"
    assert options == [f"yes {NASTY}", "no"]
    values = np.frombuffer(base64.b64decode(changes), dtype=np.int8).reshape(3, 2)
    assert values / 127 == pytest.approx(evaluation(3).view.changes[:, :2], abs=0.005)  # type: ignore[union-attr]


def test_changes_beyond_one_are_cut() -> None:
    assert np.frombuffer(base64.b64decode(bytes_of(np.array([[2.0, -2.0, 0.5]]))), np.int8).tolist() == [127, -127, 64]


def test_changed_answers_come_first_and_the_rest_is_a_sample_in_order() -> None:
    chosen = choose_questions(evaluation(100, n_changed=10), before="base", after="coral", n=30)
    assert chosen.tolist()[:10] == list(range(10))
    assert len(set(chosen.tolist())) == 30
    assert (np.diff(chosen) > 0).all()


def test_places_are_shared_in_proportion_and_all_fit_where_they_can() -> None:
    assert shares([300, 100], 1000) == [300, 100]
    assert shares([3000, 1000], 1000) == [750, 250]
    assert shares([5000, 1], 1000) == [999, 1]


def test_a_page_with_a_thousand_questions_stays_small_and_says_what_it_leaves_out() -> None:
    run = Run("r", (evaluation(1500, n_changed=40, layers=tuple(range(31))),), LENS)
    page = render_report(run, table=results_table(run, n_boot=5))
    assert len(page) < 2_000_000
    assert "1,000 of 1,500 questions" in page
    assert "a probe that reads this layer alone" in page


def test_hostile_text_stays_inside_the_data_and_only_our_script_may_run() -> None:
    run = Run("r", (evaluation(4, n_changed=2),), LENS)
    page = render_report(run, table=results_table(run, n_boot=5))
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", page, flags=re.DOTALL)
    assert len(scripts) == page.count("<script") == 2
    assert json.loads(scripts[0]) == questions_data(run, before="base", after="coral")
    digest = base64.b64encode(hashlib.sha256(scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert "innerHTML" not in scripts[1]
    assert "<" not in script_text({"text": NASTY})


def test_a_run_without_views_still_has_the_browser_but_no_lens_view() -> None:
    bare = Evaluation("t", evaluation(3).questions, evaluation(3).predictions)
    run = Run("r", (bare,), LENS)
    data = questions_data(run, before="base", after="coral")
    assert data is not None
    assert data["layers"] == []
    assert data["questions"][0][-2:] == [None, ""]
    page = render_report(run, table=results_table(run, n_boot=5))
    assert "highest shift first" not in page
    assert "a probe that reads this layer alone" not in page
    assert questions_data(run, before="base", after="listwise") is None


def test_views_come_back_from_the_disk_to_a_thousandth(tmp_path: Path) -> None:
    before = evaluation(3)
    save_run(Run("r", (before,), LENS), tmp_path)
    (after,) = load_run(tmp_path).evaluations
    assert before.view is not None
    assert after.view is not None
    assert (after.view.method, after.view.own, after.view.layers) == ("coral", (5,), (0, 5, 10))
    assert after.view.changes == pytest.approx(before.view.changes, abs=0.0005)
    assert after.view.shift == pytest.approx(before.view.shift, abs=0.0005)
    view = tmp_path / "views" / "t.json"
    view.write_text(view.read_text().replace("1.5", "1.6"))
    with pytest.raises(CoralError, match="changed after the run"):
        load_run(tmp_path)
    view.unlink()
    assert load_run(tmp_path).evaluations[0].view is None
