"""One ordinary pass per option, with hooks of its own: what the packed engine is compared with. Uses nothing of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from coral_lens.engine.hooks import Edit, Reader, Site
from coral_lens.engine.model import Model
from coral_lens.engine.packing import Packing, plan_for
from coral_lens.engine.scoring import ScoredBatch, score
from coral_lens.records import Prompt
from support.models import paths_of

Change = Callable[[Tensor], Tensor]
"""Takes the states [token, feature] of a whole sequence and returns those to go on with."""


def draw_ids(n: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def ragged_prompts() -> list[Prompt]:
    """Contexts and options shorter and longer than the window of 16, beginnings that are shared, and a few-shot prefix."""
    long, shots = draw_ids(60, 1), draw_ids(50, 2)
    tails = tuple(draw_ids(n, 10 + n) for n in (1, 30, 7, 17))
    few_shot = [
        Prompt(f"few-shot {i}", (shots + draw_ids(3 + 5 * i, 20 + i),) * 2, (tails[2], draw_ids(1 + i, 30 + i)))
        for i in range(4)
    ]
    return [
        Prompt("long context", (long,) * 4, tails),
        Prompt("one token", ((5,),) * 2, ((1,), (2, 3))),
        Prompt("shared beginnings", (long[:20],) * 3, (tails[3], tails[3][:9], (*tails[3][:9], 9))),
        *few_shot,
    ]


def run(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    packing: Packing = "tree",
    readers: Sequence[Reader] = (),
    edits: Sequence[Edit] = (),
) -> list[ScoredBatch]:
    plan = plan_for(prompts, token_budget=300, packing=packing, border=model.rope_border)
    return list(score(model, prompts, plan, readers=readers, edits=edits))


def logprobs_of(batches: Sequence[ScoredBatch]) -> Tensor:
    """The scores of all batches in the order of the questions."""
    return by_option(batches, [scored.logprobs for scored in batches])


def by_option(batches: Sequence[ScoredBatch], rows: Sequence[Tensor]) -> Tensor:
    """Rows of each batch, one per option, in the order of the questions."""
    found: dict[int, Tensor] = {}
    for scored, some in zip(batches, rows, strict=True):
        edges = scored.batch.option_offsets
        for i, question in enumerate(scored.batch.questions):
            found[question] = some[edges[i] : edges[i + 1]]
    return torch.cat([found[question] for question in sorted(found)])


def options(prompts: Sequence[Prompt]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [pair for prompt in prompts for pair in zip(prompt.contexts, prompt.options, strict=True)]


# ------------------------------------------------------------------------------------------------------- own hooks


def module_at(model: Model, site: Site) -> tuple[nn.Module, bool]:
    """The module of a site, and whether the site is its input."""
    paths = paths_of(model.hf)
    if site.kind == "final":
        return model.hf.get_submodule(paths.norm), False
    block = model.hf.get_submodule(f"{paths.blocks}.{max(site.layer - 1, 0)}")
    if site.kind == "heads":
        assert paths.projection is not None
        return block.get_submodule(paths.projection), True
    return block, site.layer == 0


@contextmanager
def changed(model: Model, site: Site, change: Change) -> Iterator[None]:
    """Put the states of a single row through a function while the block runs."""
    module, at_input = module_at(model, site)
    if at_input:
        handle = module.register_forward_pre_hook(lambda _, args: (change(args[0][0])[None], *args[1:]))
    else:

        def after(_: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
            if isinstance(output, tuple):
                return (change(output[0][0])[None], *output[1:])
            return change(output[0])[None]

        handle = module.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def plain_logprob(
    model: Model, context: tuple[int, ...], option: tuple[int, ...], changes: dict[Site, Change] | None = None
) -> Tensor:
    """The log-probability of one option, with the states at some sites changed on the way."""
    with ExitStack() as stack:
        for site, change in (changes or {}).items():
            stack.enter_context(changed(model, site, change))
        logits = model.hf(torch.tensor([context + option])).logits[0, len(context) - 1 : -1]
    return logits.double().log_softmax(dim=-1).gather(1, torch.tensor(option)[:, None]).sum()


def plain_states(model: Model, context: tuple[int, ...], option: tuple[int, ...], site: Site) -> Tensor:
    """The states [token, feature] of one option's whole sequence at a site."""
    found: list[Tensor] = []

    def keep(states: Tensor) -> Tensor:
        found.append(states)
        return states

    plain_logprob(model, context, option, {site: keep})
    return found[0]


def hook_counts(model: Model) -> list[tuple[int, int, bool]]:
    """Hooks of every module, and whether its forward is replaced."""
    return [(len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m)) for m in model.hf.modules()]
