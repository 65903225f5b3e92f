"""A connection to a Ray cluster, and how many workers it has room for. Every failure is one sentence, within seconds."""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from coral_lens.errors import CoralError, need
from coral_lens.scale.driver import Worker
from coral_lens.scale.settings import RaySettings

SECONDS = 5.0
"""How long an address may take to answer."""
LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""Set before Ray is imported for workers on this machine: it then listens on the loopback address only, and reports to nobody."""
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}


@dataclass(frozen=True)
class Cluster:
    """A cluster that is connected to, and what each worker has of it."""

    workers: int
    cpus: int
    gpus: float
    numbers: Iterator[int] = field(default_factory=lambda: count(1), compare=False)
    """Of the workers that are started."""
    namespace: str = field(default_factory=lambda: f"coral-{secrets.token_hex(4)}", compare=False)
    """Where their names are unique: a cluster may have other drivers."""

    def start(self, kind: type, *arguments: Any) -> Worker:
        """Start a worker of a kind, under the name that messages give it and Ray's dashboard shows."""
        import ray

        name = f"worker {next(self.numbers)}"
        room = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_restarts=0)(kind)
        return Worker(name, room.options(name=name, namespace=self.namespace).remote(*arguments))


@contextmanager
def connected(settings: RaySettings) -> Iterator[Cluster]:
    """Connect to the cluster of the settings, or start workers here, while the block runs."""
    need("ray", by="--ray")
    if settings.ray == "local":
        os.environ.update({name: os.environ.get(name, value) for name, value in LOCAL.items()})
    import ray

    assert settings.ray is not None, "nobody asks for a cluster without an address"
    was_connected = ray.is_initialized()
    if not was_connected:
        start(settings)
    try:
        yield Cluster(room_for(settings), settings.cpus_per_worker, settings.gpus_per_worker)
    finally:
        if not was_connected:
            ray.shutdown()


def start(settings: RaySettings) -> None:
    """Start Ray on this machine, or connect to where it runs."""
    import ray

    address = str(settings.ray)
    try:
        if address == "local":
            n = (settings.workers or 0) * settings.cpus_per_worker
            # as many cores as are asked for, although the machine may have fewer: the user decides
            ray.init(address="local", num_cpus=n or None, **QUIET)  # not one that happens to run here already
        else:
            refuse_silent(address)
            ray.init(address=address, **{k: v for k, v in QUIET.items() if k != "include_dashboard"})
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CoralError(f"--ray {address}: Ray cannot be started or reached: {reason}") from error


def refuse_silent(address: str) -> None:
    """Refuse an address at which nobody answers, before Ray tries for minutes."""
    match = re.fullmatch(r"(?:ray://)?(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):(\d{1,5})", address)
    if match is None:
        raise CoralError(f"--ray must be `local` or an address such as 10.0.0.1:6379. Got {address!r} instead.")
    try:
        socket.create_connection((match[1].strip("[]"), int(match[2])), timeout=SECONDS).close()
    except (OSError, OverflowError) as error:
        raise CoralError(
            f"--ray {address}: nobody answers there ({getattr(error, 'strerror', None) or error}); start a cluster with "
            "`ray start --head`, or use --ray local."
        ) from error


def room_for(settings: RaySettings) -> int:
    """Return how many workers are started: as many as are asked for, or as fit; refuse workers none of which fits."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = sum(fit_on(node, settings) for node in nodes)
    if not fitting:
        most = {kind: max((node.get(kind, 0) for node in nodes), default=0) for kind in ("CPU", "GPU")}
        raise CoralError(
            f"No machine of the cluster has room for a worker with {settings.cpus_per_worker} cores and "
            f"{settings.gpus_per_worker:g} GPUs: the largest have {most['CPU']:g} and {most['GPU']:g}."
        )
    return settings.workers or fitting


def fit_on(node: Mapping[str, int | float], settings: RaySettings) -> int:
    """Return how many workers fit on a machine."""
    by_cpu = node.get("CPU", 0) // settings.cpus_per_worker
    gpus = settings.gpus_per_worker
    # rounded first: 1 // 0.2 is 4, because 0.2 is a little more than a fifth
    return int(min(by_cpu, round(node.get("GPU", 0) / gpus, 6)) if gpus else by_cpu)
