"""Train autoencoders of several sizes side by side over the same minibatches (the paper's section 5.1).

Loss = |z - z_hat|^2 + lambda * sum_j |f_j| * |d_j|, with z-scored states; weighing by the decoder's norms leaves nothing to
gain from small codes and long directions. Learning rate and lambda are warmed up, features that have fallen silent get a
new direction from a badly reconstructed state, and a killed run goes on from its last checkpoint and ends with the same
bytes. First the weights and one step, which know nothing of files; then z-scores, the run, and `coral sae train`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from coral_lens.engine.prompts import prepare
from coral_lens.errors import CoralError
from coral_lens.records import UNKNOWN, Question, Scored
from coral_lens.sae.autoencoder import Autoencoder, is_own, top_k
from coral_lens.sae.quality import PatchedLoss, loss_recovered, measure_quality
from coral_lens.sae.settings import Sampling, TrainingSettings
from coral_lens.sae.states import Minibatches, OrdinaryStates, PooledStates, StateSource, TokenStore, collect
from coral_lens.storage.files import digest, digest_bytes, kept_record, versions, write_atomic, write_record
from coral_lens.storage.outputs import has_word, refuse_folder, refuse_replacing
from coral_lens.storage.progress import Bar, silent
from coral_lens.storage.resumable import locked, thread_count

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


# ---------------------------------------------------------------------------------------------------------- weights


@dataclass
class SaeWeights:
    """The weights of one autoencoder of z-scored states, and what Adam and resampling remember of each."""

    w_enc: Float[Tensor, "width feature"]
    b_enc: Float[Tensor, " feature"]
    w_dec: Float[Tensor, "feature width"]
    """Row j is the paper's d_j."""
    b_dec: Float[Tensor, " width"]
    moments: dict[str, Tensor] = field(default_factory=dict)
    """Adam's means `m.NAME` and squares `v.NAME`."""
    silent: Int[Tensor, " feature"] = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Steps since each feature was active."""

    NAMES = ("w_enc", "b_enc", "w_dec", "b_dec")

    def parameters(self) -> dict[str, Tensor]:
        """Return the weights by name."""
        return {name: getattr(self, name) for name in self.NAMES}

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that a checkpoint keeps."""
        return {**self.parameters(), **self.moments, "silent": self.silent}

    def to(self, device: str) -> SaeWeights:
        """Return the same on a device."""
        return SaeWeights.from_tensors({name: tensor.to(device) for name, tensor in self.tensors().items()})

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> SaeWeights:
        moments = {n: t for n, t in tensors.items() if n[:2] in ("m.", "v.")}
        return SaeWeights(**{n: tensors[n] for n in SaeWeights.NAMES}, moments=moments, silent=tensors["silent"])


def first_weights(width: int, n_features: int, *, seed: int) -> SaeWeights:
    """Return random short directions, the encoder the decoder's transpose, and no biases."""
    rng = torch.Generator().manual_seed(seed)
    directions = torch.randn(n_features, width, generator=rng)
    w_dec = 0.1 * directions / directions.norm(dim=1, keepdim=True)
    weights = SaeWeights(w_dec.T.contiguous(), torch.zeros(n_features), w_dec, torch.zeros(width))
    weights.moments = {f"{m}.{n}": torch.zeros_like(t) for m in "mv" for n, t in weights.parameters().items()}
    weights.silent = torch.zeros(n_features, dtype=torch.int64)
    return weights


def codes_of(weights: SaeWeights, z: Float[Tensor, "row width"], *, k: int = 0) -> Float[Tensor, "row feature"]:
    """Return f = ReLU(W_enc z + b_enc), or its k largest."""
    codes = torch.addmm(weights.b_enc, z, weights.w_enc).relu()
    return top_k(codes, k) if k else codes


def loss_of(
    weights: SaeWeights, z: Float[Tensor, "row width"], *, penalty: float, k: int = 0
) -> tuple[Float[Tensor, ""], Float[Tensor, "row feature"], Float[Tensor, " row"]]:
    """Return the mean loss over states (the paper's L_SAE), their codes, and each state's squared error."""
    codes = codes_of(weights, z, k=k)
    errors = (torch.addmm(weights.b_dec, codes, weights.w_dec) - z).square().sum(dim=1)
    # codes are never negative, so |f_j| is f_j
    sparsity = (codes @ weights.w_dec.norm(dim=1)).mean() if penalty else errors.new_zeros(())
    return errors.mean() + penalty * sparsity, codes, errors


