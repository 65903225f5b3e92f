"""Workers on a cluster of two nodes fill a store with the bytes of one process, also if they are killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from faults.cluster import Scene, extract_line, names_questions, scene, study, wanted_of
from faults.outcomes import coral
from faults.workshop import content, difference
from support.commands import GOLDEN, quiet
from support.s3 import objects_at, s3_server

from coral_lens.data.questions import read_questions
from coral_lens.engine import extract as extract_module
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.parts import extract_part
from coral_lens.engine.shard_work import compute_shard
from coral_lens.engine.wanted import Wanted
from coral_lens.errors import CoralError
from coral_lens.records import Question
from coral_lens.scale.cluster import Cluster
from coral_lens.scale.extract import Spread, fill
from coral_lens.scale.worker import ModelSource, compute_task, cut_task
from coral_lens.storage.parts import Part
from coral_lens.storage.places import working_place
from coral_lens.storage.resumable import locked
from coral_lens.storage.shards import write_shard

pytestmark = pytest.mark.usefixtures("one_thread")
NAME = str(GOLDEN / "model")


@pytest.fixture(scope="module")
def golden() -> Model:
    return load_model(NAME, dtype="float32")


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return read_questions(GOLDEN / "train.jsonl")


@pytest.mark.parametrize("more", [Wanted(), Wanted((1,), read=("answer", "context"), neutral=True)])
def test_a_shard_that_is_cut_out_of_its_plan_has_the_bytes_of_one_that_is_not(
    golden: Model, questions: list[Question], tmp_path: Path, more: Wanted
) -> None:
    planned = extract_module.plan_questions(golden, questions, replace(more.of(golden), token_budget=128))
    plan = extract_module.plan_shards(planned, 1)
    assert len(plan.shards) > 4
    for number, shard in enumerate(plan.shards):
        whole = write_shard(tmp_path, number, compute_shard(planned, shard, lambda _: None))
        assert compute_task(golden, cut_task(plan, number), plan.extraction, tmp_path / "cut") == whole


def test_workers_that_see_another_place_than_the_driver_are_noticed(golden: Model, questions: list[Question]) -> None:
    plan = extract_module.plan_shards(extract_module.plan_questions(golden, questions, Wanted().of(golden)))
    spread = Spread(Cluster(1, 1, 0.0), ModelSource(NAME))
    with (
        working_place("memory://its-own/states") as place,
        pytest.raises(CoralError, match=r"A worker has begun memory://its-own/states, which is empty here"),
    ):
        fill(spread, plan, place, [], None)


# ---------------------------------------------------------------------------------------------------------- on Ray


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The address of a bucket on a real s3 server, whose keys nodes find in the environment."""
    with s3_server() as url:
        yield url


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory, bucket: str) -> Iterator[Scene]:
    """A real cluster of two nodes on this machine; `python -m faults cluster` does much more to it."""
    with scene(tmp_path_factory.mktemp("cluster")) as on:
        yield on


def wait_until(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.1)


def test_workers_on_two_nodes_of_which_one_is_killed_go_on_with_what_a_part_began_to_the_bytes_of_one_process(
    two_nodes: Scene,
) -> None:
    folder, killed = two_nodes.fresh(), list[int]()
    extract_part(two_nodes.model, two_nodes.questions, folder, Part(1, 4), extraction=wanted_of(two_nodes.model))
    assert two_nodes.cluster.workers == 2

    def two() -> list[Path]:
        return sorted(folder.with_name("workers").glob("*.pid"), key=lambda path: path.stat().st_mtime_ns)

    told = count()

    def advance(_: int) -> None:
        if next(told) == 1:  # the first call says what was done before; now both are on the way
            wait_until(lambda: len(two()) == 2)
        there = two()
        if len(there) == 2 and not killed:
            killed.append(int(there[-1].stem))
            os.kill(killed[0], signal.SIGKILL)

    assert two_nodes.fill(folder, progress=advance).code == 0
    assert killed
    assert difference(content(folder), two_nodes.alone) == ""


def test_a_shard_at_which_workers_fail_three_times_is_named_and_the_command_goes_on_from_there(
    two_nodes: Scene,
) -> None:
    folder = two_nodes.fresh()
    outcome = two_nodes.fill(folder, trouble="a worker has not enough memory", times=3)
    assert names_questions(outcome.err, two_nodes), outcome.err
    assert "can't allocate memory" in outcome.err
    line = extract_line(two_nodes, folder)
    with quiet():
        again = coral(two_nodes.home, *line.split(), "--workers", "1")
    assert again.code == 0, again.err
    assert "48 questions, 4 layers" in again.out
    assert "1 worker(s) load" in again.err
    assert difference(content(folder), two_nodes.alone) == ""


def test_a_second_driver_on_a_folder_is_refused_before_a_worker_loads_anything(two_nodes: Scene) -> None:
    folder = two_nodes.fresh()
    with locked(folder), quiet():
        outcome = coral(two_nodes.home, *extract_line(two_nodes, folder).split())
    assert outcome.is_refusal
    assert "is being written by another process" in outcome.last
    assert not folder.with_name("workers").exists()


def test_workers_on_two_nodes_fill_a_store_on_s3_with_the_bytes_of_one_process_in_a_folder(
    two_nodes: Scene, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path))
    url = f"{bucket}/states"
    extract_part(two_nodes.model, two_nodes.questions, url, Part(1, 4), extraction=wanted_of(two_nodes.model))
    with quiet():
        outcome = coral(two_nodes.home, *extract_line(two_nodes, url).split())
    assert outcome.code == 0, outcome.err
    assert f"48 questions, 4 layers, 0 MiB in {url}" in outcome.out
    assert difference(objects_at(url), two_nodes.alone) == ""


def test_a_study_on_a_cluster_leaves_what_one_process_leaves(two_nodes: Scene) -> None:
    with quiet():
        tally = study(two_nodes)
    assert tally.wrong == []
    assert tally.counts["same bytes"] == 2
