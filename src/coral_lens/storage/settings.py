"""Settings that can be written down: in Python, in a study's TOML, and as options of a command.

A class of settings is the one place that knows a field: its name, its type, its default, what it means (the docstring under
it) and which values it may have (a Literal, or a Range, OneOf or NotEmpty in its type). A wrong value is refused in the same
sentence wherever it was written. Knows neither commands nor TOML: `cli.options` turns fields into options, and
`methods.interface` reads them from a study.

    @dataclass(frozen=True)
    class Baking(Settings):
        minutes: Annotated[int, Range(least=1)] = 40
        \"\"\"How long the cake stays in the oven.\"\"\"
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import Field, asdict, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from coral_lens.errors import CoralError, nearest

# ------------------------------------------------------------------------------------------------------------- values


@dataclass(frozen=True)
class Range:
    """The numbers that a field may have."""

    least: int | float = -math.inf
    most: int | float = math.inf
    above: int | float = -math.inf
    below: int | float = math.inf

    def __contains__(self, value: Any) -> bool:
        number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
        return number and self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        if math.isfinite(self.least) and math.isfinite(self.most):
            return f"lie between {self.least} and {self.most}"
        if math.isfinite(self.above) and math.isfinite(self.below):
            return f"lie between {self.above} and {self.below}, both excluded"
        if self == Range():
            return "be a finite number"
        limits = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return "be " + " and ".join(f"{words} {limit}" for words, limit in limits.items() if math.isfinite(limit))

    def refuse(self, name: str, value: Any) -> None:
        """Refuse a value outside."""
        if value not in self:
            raise CoralError(f"{name} must {self}. Got {value!r} instead.{self.as_share(value)}")

    def as_share(self, value: Any) -> str:
        """Say how a share is written, if it was given in per cent."""
        is_percent = (self.above, self.below) == (0, 1) and isinstance(value, int | float) and 1 < value < 100
        return f" For {value:g} % write {value / 100:g}." if is_percent else ""


@dataclass(frozen=True)
class OneOf:
    """The names that a field may have."""

    names: tuple[str, ...] | Callable[[], Iterable[str]]
    """They themselves, or what gives them when a value is checked: the table that holds them may be slow to import."""

    def refuse(self, name: str, value: Any) -> None:
        """Refuse a value that is not among them, with the nearest one."""
        names = list(self.names() if callable(self.names) else self.names)
        if value not in names:
            raise CoralError(
                f"Unknown {name} {value!r}; use one of {', '.join(names)}.{nearest(str(value), map(str, names))}"
            )


@dataclass(frozen=True)
class NotEmpty:
    """A tuple that has at least one element."""

    def refuse(self, name: str, value: Any) -> None:
        """Refuse an empty tuple."""
        if not value:
            raise CoralError(f"{name} is empty; give at least one.")


Limit = Range | OneOf | NotEmpty
"""What a field's type says about the values that it may have."""


def refuse_value(name: str, value: Any, hint: Any) -> None:
    """Refuse a value that its type's limits or Literal do not allow; in a tuple, each element is checked.

    Bare types are not checked here: Python has a type checker, TOML and commands have parsers.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        refuse_value(name, value, inner[0])
        for limit in inner[1:]:
            if isinstance(limit, Limit):
                limit.refuse(name, value)
    elif origin is Literal:
        OneOf(inner).refuse(name, value)
    elif origin in (Union, UnionType):
        # the only union of settings is `X | None`
        if value is not None:
            refuse_value(name, value, next(i for i in inner if i is not type(None)))
    elif origin is tuple and isinstance(value, tuple | list):
        for element in value:
            refuse_value(name, element, inner[0])


# ------------------------------------------------------------------------------------------------------------- fields


@dataclass(frozen=True)
class Option:
    """How a field is written on the command line, where its name and its type do not say that."""

    name: str | None = ""
    """The option with its dashes; empty: it is called as the field. None: the field is no option."""
    read: Callable[[str, str], Any] | None = None
    """Makes the value of a text and of the option's name, as the layers of `12-20`."""


NO_OPTION = Option(None)
"""Marks a field that no command offers."""


