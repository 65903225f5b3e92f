"""How good an autoencoder is: sparsity, variance explained, dead features, and what is lost when it is patched in.

All of it on states and questions that training has not seen. A high share of variance explained says little by itself: a few
massive states can carry most of it, and what matters may lie in the rest. So the loss of the patched model stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coral_lens.engine.edits import ReplaceStates
from coral_lens.engine.hooks import Edit, Site
from coral_lens.engine.packing import Plan, plan_for
from coral_lens.engine.scoring import TOKEN_BUDGET, score
from coral_lens.engine.self_check import packing_of
from coral_lens.errors import CoralError
from coral_lens.records import Prompt
from coral_lens.sae.autoencoder import CHUNK, Autoencoder
from coral_lens.sae.states import StateSource
from coral_lens.storage.files import kept_record, write_record

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


@dataclass(frozen=True)
class Fidelity:
    """What an autoencoder makes of states."""

    n_states: int
    n_massive: int
    """States beyond the autoencoder's limit, which count in nothing else."""
    l0: float
    """Features active in a state, on average."""
    explained: float
    """Share of the variance of the z-scored states, which the training's loss is about."""
    explained_raw: float
    """Share of the variance of the states themselves."""
    dead: float
    """Share of the features that no state activates."""


@torch.inference_mode()
def fidelity(sae: Autoencoder, source: StateSource, shards: Sequence[int]) -> Fidelity:
    """Measure an autoencoder on some shards of states, one at a time."""
    n, n_massive, n_active, alive = 0, 0, 0, torch.zeros(sae.n_features, dtype=torch.bool)
    error, total, squares = (torch.zeros(sae.width, dtype=torch.float64) for _ in range(3))
    shift: Tensor | None = None
    for states in (states for shard in shards for states in source.states(shard).split(CHUNK)):
        if states.shape[1] != sae.width:
            raise CoralError(
                f"The autoencoder is of states of width {sae.width}, but these have width {states.shape[1]}; use those that it "
                "was trained on."
            )
        ordinary = states[~sae.massive(states)]
        n_massive += len(states) - len(ordinary)
        codes = sae.encode(ordinary)
        n, n_active = n + len(ordinary), n_active + int((codes > 0).sum())
        alive |= (codes > 0).any(dim=0)
        error += (ordinary - sae.decode(codes)).double().square().sum(dim=0)
        # squares about a mean of the first states: about 0 they would lose the digits of a column far from it
        shift = ordinary.double().mean(dim=0) if shift is None else shift
        total += (ordinary - shift).sum(dim=0)
        squares += (ordinary - shift).square().sum(dim=0)
    variation = (squares - total**2 / n).clamp_min(0)
    scale = sae.statistics.get("scale", variation.div(n).sqrt()).double().clamp_min(1e-12)
    return Fidelity(
        n_states=n,
        n_massive=n_massive,
        l0=n_active / n,
        explained=1.0 - float((error / scale**2).sum() / (variation / scale**2).sum()),
        explained_raw=1.0 - float(error.sum() / variation.sum()),
        dead=float((~alive).double().mean()),
    )


def refuse_dead(quality: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse, by their record, autoencoders none of whose features is ever active."""
    dead = [name for name, measures in quality.items() if measures["dead"] == 1.0]
    if dead:
        raise CoralError(
            f"All features of {' and '.join(dead)} are dead: no held-out state activates one, so there is nothing to select "
            "from; train with a smaller --penalty, or on more states, into another folder."
        )


# ------------------------------------------------------------------------------------------------- the patched model


@dataclass(frozen=True)
class RecoveredLoss:
    """Mean loss per token of questions with their answers: of the model, with the reconstruction, with zeros in place."""

    clean: float
    patched: float
    zeroed: float
    n_questions: int

    @property
    def share(self) -> float:
        """1 where patching costs nothing, 0 where it is as bad as zeros."""
        return (self.zeroed - self.patched) / (self.zeroed - self.clean)


def patch(sae: Autoencoder, function: Callable[[Tensor], Tensor] | None = None) -> ReplaceStates:
    """Return the edit that replaces the layer's output at all positions by its reconstruction, or by another function of it."""
    return ReplaceStates(Site("residual", sae.layer), function or sae.reconstruct, "all")


def loss_recovered(model: Model, sae: Autoencoder, prompts: Sequence[Prompt], answers: Sequence[int]) -> RecoveredLoss:
    """Score the whole text of questions and answers with the layer as it is, reconstructed and zeroed."""
    sae.check(model)
    texts = [whole_text(p, answer) for p, answer in zip(prompts, answers, strict=True)]
    plan = plan_for(texts, token_budget=TOKEN_BUDGET, packing=packing_of(model), border=model.rope_border)
    runs: dict[str, list[Edit]] = {"clean": [], "patched": [patch(sae)], "zeroed": [patch(sae, torch.zeros_like)]}
    losses = {name: mean_token_loss(model, texts, plan, edits) for name, edits in runs.items()}
    return RecoveredLoss(**losses, n_questions=len(texts))


def whole_text(prompt: Prompt, answer: int) -> Prompt:
    """Return a question and its answer as one text, every token of which but the first is predicted."""
    context, option = prompt.contexts[answer], prompt.options[answer]
    return Prompt(prompt.id, (context[:1],), ((*context[1:], *option),))


def mean_token_loss(model: Model, texts: Sequence[Prompt], plan: Plan, edits: Sequence[Edit]) -> float:
    """Return the mean negative log-probability of the tokens of texts."""
    total = -sum(float(scored.logprobs.sum()) for scored in score(model, texts, plan, edits=edits))
    return total / sum(len(text.options[0]) for text in texts)


# ---------------------------------------------------------------------------------------------------------- the record


@dataclass(frozen=True)
class PatchedLoss:
    """The loss of the patched model on questions that training has not seen."""

    ids: tuple[str, ...]
    """Ids of the questions."""
    recover: Callable[[Autoencoder], RecoveredLoss]


def measure_quality(
    saes: Mapping[int, Autoencoder], source: StateSource, folder: Path, *, loss: PatchedLoss | None = None
) -> dict[str, Any]:
    """Return FOLDER/quality.json, after adding what it lacks: measures on held-out states, and the loss on questions."""
    path = folder / "quality.json"
    record = kept_record(path) or {}
    for expansion, sae in saes.items():
        about = {"steps": sae.about["training"], "questions": list(loss.ids) if loss else []}
        if record.get(f"{expansion}x", {}).get("about") == about:
            continue
        measures = asdict(fidelity(sae, source, source.held_out))
        recovered = loss.recover(sae) if loss else None
        patched = {**asdict(recovered), "share": recovered.share} if recovered else {}
        record[f"{expansion}x"] = {"n_features": sae.n_features, **measures, "loss": patched, "about": about}
        write_record(path, record)
    return record