BETAS, EPSILON = (0.9, 0.999), 1e-8


def train_step(
    weights: SaeWeights, z: Float[Tensor, "row width"], settings: TrainingSettings, *, at: tuple[int, int]
) -> None:
    """Take one step of Adam on a minibatch, `at` step i of n."""
    step, n_steps = at
    parameters = weights.parameters()
    for p in parameters.values():
        p.requires_grad_(True)
    loss, codes, errors = loss_of(weights, z, penalty=settings.penalty_at(step, n_steps), k=settings.k)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    rate = settings.rate_at(step, n_steps)
    with torch.no_grad():
        for (name, p), g in zip(parameters.items(), gradients, strict=True):
            p.requires_grad_(False)
            mean, square = weights.moments[f"m.{name}"], weights.moments[f"v.{name}"]
            mean.lerp_(g, 1 - BETAS[0])
            square.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
            size = rate / (1 - BETAS[0] ** (step + 1))
            p.addcdiv_(mean, square.div(1 - BETAS[1] ** (step + 1)).sqrt_().add_(EPSILON), value=-size)
        active = (codes > 0).any(dim=0)
        weights.silent = torch.where(active, 0, weights.silent + 1)
        if (step + 1) % settings.resample == 0 and step < 2 * n_steps // 3:
            resample(weights, z, errors, settings, step=step)


def resample(
    weights: SaeWeights,
    z: Float[Tensor, "row width"],
    errors: Float[Tensor, " row"],
    settings: TrainingSettings,
    *,
    step: int,
) -> int:
    """Give silent features the directions of states that are reconstructed badly; return how many.

    As in Bricken et al. (2023): states are drawn in proportion to the square of their error, the encoder's new column has a
    fifth of the mean length of the living ones, and Adam forgets what it knew of both.
    """
    dead = (weights.silent >= settings.resample).nonzero()[:, 0]
    alive = weights.silent < settings.resample
    if not len(dead) or not bool(alive.any()):
        return 0
    rng = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    drawn = torch.multinomial(errors.cpu().double().square() + 1e-12, len(dead), replacement=True, generator=rng)
    directions = z[drawn.to(z.device)] - weights.b_dec
    directions = directions / directions.norm(dim=1, keepdim=True).clamp_min(1e-6)
    weights.w_dec[dead] = directions * weights.w_dec[alive].norm(dim=1).mean()
    weights.w_enc[:, dead] = (directions * 0.2 * weights.w_enc[:, alive].norm(dim=0).mean()).T
    weights.b_enc[dead] = 0.0
    for m in "mv":
        weights.moments[f"{m}.w_dec"][dead] = 0.0
        weights.moments[f"{m}.w_enc"][:, dead] = 0.0
        weights.moments[f"{m}.b_enc"][dead] = 0.0
    weights.silent[dead] = 0
    return len(dead)


# --------------------------------------------------------------------------------------------------------- z-scores

SMALLEST_SCALE = 1e-6
"""A column whose deviation is below this part of its mean counts as constant and keeps scale 1."""


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


def folded(weights: SaeWeights, statistics: Statistics, *, layer: int, k: int, about: dict[str, Any]) -> Autoencoder:
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


