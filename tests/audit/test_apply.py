"""Maps change new rows as they changed the measured ones; rows come back whole, with what was added behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.audits import rows

from coral_lens import AuditSettings, apply_maps, audit_probabilities
from coral_lens.audit.maps import SystemMaps
from coral_lens.errors import CoralError
from coral_lens.ragged import Options


@pytest.fixture(scope="module")
def maps() -> dict[str, SystemMaps]:
    return audit_probabilities(rows(1200, sharpness=2), AuditSettings(precision=0.7)).maps


def test_rows_come_back_with_calibrated_probabilities_and_need_no_label(maps: dict[str, SystemMaps]) -> None:
    new = [{k: v for k, v in r.items() if k != "label"} for r in rows(20, sharpness=2, seed=4)]
    found = apply_maps(new, maps)
    (fitted,) = maps.values()
    assert fitted.abstention is not None
    assert fitted.abstention.threshold is not None
    for before, after in zip(new, found, strict=True):
        expected = np.array(before["probs"]) ** (1 / fitted.temperature)
        assert after["calibrated_probs"] == pytest.approx(expected / expected.sum())
        assert after["calibrated_confidence"] == max(after["calibrated_probs"])
        assert after["abstain"] == (after["calibrated_confidence"] <= fitted.abstention.threshold)
        assert list(after)[: len(before)] == list(before)
        assert {k: after[k] for k in before} == before
        assert int(np.argmax(before["probs"])) in after["options_in_set"]


def test_another_map_leaves_out_what_was_promised_of_the_first(maps: dict[str, SystemMaps]) -> None:
    (fitted,) = maps.values()
    (row,) = apply_maps(rows(1), maps, which="isotonic")
    p = np.array(rows(1)[0]["probs"])
    assert row["calibrated_probs"] == pytest.approx(fitted.curve(p, Options.of_sizes([4])))
    assert not {"options_in_set", "abstain"} & set(row)


def test_a_frame_is_a_table_too(maps: dict[str, SystemMaps]) -> None:
    frame = pd.DataFrame(rows(5))
    assert [r["calibrated_probs"] for r in apply_maps(frame, maps)] == [
        r["calibrated_probs"] for r in apply_maps(rows(5), maps)
    ]


def test_a_row_names_its_system_where_there_are_several(maps: dict[str, SystemMaps]) -> None:
    (fitted,) = maps.values()
    both = {"one": fitted, "two": fitted}
    assert len(apply_maps([rows(1)[0] | {"model": "two"}], both)) == 1
    with pytest.raises(CoralError, match=r"row 1.*names no system, and the maps are of one, two"):
        apply_maps(rows(1), both)
    with pytest.raises(CoralError, match=r"names the system 'tow'.*two"):
        apply_maps([rows(1)[0] | {"model": "tow"}], both)


def test_what_cannot_be_mapped_is_refused(maps: dict[str, SystemMaps], tmp_path: Path) -> None:
    with pytest.raises(CoralError, match="a confidence alone cannot be mapped"):
        apply_maps([{"confidence": 0.5, "correct": True}], maps)
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(CoralError, match=r"none\.jsonl"):
        apply_maps(tmp_path / "none.jsonl", maps)
