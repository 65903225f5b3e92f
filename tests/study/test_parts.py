"""A study that is computed in parts, by whoever and in whatever order, ends with the bytes of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.outcomes import coral
from faults.workshop import content
from support.commands import furnish, quiet

from coral_lens.engine import extract as extract_module

RUN = ("run", "study.toml", "--out", "study", "--work", "states")


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No figures, and shards of a few questions."""
    monkeypatch.setattr(extract_module, "SHARD_BYTES", 4000)
    with quiet():
        yield


def results(folder: Path) -> dict[str, bytes]:
    """The files of a study and its work, but for those that hold seconds."""
    return {
        name: data
        for name, data in content(folder).items()
        if name.startswith(("study/", "states/")) and not name.endswith("cost.json")
    }


def ran(folder: Path, *arguments: str) -> str:
    outcome = coral(folder, *arguments)
    assert outcome.code == 0, outcome.err
    return outcome.out


def test_parts_of_a_study_leave_what_one_process_leaves(tmp_path: Path) -> None:
    whole, parts = (furnish(tmp_path / name, large=False) for name in ("whole", "parts"))
    ran(whole, *RUN)
    first = [ran(parts, *RUN, "--part", f"{i}/3") for i in (3, 1, 2)]
    assert ["fits wait for the other parts of model" in said for said in first] == [True, True, False]
    assert len(list(parts.glob("states/model/states/*/finished.json"))) == 2
    again = [ran(parts, *RUN, "--part", f"{i}/3") for i in (1, 3)]
    assert all("is finished" in said and "writes the report" in said for said in [first[2], *again])
    done = {p: p.stat().st_mtime_ns for p in parts.glob("states/model/mine-*/**/predictions/*.json")}
    assert len(done) == 4, "base, temperature and the two methods of the study"
    ran(parts, *RUN)
    assert {p: p.stat().st_mtime_ns for p in done} == done
    assert results(parts) == results(whole)


def test_what_is_no_part_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    outcome = coral(tmp_path, *RUN, "--part", "4/3")
    assert (outcome.code, "--part must lie between" in outcome.err) == (2, True)
