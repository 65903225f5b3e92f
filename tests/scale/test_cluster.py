"""What cannot be a cluster is refused in one sentence, within seconds."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import ray

from coral_lens import errors
from coral_lens.errors import CoralError
from coral_lens.scale.cluster import connected, fit_on, room_for, start
from coral_lens.scale.settings import RaySettings


def refusal(settings: RaySettings) -> str:
    with pytest.raises(CoralError) as error, connected(settings):
        pass
    return str(error.value)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    assert refusal(RaySettings(ray="local")) == (
        "--ray needs ray, which is not installed: pip install 'coral-lens[ray]'"
    )


def test_an_address_at_which_nobody_answers_is_refused_within_seconds() -> None:
    with socket.socket() as taken:  # bound, and listening to nobody
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert "nobody answers there" in refusal(RaySettings(ray=f"127.0.0.1:{port}"))


@pytest.mark.parametrize("address", ["", "localhost", "10.0.0.1", "10.0.0.1:", "a b:1", "http://x:1", "x:123456"])
def test_what_is_no_address_is_refused(address: str) -> None:
    assert "--ray must be `local` or an address" in refusal(RaySettings(ray=address))


def nodes(*sizes: tuple[float, float]) -> list[dict[str, Any]]:
    return [{"Alive": True, "Resources": {"CPU": cpus, "GPU": gpus}} for cpus, gpus in sizes]


def test_by_default_there_are_as_many_workers_as_fit_on_whole_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes((8, 4), (7, 1)), {"Alive": False, "Resources": {"CPU": 99}}])
    assert room_for(RaySettings(ray="x", cpus_per_worker=2)) == 4 + 3
    assert room_for(RaySettings(ray="x", cpus_per_worker=2, gpus_per_worker=1.0)) == 4 + 1
    assert room_for(RaySettings(ray="x", gpus_per_worker=0.5)) == 8 + 2
    monkeypatch.setattr(ray, "nodes", lambda: nodes((99, 1)))
    for share, n in ((0.2, 5), (0.1, 10), (0.3, 3), (0.7, 1)):
        assert room_for(RaySettings(ray="x", gpus_per_worker=share)) == n
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes((8, 4), (7, 1)), {"Alive": False, "Resources": {"CPU": 99}}])
    assert room_for(RaySettings(ray="x", workers=3)) == 3
    with pytest.raises(CoralError, match="room for a worker with 1 cores and 8 GPUs: the largest have 8 and 4"):
        room_for(RaySettings(ray="x", gpus_per_worker=8.0))
    assert fit_on({"CPU": 3}, RaySettings(ray="x", gpus_per_worker=1.0)) == 0


def test_workers_on_this_machine_have_a_cluster_of_their_own_beside_one_that_runs_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", lambda **options: asked.update(options))
    start(RaySettings(ray="local", workers=2, cpus_per_worker=3))
    assert (asked["address"], asked["num_cpus"]) == ("local", 6)


@pytest.mark.parametrize("gpus", [0.00001, 0.33333, 1.5])
def test_gpus_that_ray_cannot_divide_are_refused(gpus: float) -> None:
    with pytest.raises(CoralError, match=f"four digits at most, such as 0.25. Got {gpus!r}"):
        RaySettings(ray="x", gpus_per_worker=gpus)


def test_options_for_workers_without_a_cluster_are_refused() -> None:
    RaySettings().refuse_without_ray()
    for settings in (RaySettings(workers=2), RaySettings(cpus_per_worker=2), RaySettings(gpus_per_worker=1.0)):
        with pytest.raises(CoralError, match="are for --ray"):
            settings.refuse_without_ray()
