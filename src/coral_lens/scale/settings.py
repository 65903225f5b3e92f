"""Where work runs that is spread over machines, as options of commands. Imports no Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from coral_lens.errors import CoralError
from coral_lens.storage.settings import Count, Range, Settings


@dataclass(frozen=True)
class RaySettings(Settings):
    """Workers on a Ray cluster."""

    ray: str | None = None
    """Spread the work over a Ray cluster: its ADDRESS, such as 10.0.0.1:6379, or `local` for workers on this machine."""
    workers: Count | None = None
    """Number of workers, each with the model. By default as many as the cluster has room for."""
    cpus_per_worker: Count = 1
    """Cores, and threads, of each worker."""
    gpus_per_worker: Annotated[float, Range(0, 64)] = 0.0
    """GPUs of each worker; 0.5 lets two share one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        gpus = self.gpus_per_worker
        if gpus != round(gpus, 4) or (gpus > 1 and gpus != int(gpus)):
            raise CoralError(
                "--gpus-per-worker must be a whole number, or a part of one GPU with four digits at most, such as 0.25. "
                f"Got {gpus!r} instead."
            )

    def refuse_without_ray(self) -> None:
        """Refuse options for workers where no cluster is named."""
        if self.ray is None and (self.workers or self.cpus_per_worker != 1 or self.gpus_per_worker):
            raise CoralError(
                "--workers, --cpus-per-worker and --gpus-per-worker are for --ray; name a cluster, or `local`."
            )
