"""What a fit prints: every method with its interval, what was chosen and how flat the choice is."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.planted import PlantedStore
from support.questions import toy_questions

from coral_lens.cli.printing import enough_line, more_line, print_curve, print_fit, show_run
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit_store
from coral_lens.lens.settings import FitSettings
from coral_lens.lens.trace import CurvePoint, LearningCurve
from coral_lens.ragged import Options
from coral_lens.records import Predictions
from coral_lens.report.runs import Evaluation, Run


@pytest.fixture(scope="module")
def lens() -> Lens:
    settings = FitSettings(layers=(0, 1), learning_curve=True)
    return fit_store(PlantedStore(50, signal={1: 3.0}), settings)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def printed(capsys: pytest.CaptureFixture[str], lens: Lens) -> str:
    print_fit(lens)
    return capsys.readouterr().out


def test_every_method_stands_in_the_table_with_its_intervals(lens: Lens, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, lens)
    assert all(len(line) <= 80 for line in text.split("Chosen:")[0].splitlines())
    for method, scores in lens.trace.validation.items():
        row = next(line for line in text.splitlines() if line.strip().startswith(f"{method} "))
        values = [f"{100 * scores[m].value:.1f}" for m in ("accuracy", "ece", "brier", "nll")]
        assert row.split()[-4:] == values
        assert f"{100 * scores['brier'].low:.1f} to {100 * scores['brier'].high:.1f}" in text


def test_it_says_what_was_chosen_on_how_many_questions_and_that_the_scores_flatter(
    lens: Lens, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, lens)
    assert f"Chosen: {lens.name} (R2 " in text
    assert "fitted on 40 questions and chosen on 10." in text
    assert "flatter it" in text
    assert "`coral eval`" in text


def test_it_says_which_layers_would_have_done_as_well(lens: Lens, capsys: pytest.CaptureFixture[str]) -> None:
    assert "1 of 2 layers tried are within one standard error of the best (Brier): 1." in printed(capsys, lens)
    flat = replace(lens, trace=replace(lens.trace, as_good=(0, 1)))
    assert "2 of 2 layers tried are within one standard error of the best (Brier): 0, 1." in printed(capsys, flat)


def test_a_lens_that_does_nothing_says_so(lens: Lens, capsys: pytest.CaptureFixture[str]) -> None:
    still = replace(lens.trace, chosen=replace(lens.trace.chosen, gamma=0.0))
    assert "No strength of this lens beat" not in printed(capsys, lens)
    papers = replace(lens.correction, rule="residual")
    said = printed(capsys, replace(lens, correction=papers, kind="ridge", tempering=None, trace=still))
    assert "No strength of this lens beat the unsteered model on validation, so it does nothing." in said
    # without its scores, a listwise lens still scales the base
    said = printed(capsys, replace(lens, trace=still))
    assert "No strength of this lens's scores helped on validation: it only scales the base probabilities." in said


def test_the_learning_curve_is_shown_where_there_is_one(lens: Lens, capsys: pytest.CaptureFixture[str]) -> None:
    curve = lens.trace.learning_curve
    assert curve is not None
    text = printed(capsys, lens)
    shown = re.findall(r"^ +(\d+) +\d+\.\d +\d+\.\d +\d+\.\d +\d+\.\d *$", text, re.MULTILINE)
    assert shown == [str(point.questions) for point in curve.points] == ["4", "8", "16", "28", "40"]
    assert f"{curve.enough} training questions would have been enough" in text
    without = replace(lens.trace, learning_curve=None)
    assert "would have been enough" not in printed(capsys, replace(lens, trace=without))


def test_a_curve_worked_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    point = CurvePoint(7, {"accuracy": 0.5, "ece": 0.1234, "brier": 0.75, "nll": 1.5})
    print_curve(LearningCurve((point,), 7))
    assert "7                   50.0      12.3  75.0   150.0" in capsys.readouterr().out


def test_it_says_how_many_more_labels_are_worth_it() -> None:
    points = tuple(CurvePoint(n, {"brier": 0.7}) for n in (0, 5, 20))
    short, long = LearningCurve(points, 5, 40), LearningCurve(points, 20, 0)
    assert enough_line(short) == "5 labels would have been enough: 20 gain less than a standard error over them."
    assert enough_line(long).startswith("Not fewer than 20 labels would have been enough")
    none = enough_line(LearningCurve(points, 0))
    assert none == "That labels help does not show here: 20 gain less than a standard error over none."
    assert more_line(short, 50) == "If the curve goes on so, about 40 labels more would gain 0.5 (Brier score × 100)."
    assert more_line(long, 50) == (
        "More labels are hardly worth it: ten times the 50 would gain less than 0.5 (Brier score × 100)."
    )
    assert "cannot tell" in more_line(LearningCurve(points, 5), 50)
    assert LearningCurve.from_json(long.to_json()) == long


def test_a_run_is_printed_and_its_report_written_only_with_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lens: Lens
) -> None:
    questions = toy_questions(12)
    options = Options.of_sizes([len(q.options) for q in questions])
    answers = np.array([q.answer for q in questions])
    ids = tuple(q.id for q in questions)
    rng = np.random.default_rng(0)
    predictions = {
        m: Predictions(
            m, "tiny", "toy", "", ids, answers, options.edges, options.softmax(rng.normal(size=options.n_rows))
        )
        for m in ("base", "temperature", "listwise")
    }
    run = Run("a run", (Evaluation("toy", tuple(questions), predictions),), lens.record(), {})
    show_run(run, None)
    text = capsys.readouterr().out
    assert "listwise" in text
    assert "Report:" not in text
    assert text.startswith("It helped: on 12 questions of toy (transfer), the model is right on ")
    assert text.index("Its confidence") < text.index("before→after")
    assert max(map(len, text.splitlines())) <= 80
    show_run(run, None, full=True)
    full = capsys.readouterr().out
    assert "listwise −" in full
    assert "cwECE" in full
    assert "cwECE" not in text
    show_run(run, tmp_path)
    assert f"Report: {tmp_path / 'report.html'}" in capsys.readouterr().out.replace("\n", "")
    assert (tmp_path / "report.html").exists()
