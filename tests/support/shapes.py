"""Shapes and types of every function of the package are checked while the tests run."""

from __future__ import annotations

from typing import Any

from beartype import beartype


def checked(function: Any) -> Any:
    """Check arguments and results. A function inside another would be compiled anew at every call, and is left alone."""
    return function if "<locals>" in function.__qualname__ else beartype(function)
