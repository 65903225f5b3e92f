"""The page says what the audit found, holds no foreign script, and every number beside it is the audit's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.audits import audited, rows

from coral_lens import AuditSettings, audit_probabilities, load_maps, write_audit
from coral_lens.audit.measure import Audit, audit
from coral_lens.audit.page import render_audit
from coral_lens.audit.reading import read_audited
from coral_lens.audit.rows import calibrated_lines, group_lines, system_lines, threshold_text
from coral_lens.audit.sentences import sentences
from coral_lens.report.runs import load_run

NASTY = "<script>alert('x')</script>"


@pytest.fixture(scope="module")
def found() -> Audit:
    made = [
        r | {"probs": {"sure": r["probs"], NASTY: [0.25] * 4}, "topic": NASTY if i % 2 else "even"}
        for i, r in enumerate(rows(200, sharpness=2))
    ]
    swapped = [{k: v[::-1] if k in ("probs", "options") else v for k, v in r.items()} for r in rows(200, sharpness=2)]
    return audit(read_audited([made]), AuditSettings(by=("topic",), risk=0.4), swapped=read_audited([swapped]))


@pytest.fixture(scope="module")
def page(found: Audit) -> str:
    return render_audit(found)


def test_the_page_has_every_part_and_is_safe_to_open(page: str) -> None:
    for part in ("systems", "confidence", "compared", "calibrated", "groups", "positions", "provenance"):
        assert f'id="{part}"' in page
    assert NASTY not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=[\"']?https?:", page)


def test_the_head_says_how_right_and_how_sure(found: Audit, page: str) -> None:
    first, *others = sentences(found)
    metrics = found.metrics["sure"]
    assert f"“sure” is right on {100 * metrics.scores['accuracy'].value:.1f} [" in first
    assert "it is too sure by" in first
    assert f"{100 * metrics.scores['smooth_ece'].value:.1f} [" in first
    assert any("answers flip" in s or "flip when" in s for s in others)
    assert "is right on" in page


def test_numbers_beside_the_page_are_the_audits(found: Audit, tmp_path: Path) -> None:
    page = write_audit(found, str(tmp_path / "out"))
    assert page == tmp_path / "out" / "report.html"
    record = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert record["n_questions"] == 200
    assert record["systems"]["sure"]["floors"] == found.floors["sure"] | {"ece": found.metrics["sure"].ece_floor}
    assert record["flips"][0]["n_pairs"] == 200
    assert record["sentences"] == sentences(found)
    assert load_maps(tmp_path / "out" / "maps.json") == found.maps
    run = load_run(tmp_path / "out")
    assert run.evaluations[0].predictions["sure"].probs.tolist() == found.audited.systems["sure"].probs.tolist()
    for name in ("results.md", "results.csv", "results.json"):
        assert (tmp_path / "out" / name).stat().st_size


def test_the_terminal_has_the_same_values(found: Audit) -> None:
    lines = "\n".join([*system_lines(found), *calibrated_lines(found), *group_lines(found)])
    assert f"{100 * found.metrics['sure'].scores['brier'].value:.1f}" in lines
    assert "sure + temperature" in lines
    assert "topic: even, sure" in lines


def test_a_page_of_few_questions_says_so_and_promises_nothing(tmp_path: Path) -> None:
    few = audit(audited(20))
    assert "20 questions are few" in sentences(few)[-1]
    assert 'id="calibrated"' not in render_audit(few)
    write_audit(few, tmp_path / "out")
    assert not (tmp_path / "out" / "maps.json").exists()


def test_a_page_of_confidences_alone_leaves_out_what_they_cannot_say() -> None:
    made = [{"confidence": 0.5 + i % 50 / 100, "correct": i % 3 > 0} for i in range(120)]
    found = audit_probabilities(made, AuditSettings(precision=0.5))
    page = render_audit(found)
    assert "Only the confidence in each answer is known" in page
    assert "NLL (top)" in page or "top" in page
    assert calibrated_lines(found) == []


def test_a_threshold_that_was_not_found_says_what_it_would_take() -> None:
    found = audit(audited(200, sharpness=2), AuditSettings(precision=0.99))
    assert any("no threshold can be promised" in s and "give more questions" in s for s in sentences(found))
    assert (threshold_text(None), threshold_text(-1.0), threshold_text(0.5)) == ("none is safe", "every answer", "0.5")
