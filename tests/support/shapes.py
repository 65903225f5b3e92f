"""Shapes and types of every function of the package are checked while the tests run.

jaxtyping binds the arguments of each call anew to see which sizes agree, which takes longer than many a function itself. So
it is given only the functions whose signatures have shapes, and of a function that a test calls over and over, as for each
of a thousand draws, the first calls and then every so many. All others are checked by beartype, which costs next to nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
from functools import wraps
from typing import Any, get_args, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, install_import_hook

by_jaxtyping = jaxtyping.jaxtyped
FIRST, EVERY = 30, 100
"""Calls of a function that are checked in each test: so many at first, and of those after them one of so many."""
test = 0
"""The number of the test that is running; `begin_test` counts."""


def begin_test() -> None:
    """Check the first calls of each function again."""
    global test
    test += 1


def check_package(name: str) -> None:
    """Have all functions of a package checked that is imported from now on."""
    jaxtyping.jaxtyped = jaxtyped  # what the hook writes above each function
    install_import_hook(name, "beartype.beartype")


def jaxtyped(*, typechecker: Any) -> Any:
    """Return the decorator of functions and classes; of a class that is a dataclass, the fields are checked."""

    def decorated(thing: Any) -> Any:
        if not inspect.isclass(thing):
            return checked(thing, typechecker)
        if dataclasses.is_dataclass(thing) and "__init__" in vars(thing):
            thing.__init__ = checked(thing.__init__, typechecker)
        return thing

    return decorated


def checked(function: Any, typechecker: Any) -> Any:
    """Check arguments and results. A function inside another would be compiled anew at every call, and is left alone."""
    if "<locals>" in function.__qualname__:
        return function
    hints = {name: resolved(hint, function.__globals__) for name, hint in function.__annotations__.items()}
    if not has_shape(tuple(hints.values())):
        return typed(function, hints)
    return sampled(function, by_jaxtyping(function, typechecker=typechecker))


def sampled(function: Any, with_shapes: Any) -> Any:
    """Check shapes in the first calls of a test, and in some of the later ones."""
    calls = {test: 0}

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if test not in calls:
            calls.clear()
        n = calls[test] = calls.get(test, 0) + 1
        return (with_shapes if n <= FIRST or n % EVERY == 0 else function)(*args, **kwargs)

    return called


def resolved(hint: Any, names: dict[str, Any]) -> Any:
    """Return the type that an annotation stands for, as jaxtyping does: Any if it is known to the type checker only."""

    def holder() -> None: ...

    holder.__annotations__ = {"hint": hint}
    try:
        return get_type_hints(holder, names, include_extras=True)["hint"]
    except Exception:
        return Any


def has_shape(hint: Any) -> bool:
    """Return whether a shape stands anywhere in a type."""
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        return True
    return any(has_shape(inner) for inner in (hint if isinstance(hint, tuple | list) else get_args(hint)))


def typed(function: Any, hints: dict[str, Any]) -> Any:
    """Check types alone."""
    written = function.__annotations__
    function.__annotations__ = hints
    wrapper = beartype(function, conf=BeartypeConf(violation_type=TypeError))
    function.__annotations__ = wrapper.__annotations__ = written
    return wrapper
