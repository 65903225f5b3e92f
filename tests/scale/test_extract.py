"""Workers on a cluster of two nodes fill a store with the bytes of one process, also if they are killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.commands import GOLDEN

from coral_lens.data.questions import read_questions
from coral_lens.engine import extract as extract_module
from coral_lens.engine.extract import Extraction, all_layers, extract
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.parts import extract_part
from coral_lens.engine.wanted import Wanted
from coral_lens.records import Question
from coral_lens.scale.cluster import connected
from coral_lens.scale.driver import Worker
from coral_lens.scale.extract import Spread, extract_on_ray
from coral_lens.scale.settings import RaySettings
from coral_lens.scale.worker import ModelSource, compute_task, cut_task
from coral_lens.storage.parts import Part
from coral_lens.storage.shards import write_shard

pytestmark = pytest.mark.usefixtures("one_thread")
NAME = str(GOLDEN / "model")


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of a few questions, in batches of a few tokens."""
    monkeypatch.setattr(extract_module, "SHARD_BYTES", 1)
    monkeypatch.setattr(extract_module, "choose_budget", lambda *_: 128)


@pytest.fixture(scope="module")
def golden() -> Model:
    return load_model(NAME, dtype="float32")


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return read_questions(GOLDEN / "train.jsonl")


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("more", [Wanted(), Wanted((1,), read=("answer", "context"), neutral=True)])
def test_a_shard_that_is_cut_out_of_its_plan_has_the_bytes_of_one_that_is_not(
    golden: Model, questions: list[Question], tmp_path: Path, more: Wanted
) -> None:
    planned = extract_module.plan_questions(golden, questions, more.of(golden))
    plan = extract_module.plan_shards(planned)
    assert len(plan.shards) > 4
    for number, shard in enumerate(plan.shards):
        whole = write_shard(tmp_path, number, extract_module.compute_shard(planned, shard, lambda _: None))
        assert compute_task(golden, cut_task(plan, number), plan.extraction, tmp_path / "cut") == whole


# ---------------------------------------------------------------------------------------------------------- on Ray


@dataclass(frozen=True)
class Watched(Spread):
    """Workers that a test can kill."""

    started: list[Worker] = field(default_factory=list)

    def start(self) -> Worker:
        self.started.append(super().start())
        return self.started[-1]


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """The address of a real cluster of two nodes on this machine."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("OMP_NUM_THREADS", "1")
        small = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
        cluster = Cluster(initialize_head=True, head_node_args=small | {"include_dashboard": False})
        cluster.add_node(**small)
        yield cluster.address
        cluster.shutdown()


def test_workers_on_two_nodes_of_which_one_is_killed_go_on_to_the_bytes_of_one_process(
    golden: Model, questions: list[Question], tmp_path: Path, two_nodes: str
) -> None:
    import ray

    wanted = Extraction(all_layers(golden), token_budget=128)
    extract(golden, questions, tmp_path / "one", extraction=wanted)
    extract_part(golden, questions, tmp_path / "many", Part(1, 4), extraction=wanted)
    said: list[str] = []
    settings = RaySettings(ray=two_nodes)
    with connected(settings) as cluster:
        assert cluster.workers == 2
        spread = Watched(cluster, ModelSource(NAME, dtype="float32"), said.append)
        killed: list[int] = []

        def advance(n: int) -> None:
            if len(spread.started) == 2 and not killed:
                killed.append(ray.get(spread.started[1].actor.__ray_call__.remote(lambda worker: os.getpid())))
                os.kill(killed[0], signal.SIGKILL)

        store = extract_on_ray(spread, questions, tmp_path / "many", wanted=Wanted(), progress=advance)
        assert killed
        assert content(tmp_path / "many") == content(tmp_path / "one")
        assert len(store.questions) == len(questions)
