"""Train autoencoders of several sizes side by side over the same minibatches (the paper's section 5.1).

Loss = |z - z_hat|^2 + lambda * sum_j |f_j| * |d_j|, with z-scored states; weighing by the decoder's norms leaves nothing to
gain from small codes and long directions. Learning rate and lambda are warmed up, features that have fallen silent get a
new direction from a badly reconstructed state, and a killed run goes on from its last checkpoint and ends with the same
bytes. Never runs a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from coral_lens.errors import CoralError
from coral_lens.manifest import digest, digest_bytes, read_json, versions, write_atomic, write_json
from coral_lens.progress import Bar, silent
from coral_lens.sae.autoencoder import Autoencoder
from coral_lens.sae.states import Minibatches, Ordinary, StateSource
from coral_lens.sae.weights import TrainingSettings, Weights, first_weights, train_step
from coral_lens.shards import thread_count

SMALLEST_SCALE = 1e-6
"""A column whose deviation is below this part of its mean counts as constant and keeps scale 1."""


# --------------------------------------------------------------------------------------------------------- z-scores


@dataclass(frozen=True)
class Statistics:
    """Mean and deviation of every column of the training states, and how many states each shard holds."""

    mean: Float[Tensor, " width"]
    scale: Float[Tensor, " width"]
    counts: dict[int, int]

    def __call__(self, states: Float[Tensor, "row width"]) -> Float[Tensor, "row width"]:
        return (states - self.mean) / self.scale


def statistics_of(source: StateSource) -> Statistics:
    """Return the statistics of the training states from one pass in float64, shifted by the first shard's mean."""
    shift: Tensor | None = None
    counts: dict[int, int] = {}
    total: Tensor | float = 0.0
    squares: Tensor | float = 0.0
    for shard in source.training:
        states = source.states(shard).double()
        shift = states.mean(dim=0) if shift is None else shift
        counts[shard] = len(states)
        total = total + (states - shift).sum(dim=0)
        squares = squares + (states - shift).square().sum(dim=0)
    n = sum(counts.values())
    assert shift is not None
    assert isinstance(total, Tensor)
    mean = shift + total / n
    scale = (squares / n - (total / n) ** 2).clamp_min(0).sqrt()
    scale = torch.where(scale <= SMALLEST_SCALE * mean.abs(), 1.0, scale)
    return Statistics(mean.float(), scale.float(), counts)


def folded(weights: Weights, statistics: Statistics, *, layer: int, k: int, about: dict[str, Any]) -> Autoencoder:
    """Return the autoencoder of the states themselves: z-scoring and its inverse become part of the weights."""
    mean, scale = statistics.mean.double(), statistics.scale.double()
    w_enc = weights.w_enc.double() / scale[:, None]
    return Autoencoder(
        w_enc=w_enc.float(),
        b_enc=(weights.b_enc.double() - mean @ w_enc).float(),
        w_dec=(weights.w_dec.double() * scale).float(),
        b_dec=(weights.b_dec.double() * scale + mean).float(),
        layer=layer,
        architecture="topk" if k else "standard",
        k=k,
        about=about,
        statistics={"mean": statistics.mean, "scale": statistics.scale},
    )


# --------------------------------------------------------------------------------------------------------- the run


def train(
    source: StateSource, folder: Path, settings: TrainingSettings, *, layer: int, bar: Bar = silent
) -> dict[int, Autoencoder]:
    """Train one autoencoder per expansion, from the last checkpoint in `folder` on, and save them as FOLDER/4x and so on."""
    ordinary = Ordinary.of(source, settings.massive)
    statistics = statistics_of(ordinary)
    width = len(statistics.mean)
    if settings.k and settings.k > width * min(settings.expansions):
        raise CoralError(
            f"TopK of {settings.k} is more than the {width * min(settings.expansions)} features there are."
        )
    batches = Minibatches(ordinary, statistics.counts, settings.batch_size, settings.epochs, settings.seed)
    n_steps = sum(batches.sizes())
    record = {
        "settings": json.loads(json.dumps(asdict(settings))),
        "states": digest({k: v for k, v in source.manifest.items() if k not in ("threads", "versions")}),
        "threads": torch.get_num_threads(),
    }
    checkpoints = Checkpoints(folder / "checkpoint", record)
    start, found = checkpoints.latest()
    sizes = {e: e * width for e in settings.expansions}
    all_weights = found or {e: first_weights(width, n, seed=settings.seed + e) for e, n in sizes.items()}
    with bar("training", n_steps, "steps") as advance, thread_count(checkpoints.threads):
        advance(start)
        for step, states in enumerate(batches.iterate(start=start), start):
            z = statistics(states)
            for weights in all_weights.values():
                train_step(weights, z, settings, at=(step, n_steps))
            if (step + 1) % settings.checkpoint == 0 or step + 1 == n_steps:
                checkpoints.write(step + 1, all_weights)
            advance(1)
    model = {k: source.manifest["model"][k] for k in ("name", "weights", "tokenizer", "dtype")}
    seen = {"states": sum(statistics.counts.values()), "sampling": source.manifest["sampling"], "steps": n_steps}
    result = {}
    for expansion, weights in all_weights.items():
        about = {
            "model": model,
            "expansion": expansion,
            "training": {**record["settings"], **seen},
            "versions": versions(),
        }
        made = folded(weights, statistics, layer=layer, k=settings.k, about=about)
        result[expansion] = replace(made, norm_limit=ordinary.norm_limit)
        result[expansion].save(folder / f"{expansion}x")
    return result


class Checkpoints:
    """The last finished checkpoint of a run: one file per expansion, named by a record that is written after them."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.path, self.about = folder, folder / "checkpoint.json", about
        self._record = read_json(self.path) if self.path.exists() else {}
        if self._record:
            for what in ("settings", "states"):
                if self._record.get(what) != about[what]:
                    raise CoralError(
                        f"{folder} is the checkpoint of a training with other {what}; choose another folder or delete this one."
                    )

    @property
    def threads(self) -> int:
        """Threads of the run that is gone on with: their number changes rounding."""
        return int(self._record.get("threads", self.about["threads"]))

    def latest(self) -> tuple[int, dict[int, Weights]]:
        """Return the step to go on at and the weights, or step 0 and none where a file is missing or damaged."""
        found = {}
        for expansion, (name, wanted) in self._record.get("files", {}).items():
            path = self.folder / name
            raw = path.read_bytes() if path.exists() else b""
            if digest_bytes(raw) != wanted:
                return 0, {}
            found[int(expansion)] = Weights.from_tensors(load_tensors(raw))
        return (int(self._record["step"]), found) if found else (0, {})

    def write(self, step: int, weights: Mapping[int, Weights]) -> None:
        """Write the files of a step, then the record, then remove the files of the step before."""
        files = {}
        for expansion, some in weights.items():
            raw = save_tensors({n: t.contiguous() for n, t in some.tensors().items()})
            files[str(expansion)] = [f"{step}-{expansion}x.safetensors", digest_bytes(raw)]
            write_atomic(self.folder / files[str(expansion)][0], raw)
        self._record = {**self.about, "threads": self.threads, "step": step, "files": files}
        write_json(self.path, self._record)
        kept = {name for name, _ in files.values()}
        for path in self.folder.glob("*x.safetensors"):
            if path.name not in kept:
                path.unlink()
