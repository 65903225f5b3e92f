"""What `coral doctor` says of a model: the parts that were found, and whether the engine reads them as Hugging Face does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from coral_lens.engine import (
    MASK_REFUSALS,
    NotFiniteError,
    PooledResidual,
    check_prompts,
    layer_name,
    score_batch,
    self_check,
)
from coral_lens.layout import build_tree, collate
from coral_lens.records import Prompt

if TYPE_CHECKING:
    from coral_lens.models import Model

ROUND_TRIP = "Hello, wörld! 3 < 4 and  two spaces."


@dataclass(frozen=True)
class Finding:
    """One line of the examination."""

    what: str
    found: str
    ok: bool = True


def examine(model: Model) -> list[Finding]:
    """Return what was found, and the outcome of each check."""
    found = [*parts(model), *tokenizer_checks(model)]
    try:
        return [*found, packing_check(model), layer_check(model)]
    except NotFiniteError as error:
        return [*found, Finding("scores and states", str(error), ok=False)]


def parts(model: Model) -> list[Finding]:
    """Name the parts that the engine uses."""
    names = {module: name for name, module in model.hf.named_modules()}
    config = model.hf.config.get_text_config()
    heads = getattr(config, "num_attention_heads", "?")
    projections = [names[module] for module in model.projections]
    n_params = sum(p.numel() for p in model.hf.parameters())
    return [
        Finding("architecture", f"{type(model.hf).__name__} ({config.model_type}), {n_params / 1e6:,.0f} M parameters"),
        Finding("layers", f"0 (embeddings) to {model.n_layers}, width {model.width}, {heads} heads"),
        Finding("blocks", f"{names[model.blocks[0]]} ... {names[model.blocks[-1]]}"),
        Finding("final norm, head", f"{names[model.norm]}, {names[model.head]}"),
        Finding("output projections", f"{projections[0]} ... {projections[-1]}" if projections else "none"),
        Finding("attention mask", model.mask_form),
        Finding("dtype, device", f"{model.dtype}, {model.device}"),
        Finding("longest input", f"{model.max_length} tokens"),
        Finding("weights", model.fingerprint["weights"][:16]),
        Finding("tokenizer", model.fingerprint["tokenizer"][:16]),
    ]


def tokenizer_checks(model: Model) -> list[Finding]:
    """Say whether prompts begin with BOS, and whether text survives the tokenizer."""
    tokenizer = model.tokenizer
    ids = tokenizer.encode("a")
    adds = tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id
    bos = f"{'added' if adds else 'not added'} by the tokenizer (bos_token is {tokenizer.bos_token!r})"
    back = str(tokenizer.decode(tokenizer.encode(ROUND_TRIP, add_special_tokens=False)))
    same = back.strip() == ROUND_TRIP
    return [
        Finding("BOS", bos),
        Finding("text round trip", "kept" if same else f"{ROUND_TRIP!r} became {back!r}", same),
    ]


def packing_check(model: Model) -> Finding:
    """Compare the packed tree with plain passes."""
    try:
        check = self_check(model, check_prompts(model))
    except MASK_REFUSALS as error:
        return Finding("packed against plain", f"refused: {error}", ok=False)
    said = f"log-probs differ by {check.difference:.1e}, {check.excess:.2g} times what rounding may do"
    return Finding("packed against plain", said, check.sound)


@torch.inference_mode()
def layer_check(model: Model) -> Finding:
    """Compare the states that the engine reads with Hugging Face's own, the last ones after the final norm."""
    first = check_prompts(model)[0]
    context, option = first.contexts[0], first.options[0]
    # the second option is one token: its mean is that token's state, so that the norm can be applied to it
    prompt = Prompt("check", (context, context), (option, option[:1]))
    reader = PooledResidual(tuple(range(model.n_layers + 1)))
    batch = collate({0: build_tree(prompt)}, [(0,)], packing="plain")  # the other check is for the tree's mask
    readings = score_batch(model, batch, readers=[reader]).readings
    ids = torch.tensor([[*context, *option]], device=model.device)
    states = model.hf(ids, output_hidden_states=True).hidden_states
    start, normed = len(context), states[-1]
    # Mamba's list begins after the first block: the state before the normed one is then that of the last block
    first_layer = 1 if torch.allclose(model.norm(states[-2]), normed) else 0
    ours = [readings[layer_name(layer)][0] for layer in range(first_layer, model.n_layers + first_layer)]
    theirs = [s[0, start:].float().mean(dim=0).cpu() for s in states[:-1]]
    ours.append(model.norm(readings[layer_name(model.n_layers)][1].to(normed.device, normed.dtype)).float().cpu())
    theirs.append(normed[0, start].float().cpu())
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))
    return Finding(
        "layer map",
        f"states equal Hugging Face's to {worst:.1e} of their range; the last is read before the final norm",
        worst < (1e-4 if model.dtype == torch.float32 else 5e-2),
    )
