"""Kills, damage, full disks and hostile lines, for every command: the same bytes as undisturbed, or one sentence.

A sample of what `make torture` does. One test for all that works in the workshop, which is at one place, so that its commands
run once however many processes share the suite.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import pytest
from support.commands import COMMANDS, LINES, WITHOUT_WORK, command_of, quiet

from faults import damage, disks, inputs, kills, lines, others, sharing
from faults.outcomes import Outcome, Tally, coral, table
from faults.workshop import Step, Workshop, content, difference

KINDS = 4
"""Kinds of files that are damaged, of all kinds."""


def wrong_ends(tallies: Iterable[Tally]) -> list[str]:
    return [line for tally in tallies for line in tally.wrong]


def test_every_command_is_killed_or_says_why_a_kill_costs_nothing() -> None:
    worked = {command_of(line) for line in LINES}
    assert sorted(COMMANDS.keys() - worked - WITHOUT_WORK.keys()) == []
    assert sorted(worked & WITHOUT_WORK.keys()) == []
    assert sorted(WITHOUT_WORK.keys() - COMMANDS.keys()) == []


def test_kills_damage_full_disks_and_hostile_lines_end_with_the_same_bytes_or_one_sentence(workshop: Workshop) -> None:
    with quiet():
        tallies = list(kills.kill_all(workshop))
        assert sum(tally.tried for tally in tallies) >= 100
        chosen = random.Random(0).sample(sorted(damage.kinds(workshop)), KINDS)
        tallies += damage.damage_all(workshop, only=lambda kind: kind in chosen)
        tallies.append(others.other_peoples_files(workshop, most=3))
        tallies.append(disks.full_disks(workshop, workshop.steps[:2], rooms=[1, 4], sizes=[2000]))
        tallies.append(inputs.hostile_studies(workshop, 20))
        tallies.append(lines.hostile_lines(workshop, lines.drawn(10, seed=1), light=False))
        tallies.append(kills.real(workshop, workshop.steps[0], renames=[1]))
        tallies += [kills.random_moments(workshop, step, n=2) for step in workshop.steps[1:3]]
    assert wrong_ends(tallies) == [], table(tallies)


def test_threads_and_forks_share_a_model() -> None:
    with quiet():
        tallies = [sharing.threads(2), sharing.forks(4)]
    assert wrong_ends(tallies) == [], table(tallies)


# ------------------------------------------------------------------------------------------------------- command lines


def test_every_option_of_every_command_takes_a_hostile_value_or_refuses_it_in_one_sentence(
    workshop: Workshop, tmp_path: Path
) -> None:
    with quiet():
        tally = lines.hostile_lines(workshop.with_bench(tmp_path / "now"), lines.drawn(260, seed=0), light=True)
    assert wrong_ends([tally]) == [], table([tally])


def test_every_option_of_every_command_meets_hostile_values_of_its_type() -> None:
    tried = {(command_of(line.base), line.parameter.name) for line in lines.all_lines()}
    options = {(c, p.name) for c, command in COMMANDS.items() for p in command.params if p.name != "help"}
    assert tried == options
    kinds = {(line.parameter.name, line.kind) for line in lines.all_lines()}
    assert {("limit", "int"), ("risk", "float"), ("out", "path"), ("full", "flag"), ("train", "text")} <= kinds


def test_no_command_takes_for_its_output_what_it_reads(workshop: Workshop, tmp_path: Path) -> None:
    shop, tried = workshop.with_bench(tmp_path / "now"), set[str]()
    for step in shop.steps:
        command = command_of(step.line)
        results = [f"--{p.name}" for p in COMMANDS[command].params if p.name in ("out", "work")]
        folder = shop.bench(step.before)
        before = content(folder)
        for option, place in product(results, read_by(step, folder)):
            tried.add(command)
            with quiet():
                outcome = coral(folder, *step.arguments, f"{option}={place}")
            assert f"{option} {place} is {place}, which is read" in outcome.last, step.line
            assert content(folder) == before, step.line
    # these read what is embedded
    assert {name for name, command in COMMANDS.items() if any(p.name == "out" for p in command.params)} - tried == {
        "demo",
        "reproduce",
    }


def read_by(step: Step, folder: Path) -> list[str]:
    """What is there of all that a line names, but for where its results go."""
    words = step.arguments[len(command_of(step.line).split()) :]
    results = {words[i + 1] for i, word in enumerate(words) if word in ("--out", "--work")}
    return [word for word in words if word not in results and (folder / word).exists()]


def test_a_folder_of_data_is_no_place_for_results(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "q.jsonl").write_text('{"question": "Which?", "options": ["a", "b"], "answer": 0}\n')
    line = "fit --train q.jsonl --model nowhere --data data --out data/../data"
    assert coral(tmp_path, *line.split()).last == (
        "coral: --out data/../data is data, which is read: it would be replaced; choose another place."
    )


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
        (Outcome(2, "", "╭─ Error ─╮\nNo such option\n"), "", "one sentence"),
        (Outcome(130, "", "coral: Interrupted.\n"), "", "one sentence"),
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
