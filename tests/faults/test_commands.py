"""Kills, damage and full disks, for every command that works for long: the same bytes as undisturbed, or one sentence.

A sample of what `make torture` does. One test for all that needs the workshop, so that its commands run once however many
processes share the suite.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from faults import damage, disks, inputs, kills
from faults.outcomes import Outcome, Tally, table
from faults.workshop import ALL_COMMANDS, WITHOUT_WORK, command_of, difference, lines_of, quiet

KILLS = 1
"""Moments of each command, of all its file operations, drawn at random."""
KINDS = 4
"""Kinds of files that are damaged, of all kinds."""


def wrong_ends(tallies: Iterable[Tally]) -> list[str]:
    return [line for tally in tallies for line in tally.wrong]


def test_every_command_is_killed_or_says_why_a_kill_costs_nothing() -> None:
    worked = {command_of(line) for line in lines_of()}
    assert sorted(set(ALL_COMMANDS) - worked - WITHOUT_WORK.keys()) == []
    assert sorted(worked & WITHOUT_WORK.keys()) == []
    assert sorted(WITHOUT_WORK.keys() - set(ALL_COMMANDS)) == []


def test_kills_damage_and_full_disks_end_with_the_same_bytes_or_one_sentence(tmp_path: Path) -> None:
    with quiet():
        shop, tallies = kills.kill_all(tmp_path / "kills", kills.Recorder(), large=False, most=KILLS)
        chosen = random.Random(0).sample(sorted(damage.kinds(shop)), KINDS)
        tallies += damage.damage_all(shop, only=lambda kind: kind in chosen)
        tallies.append(disks.full_disks(shop, shop.steps[:2], rooms=[1, 4], sizes=[2000]))
        tallies.append(inputs.hostile_studies(shop, 20))
        tallies.append(inputs.hostile_lines(shop, 10, command_of))
        tallies += [kills.real(shop, shop.steps[0], renames=[1])]
    assert wrong_ends(tallies) == [], table(tallies)


# ---------------------------------------------------------------------------------------------- the suite can fail


def test_a_file_that_differs_is_new_or_is_missing_is_named() -> None:
    assert difference({"a": b"1", "b": b"", "c": b"1"}, {"a": b"1", "c": b"2", "d": b""}) == (
        "c differs, b is new, d is missing"
    )


@pytest.mark.parametrize(
    ("outcome", "changed", "end"),
    [
        (Outcome(0, "", ""), "", "same bytes"),
        (Outcome(0, "", ""), "a differs", "silent"),
        (Outcome(2, "", "loading\ncoral: a is damaged.\n"), "", "one sentence"),
        (Outcome(2, "", "Usage: coral fit\nNo such option\n"), "", "one sentence"),
        (Outcome(None, "", "Traceback ...\nKeyError: 'a'\n"), "", "traceback"),
        (Outcome(1, "", ""), "", "traceback"),
    ],
)
def test_ends_are_told_apart(outcome: Outcome, changed: str, end: str) -> None:
    tally = Tally("x")
    tally.judge("case", outcome, difference=changed)
    assert [name for name, n in tally.counts.items() if n] == [end]
    assert bool(tally.wrong) == (end in ("traceback", "silent"))


def test_a_recorder_keeps_the_folder_as_it_was_before_each_change_and_cut_while_it_is_flushed(tmp_path: Path) -> None:
    import os

    folder, recorder = tmp_path / "folder", kills.Recorder()
    folder.mkdir()
    with recorder.watching(folder, tmp_path / "kept", most=None):
        with (folder / ".x.tmp").open("wb") as file:
            file.write(b"0123456789")
            file.flush()
            os.fsync(file.fileno())
        (folder / ".x.tmp").replace(folder / "x")
        (folder / "x").unlink()
    found = [{p.name: p.read_bytes() for p in place.iterdir()} for place in recorder.kept]
    whole = {".x.tmp": b"0123456789"}
    assert found[:3] == [{}, whole, {".x.tmp": b"012"}]
    assert found[-1] == {"x": b"0123456789"}
    assert all(state in ({}, whole, {".x.tmp": b"012"}, {"x": b"0123456789"}) for state in found)


def test_the_workshop_has_a_kind_for_every_file() -> None:
    assert damage.kind_of("store/shard-00003.safetensors") == damage.kind_of("store/shard-00011.safetensors")
    assert damage.kind_of("run/run.json") != damage.kind_of("run/results.json")
