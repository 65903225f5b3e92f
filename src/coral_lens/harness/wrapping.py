"""Methods of a class of lm-eval, replaced while a `with` runs. Nothing of lm-eval stays changed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def replaced_methods(owner: type, methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let a class have these methods inside the block."""
    with ExitStack() as stack:
        for name, method in methods.items():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, method)
        yield
