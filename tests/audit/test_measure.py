"""An audit measures what `measure` measures, fits on some questions and measures on others, and compares pair by pair."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.audits import CLASSES, audited, rows

from coral_lens.audit.measure import FEWEST, audit, divide, floors_of
from coral_lens.audit.reading import read_audited
from coral_lens.audit.settings import AuditSettings
from coral_lens.audit.systems import AuditedSet
from coral_lens.errors import CoralError
from coral_lens.metrics.comparisons import paired_difference
from coral_lens.metrics.scores import measure, score

GIVEN = audited(3000, sharpness=2)


def two(n: int) -> AuditedSet:
    return read_audited([[r | {"probs": {"sure": r["probs"], "even": [0.25] * 4}} for r in rows(n, sharpness=2)]])


def test_the_metrics_are_those_of_every_other_page() -> None:
    found = audit(two(120))
    for name, said in two(120).systems.items():
        assert found.metrics[name].scores == measure(said, more=("smooth_ece",)).scores


def test_systems_are_compared_pair_by_pair_with_the_first() -> None:
    given = two(200)
    found = audit(given)
    assert found.compared is not None
    (task,) = found.compared.tasks
    (comparison,) = task.comparisons
    expected = paired_difference(given.systems["even"], given.systems["sure"], "brier")
    assert comparison.differences["brier"].value == pytest.approx(expected.value)
    assert (comparison.method, comparison.against) == ("even", "sure")


def test_labels_of_the_measured_questions_have_no_part_in_the_maps() -> None:
    given = rows(400, sharpness=2)
    settings = AuditSettings(precision=0.8)
    mask = divide(read_audited([given]), settings.fit_share, seed=settings.seed)
    other = [
        r if m else r | {"label": CLASSES[(CLASSES.index(r["label"]) + 1) % 4]}
        for r, m in zip(given, mask, strict=True)
    ]
    one, two_ = audit(read_audited([given]), settings), audit(read_audited([other]), settings)
    assert one.maps == two_.maps
    assert one.n_measured == two_.n_measured == (~mask).sum()
    assert one.calibrated != two_.calibrated


def test_questions_of_one_group_are_never_divided() -> None:
    given = read_audited([[r | {"group": f"g{i // 7}"} for i, r in enumerate(rows(200))]])
    mask = divide(given, 0.5, seed=3)
    groups = [q.group for q in given.questions]
    assert all(len({m for m, g in zip(mask, groups, strict=True) if g == group}) == 1 for group in set(groups))
    assert 0.45 < mask.mean() < 0.55


def test_maps_may_be_fitted_on_another_file() -> None:
    found = audit(audited(100, sharpness=2), fit_on=audited(2000, sharpness=2, seed=5))
    (maps,) = found.maps.values()
    assert maps.n_fitted == 1000
    assert maps.temperature == pytest.approx(2, abs=0.15)
    assert found.n_measured == 100


def test_a_file_that_holds_what_is_measured_is_refused() -> None:
    with pytest.raises(CoralError, match="20 rows of the table are in the table too"):
        audit(audited(100), fit_on=audited(200).take(np.arange(200) < 20))
    with pytest.raises(CoralError, match="says nothing of the system 'sure'"):
        audit(two(60), fit_on=audited(60, seed=3))


def test_a_threshold_is_measured_on_questions_that_had_no_part_in_it() -> None:
    found = audit(GIVEN, AuditSettings(precision=0.85))
    (threshold,) = found.thresholds
    assert threshold.right is not None
    assert threshold.right.value > 0.85
    assert 0.1 < threshold.answered.value < 0.9
    same = audit(GIVEN, AuditSettings(risk=0.15))
    assert same.thresholds == found.thresholds


def test_sets_cover_as_asked_and_leave_options_out() -> None:
    (sets,) = audit(GIVEN, AuditSettings(coverage=0.8)).sets
    assert sets.covered.value == pytest.approx(0.8, abs=0.04)
    assert sets.size < sets.n_options == 4


def test_what_sets_and_a_threshold_are_worth_is_said_with_whole_groups_drawn() -> None:
    """Twenty copies of each of sixty questions say no more than sixty questions."""
    few = rows(60, sharpness=2)
    copies = [r | {"id": f"{r['id']} {k}", "group": r["id"]} for r in few for k in range(20)]
    alone = [r | {"group": r["id"]} for r in copies]
    settings, widths = AuditSettings(coverage=0.8, risk=0.5), []
    for made in (copies, alone):
        found = audit(read_audited([made]), settings)
        answered, right = found.thresholds[0].answered, found.thresholds[0].right
        assert right is not None
        assert 0.99 < answered.low < answered.value == 1.0, "all are answered, and that is not certain of others"
        widths.append([share.high - share.low for share in (found.sets[0].covered, right)])
    assert all(whole > 2 * by_itself for whole, by_itself in zip(*widths, strict=True))


def test_few_questions_are_measured_and_nothing_is_fitted() -> None:
    found = audit(audited(FEWEST - 1))
    assert (found.maps, found.calibrated, found.n_measured) == ({}, None, 0)
    with pytest.raises(CoralError, match=r"39.*40|at least 40|precision|fit"):
        audit(audited(FEWEST - 1), AuditSettings(precision=0.9))


def test_subgroups_are_shown_by_themselves_or_together_where_they_are_small() -> None:
    given = [r | {"team": "big" if i < 60 else f"small {i}"} for i, r in enumerate(rows(70))]
    found = audit(read_audited([given]), AuditSettings(by=("team", "topic")))
    assert [(s.test, s.task, s.n_questions) for s in found.groups] == [
        ("team", "big", 60),
        ("team", "(others)", 10),
        ("topic", "even", 35),
        ("topic", "odd", 35),
    ]
    right = [r["label"] == CLASSES[int(np.argmax(r["probs"]))] for r in given[:60]]
    assert found.groups[0].accuracy.value == pytest.approx(np.mean(right))


def test_the_floor_is_what_a_calibrated_system_shows() -> None:
    """Of many worlds whose system is right as often as it says, the mean of their smooth ECE is the floor of each."""
    worlds = [next(iter(audited(300, seed=seed).systems.values())) for seed in range(20)]
    values = [score(said, "smooth_ece") for said in worlds]
    (said,) = audited(300).systems.values()
    assert floors_of(said, seed=0)["smooth_ece"] == pytest.approx(np.mean(values), abs=0.006)


def test_a_confidence_alone_is_measured_by_what_it_can_tell() -> None:
    made = [
        {"confidence": max(r["probs"]), "correct": r["label"] == CLASSES[int(np.argmax(r["probs"]))]} for r in rows(400)
    ]
    alone, whole = audit(read_audited([made]), AuditSettings(precision=0.8)), audit(audited(400))
    (a,), (b,) = alone.metrics.values(), whole.metrics.values()
    for metric in ("accuracy", "ece", "smooth_ece", "auroc", "aurc", "brier_top1"):
        assert a.scores[metric].value == pytest.approx(b.scores[metric].value), metric
    assert not alone.sets
    assert alone.thresholds[0].maps.used == "none"


def test_settings_that_say_two_things_are_refused() -> None:
    with pytest.raises(
        CoralError, match=r"--precision and --risk are two ways to say one thing \(0.95 is a risk of 0.05\)"
    ):
        AuditSettings(precision=0.9, risk=0.2)
    with pytest.raises(CoralError, match="precision"):
        AuditSettings(precision=1.5)


def test_an_audit_is_the_same_each_time() -> None:
    given = audited(200, sharpness=2)
    assert replace(audit(given), audited=given) == replace(audit(given), audited=given)


def test_a_column_that_is_not_there_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coral_lens.audit.measure.measure", lambda *_, **__: pytest.fail("this takes long"))
    with pytest.raises(CoralError, match="no column 'team'"):
        audit(two(40), AuditSettings(by=("team",)))
