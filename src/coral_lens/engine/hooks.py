"""Sites in a model, and the hooks through which readers and edits reach them.

A hook is on a model only inside a `with`, and only our own hooks are ever removed: transformers installs some of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from coral_lens.engine.batches import Batch
from coral_lens.errors import CoralError

if TYPE_CHECKING:
    from torch import nn

    from coral_lens.engine.model import Model


class Site(NamedTuple):
    """A place in the model whose tensor [batch, token, feature] can be read or replaced."""

    kind: Literal["residual", "heads", "final"]
    """`residual`: the stream after block `layer` (0: the embeddings). `heads`: the input of block `layer`'s projection.
    `final`: the normed states that the vocabulary head reads; its `layer` is 0."""
    layer: int


@runtime_checkable
class Reader(Protocol):
    """Takes what it needs at its sites while a batch runs, then gives one row per option. It is used by one thread at a time."""

    @property
    def sites(self) -> tuple[Site, ...]:
        """Where it reads."""

    def fresh(self) -> Reader:
        """Return one that reads the same and has read nothing yet, for another thread."""

    def read(self, site: Site, states: Tensor, batch: Batch) -> None:
        """Take what is needed of the states [batch, token, feature]; called once per site and batch."""

    def take(self) -> dict[str, Tensor]:
        """Return what was read of the batch that has just run, and forget it: one row per option, unless the reader says
        otherwise (one row per token, and a tensor of offsets)."""


@runtime_checkable
class Edit(Protocol):
    """Replaces the tensor at its sites; runs before the readers of the same site.

    It keeps nothing of what it sees where several batches are scored at a time: threads share it.
    """

    @property
    def sites(self) -> tuple[Site, ...]:
        """What it replaces."""

    def edit(self, site: Site, states: Tensor, batch: Batch) -> Tensor:
        """Return the states to go on with; the argument must be left as it is."""


@contextmanager
def tapped(model: Model, batch: Batch, *, readers: Sequence[Reader] = (), edits: Sequence[Edit] = ()) -> Iterator[None]:
    """Let edits and readers at their sites while the block runs; our hooks, and only ours, are gone afterwards."""
    sites = dict.fromkeys([s for e in edits for s in e.sites] + [s for r in readers for s in r.sites])
    with ExitStack() as stack:
        for site in sites:
            at_edits = [e for e in edits if site in e.sites]
            at_readers = [r for r in readers if site in r.sites]
            hook = make_hook(site, batch, at_edits, at_readers)
            handle = attach(model, site, hook)
            stack.callback(handle.remove)
        yield


Hook = Callable[[Tensor], Tensor]


def make_hook(site: Site, batch: Batch, edits: Sequence[Edit], readers: Sequence[Reader]) -> Hook:
    """Return a function that edits the states at a site, shows the result to the readers, and returns it."""

    owner = get_ident()

    def hook(states: Tensor) -> Tensor:
        if get_ident() != owner:  # somebody else's own pass through the model
            return states
        for edit in edits:
            states = edit.edit(site, states, batch)
        for reader in readers:
            reader.read(site, states, batch)
        return states

    return hook


def attach(model: Model, site: Site, hook: Hook) -> Any:
    """Register a hook at a site and return its handle."""
    if site.kind == "final":
        return after(model.norm, hook)
    if not 0 <= site.layer <= model.n_layers or (site.kind == "heads" and site.layer == 0):
        raise CoralError(f"Layer {site.layer} does not exist: {model.name!r} has layers 0 to {model.n_layers}.")
    if site.kind == "heads" and not model.projections:
        raise CoralError(f"{model.name!r} has no attention output projection, so its heads cannot be read or edited.")
    if site.kind == "heads":
        return before(model.projections[site.layer - 1], hook)
    if site.layer == 0:
        return before(model.blocks[0], hook)
    return after(model.blocks[site.layer - 1], hook)


def before(module: nn.Module, hook: Hook) -> Any:
    """Hook the first argument of a module."""

    def pre_hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (hook(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hook(kwargs["hidden_states"])}

    return module.register_forward_pre_hook(pre_hook, with_kwargs=True)


def after(module: nn.Module, hook: Hook) -> Any:
    """Hook the output of a block, which is the states or a tuple that begins with them."""

    def post_hook(_: nn.Module, __: Any, output: Any) -> Any:
        return (hook(output[0]), *output[1:]) if isinstance(output, tuple) else hook(output)

    return module.register_forward_hook(post_hook)