@dataclass(frozen=True)
class TrainingPlan:
    """The states of a training, how they are z-scored, and the order in which they are read."""

    states: OrdinaryStates
    statistics: Statistics
    batches: Minibatches
    settings: TrainingSettings

    @property
    def n_steps(self) -> int:
        return sum(self.batches.sizes())

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint depends on."""
        manifest = {k: v for k, v in self.states.manifest.items() if k not in ("threads", "versions")}
        settings = json.loads(json.dumps(self.settings.record()))
        return {"settings": settings, "states": digest(manifest), "threads": torch.get_num_threads()}


def refuse_too_large(width: int, settings: TrainingSettings) -> None:
    """Refuse autoencoders that this machine has not enough memory for, before any state is collected."""
    n_features = width * sum(settings.expansions)
    # weights, their gradients and Adam's two moments; codes of a batch, their gradients and what is computed on the way
    needed = 4 * n_features * (4 * (2 * width + 1) + 3 * settings.batch_size)
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        raise CoralError(
            f"Autoencoders of {n_features:,} features of width {width:,} need about {needed / 2**30:,.0f} GiB of memory, and "
            f"this machine has {available / 2**30:,.0f}; give a smaller --expansion or --batch-size."
        )


@dataclass(frozen=True)
class SaeWork:
    """Where autoencoders are trained, and how far that is."""

    device: str = "cpu"
    bar: Bar = silent


AT_ONCE = SaeWork()
"""On the CPU, and nothing is shown."""


def plan_training(source: StateSource, settings: TrainingSettings) -> TrainingPlan:
    """Measure the states and put them into an order; refuse more active features than there are."""
    ordinary = OrdinaryStates.of(source, settings.massive)
    statistics = statistics_of(ordinary)
    refuse_too_large(len(statistics.mean), settings)
    fewest = len(statistics.mean) * min(settings.expansions)
    if settings.k and settings.k > fewest:
        raise CoralError(f"TopK of {settings.k} is more than the {fewest} features there are.")
    batches = Minibatches(ordinary, statistics.counts, settings.batch_size, settings.epochs, settings.seed)
    return TrainingPlan(ordinary, statistics, batches, settings)


def train(
    source: StateSource, folder: Path, settings: TrainingSettings, *, layer: int, work: SaeWork = AT_ONCE
) -> dict[int, Autoencoder]:
    """Train one autoencoder per expansion, from the last checkpoint in `folder` on, and save them as FOLDER/4x and so on."""
    refuse_other_folder(folder, settings)
    plan = plan_training(source, settings)
    with locked(folder / "checkpoint"):
        weights = train_steps(plan, Checkpoints(folder / "checkpoint", plan.identity), work)
        saes = {expansion: autoencoder_of(plan, expansion, w, layer=layer) for expansion, w in weights.items()}
        for expansion, sae in saes.items():
            sae.save(folder / f"{expansion}x")
    return saes


def refuse_other_folder(folder: Path, settings: TrainingSettings) -> None:
    """Refuse a folder of somebody else, and one in which an autoencoder of somebody else would be replaced."""
    begun = any((folder / name).is_dir() for name in ("tokens", "checkpoint"))
    refuse_folder(folder, "autoencoders of ours", is_ours=begun or any(map(is_own, folder.glob("*x"))))
    for expansion in settings.expansions:
        place = folder / f"{expansion}x"
        refuse_folder(place, "autoencoder of ours", is_ours=is_own(place))


def train_steps(plan: TrainingPlan, checkpoints: Checkpoints, work: SaeWork = AT_ONCE) -> dict[int, SaeWeights]:
    """Take all steps that are left after the last checkpoint, and return the weights of each expansion, on the CPU."""
    settings, n_steps, width = plan.settings, plan.n_steps, len(plan.statistics.mean)
    start, weights = checkpoints.latest()
    if not weights:
        weights = {e: first_weights(width, e * width, seed=settings.seed + e) for e in settings.expansions}
    weights = {e: of_expansion.to(work.device) for e, of_expansion in weights.items()}
    with work.bar("training", n_steps, "steps") as advance, thread_count(checkpoints.threads):
        advance(start)
        for step, states in enumerate(plan.batches.iterate(start=start), start):
            z = plan.statistics(states).to(work.device)
            for of_expansion in weights.values():
                train_step(of_expansion, z, settings, at=(step, n_steps))
            if (step + 1) % settings.checkpoint == 0 or step + 1 == n_steps:
                checkpoints.write(step + 1, weights)
            advance(1)
    return {e: of_expansion.to("cpu") for e, of_expansion in weights.items()}


def autoencoder_of(plan: TrainingPlan, expansion: int, weights: SaeWeights, *, layer: int) -> Autoencoder:
    """Return the autoencoder that training has made, with the record of how."""
    manifest, counts = plan.states.manifest, plan.statistics.counts
    states = {"states": sum(counts.values()), "sampling": manifest["sampling"], "steps": plan.n_steps}
    about = {
        "model": {k: manifest["model"][k] for k in ("name", "weights", "tokenizer", "dtype")},
        "expansion": expansion,
        "training": {**plan.identity["settings"], **states},
        "versions": versions(),
    }
    sae = folded(weights, plan.statistics, layer=layer, k=plan.settings.k, about=about)
    return replace(sae, norm_limit=plan.states.norm_limit)


class Checkpoints:
    """The last finished checkpoint of a run: one file per expansion, named by a record that is written after them.

    No pieces: each step goes on from the weights of the one before, and only the last are kept.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.path, self.about = folder, folder / "checkpoint.json", about
        refuse_replacing(folder, [self.path.name], is_ours=lambda path: has_word(path, '"settings"'))
        self._record = kept_record(self.path) or {}  # one that is damaged: training begins anew
        if self._record:
            for part in ("settings", "states"):
                if self._record.get(part) != about[part]:
                    raise CoralError(
                        f"{folder} is the checkpoint of a training with other {part}; choose another folder or delete this one."
                    )

    @property
    def threads(self) -> int:
        """Threads of the run that is gone on with: their number changes rounding."""
        return int(self._record.get("threads", self.about["threads"]))

    def latest(self) -> tuple[int, dict[int, SaeWeights]]:
        """Return the step to go on at and the weights, or step 0 and none where a file is missing or damaged."""
        weights = {}
        for expansion, (name, wanted) in self._record.get("files", {}).items():
            path = self.folder / name
            raw = path.read_bytes() if path.exists() else b""
            if digest_bytes(raw) != wanted:
                return 0, {}
            weights[int(expansion)] = SaeWeights.from_tensors(load_tensors(raw))
        return (int(self._record["step"]), weights) if weights else (0, {})

    def write(self, step: int, weights: Mapping[int, SaeWeights]) -> None:
        """Write the files of a step, then the record, then remove the files of the step before."""
        files = {}
        for expansion, of_expansion in weights.items():
            raw = save_tensors({n: t.cpu().contiguous() for n, t in of_expansion.tensors().items()})
            files[str(expansion)] = [f"{step}-{expansion}x.safetensors", digest_bytes(raw)]
            write_atomic(self.folder / files[str(expansion)][0], raw)
        self._record = {**self.about, "threads": self.threads, "step": step, "files": files}
        write_record(self.path, self._record)
        names = {name for name, _ in files.values()}
        for path in self.folder.glob("*x.safetensors"):
            if path.name not in names:
                path.unlink()