@dataclass(frozen=True)
class Later:
    """Marks a field that records leave out while it has its default: what was saved before it existed then stays the same."""


LATER = Later()


class Settings:
    """What classes of settings inherit: a value that a field may not have is refused when they are made."""

    def __post_init__(self) -> None:
        refuse_wrong(type(self), {f.name: getattr(self, f.name) for f in settings_fields(type(self))})

    def record(self) -> dict[str, Any]:
        """Return the settings as they are kept and compared: all but later fields at their defaults, inner settings likewise."""
        kind = type(self)
        known = [f.name for f in settings_fields(kind) if LATER in marks_of(kind, f.name) and is_default(self, f)]
        values = {name: value for name, value in asdict(self).items() if name not in known}  # type: ignore[call-overload]
        inner = {name: getattr(self, name) for name in values}
        return values | {name: value.record() for name, value in inner.items() if isinstance(value, Settings)}


def is_default(settings: Settings, field: Field[Any]) -> bool:
    """Whether a field has its default."""
    return bool(getattr(settings, field.name) == field.default)


def refuse_wrong(settings: type, values: dict[str, Any]) -> None:
    """Refuse the first value that its field may not have."""
    for name, value in values.items():
        refuse_value(name_of(settings, name), value, hints_of(settings)[name])


def settings_fields(settings: type) -> tuple[Field[Any], ...]:
    """Return the fields of a class of settings."""
    assert is_dataclass(settings), f"{settings} is no dataclass"
    return fields(settings)


@cache
def hints_of(settings: type) -> dict[str, Any]:
    """Return the types of a class's fields, with their marks."""
    return get_type_hints(settings, include_extras=True)


def marks_of(settings: type, field: str) -> tuple[Any, ...]:
    """Return the marks in a field's type."""
    hint = hints_of(settings)[field]
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def option_of(settings: type, field: str) -> Option:
    """Return how a field is written on the command line."""
    return next((mark for mark in marks_of(settings, field) if isinstance(mark, Option)), Option())


def name_of(settings: type, field: str) -> str:
    """Return what people call a field: as its option if that has another name."""
    return (option_of(settings, field).name or field).removeprefix("--")


@cache
def docs_of(settings: type) -> dict[str, str]:
    """Return the docstring under each field of a class, inherited ones too, in one line."""
    docs: dict[str, str] = {}
    for cls in reversed(settings.__mro__):
        body = classes_in(cls.__module__).get(cls.__name__, []) if is_dataclass(cls) else []
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                docs[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return docs


@cache
def classes_in(module: str) -> dict[str, list[ast.stmt]]:
    """Return the body of each class of a module: Python keeps no docstring of a field, so the source is read."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


# ------------------------------------------------------------------------------------------------------ common fields

MOST_SEED = 2**32 - 1
"""The largest seed that every generator of random numbers takes; none takes one below 0."""

MOST_COUNT = 2**31 - 1
"""The largest number of anything: every library can count so far."""

Seed = Annotated[int, Range(0, MOST_SEED)]
Count = Annotated[int, Range(1), Range(most=MOST_COUNT)]
CountOrZero = Annotated[int, Range(0), Range(most=MOST_COUNT)]
"""A number that may be 0."""
Counts = Annotated[tuple[Count, ...], NotEmpty()]
"""Numbers that are tried one after another."""


def parse_layers(text: str, option: str = "--layers") -> tuple[int, ...]:
    """Return the layers of `0,16` or `12-20`."""
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", part, re.ASCII)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise CoralError(f"{option} must look like 0,16 or 12-20. Got {text!r} instead.")
        layers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(layers))


def parse_names(text: str, _: str = "") -> tuple[str, ...]:
    """Return the names of `centred, rank`."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_numbers(text: str, option: str) -> tuple[float, ...]:
    """Return the numbers of `0.1, 1, 45`."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise CoralError(f"{option} must look like 0.1 or 0.1,1,45. Got {text!r} instead.") from None


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """Return the whole numbers of `256, 128`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise CoralError(f"{option} must look like 256 or 256,128. Got {text!r} instead.") from None


Layers = Annotated[tuple[int, ...] | None, Option(read=parse_layers)]
"""Layers of a model; None stands for all."""