# -------------------------------------------------------------------------------------------------- coral sae train

QUALITY_QUESTIONS = 200
"""Held-out questions on which the loss of the patched model is measured."""


@dataclass(frozen=True)
class TokenTraining:
    """Which token states autoencoders are trained on, and how."""

    sampling: Sampling
    settings: TrainingSettings


def train_on_tokens(
    model: Model, questions: Sequence[Question], folder: Path, training: TokenTraining, *, bar: Bar = silent
) -> dict[str, Any]:
    """Collect token states, train on them and measure on what was held out; return the record in FOLDER/quality.json."""
    sampling = training.sampling
    refuse_other_folder(folder, training.settings)
    refuse_too_large(model.width, training.settings)
    store = collect(model, questions, folder / "tokens", sampling, bar=bar)
    work = SaeWork(str(model.device), bar)
    saes = train(store, folder, training.settings, layer=sampling.layer, work=work)
    held_out = held_out_questions(model, questions, store, sampling)
    if not held_out:
        return measure_quality(saes, store, folder)
    prompts, answers = prepare(held_out, sampling.style, model).prompts, [q.answer for q in held_out]
    ids = tuple(q.id for q in held_out)
    return measure_quality(
        saes, store, folder, loss=PatchedLoss(ids, lambda sae: loss_recovered(model, sae, prompts, answers))
    )


def train_on_store(
    scored: Scored, folder: Path, settings: TrainingSettings, *, layer: int, work: SaeWork = AT_ONCE
) -> dict[str, Any]:
    """Train on the pooled answer states of a store at a layer; no model runs, so no patched loss is measured."""
    source = PooledStates(scored, layer, seed=settings.seed)
    return measure_quality(train(source, folder, settings, layer=layer, work=work), source, folder)


def held_out_questions(
    model: Model, questions: Sequence[Question], store: TokenStore, sampling: Sampling
) -> list[Question]:
    """Return labelled questions whose states training has not seen."""
    prepared = prepare(questions, sampling.style, model).questions
    unseen = [prepared[i] for i in store.questions(store.held_out)]
    return [q for q in unseen if q.answer != UNKNOWN][:QUALITY_QUESTIONS]
