"""A field of settings is declared once: its range or names, and the sentence under it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from coral_lens.errors import CoralError
from coral_lens.storage.settings import (
    LATER,
    NO_OPTION,
    Count,
    OneOf,
    Option,
    Range,
    Seed,
    Settings,
    docs_of,
    name_of,
    option_of,
    parse_counts,
    parse_names,
    parse_numbers,
)


@dataclass(frozen=True)
class Oven(Settings):
    """How hot it is."""

    heat: Annotated[int, Range(50, 250)] = 180
    """Degrees
    Celsius."""
    fan: bool = False


@dataclass(frozen=True)
class Baking(Oven):
    """How a cake is made."""

    form: Literal["round", "square"] = "round"
    """`round` or `square`."""
    flour: Annotated[str, OneOf(lambda: ("wheat", "rye")), Option("--of-flour")] = "wheat"
    layers: tuple[Count, ...] = (1, 2)
    sugar: Annotated[float, Range(above=0, below=1)] | None = None
    salt: Annotated[float, Range(above=0), NO_OPTION] = 0.1
    seed: Seed = 0


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("heat", 251, "heat must lie between 50 and 250. Got 251 instead."),
        ("heat", "hot", "heat must lie between 50 and 250. Got 'hot' instead."),
        ("form", "sqare", "Unknown form 'sqare'; use one of round, square. Did you mean 'square'?"),
        ("flour", "ryee", "Unknown of-flour 'ryee'; use one of wheat, rye. Did you mean 'rye'?"),
        ("layers", (2, 0), "layers must be at least 1. Got 0 instead."),
        ("sugar", 1.0, "sugar must lie between 0 and 1, both excluded. Got 1.0 instead."),
        ("salt", 0.0, "salt must be above 0. Got 0.0 instead."),
        ("salt", float("nan"), "salt must be above 0. Got nan instead."),
        ("seed", -1, "seed must lie between 0 and 4294967295. Got -1 instead."),
    ],
)
def test_a_value_that_a_field_may_not_have_is_refused_in_one_sentence(field: str, value: Any, said: str) -> None:
    with pytest.raises(CoralError) as error:
        Baking(**{field: value})
    assert str(error.value) == said


def test_values_inside_and_none_are_taken() -> None:
    made = Baking(heat=50, fan=True, form="square", flour="rye", layers=(), sugar=None, salt=1e9)
    assert (made.heat, made.sugar, made.layers) == (50, None, ())
    assert Baking(sugar=0.5).sugar == 0.5


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Range(least=1), "be at least 1"),
        (Range(most=3), "be at most 3"),
        (Range(1, 3), "lie between 1 and 3"),
        (Range(least=0, below=1), "be at least 0 and below 1"),
        (Range(above=0, most=1), "be above 0 and at most 1"),
    ],
)
def test_a_range_says_what_it_holds(limits: Range, words: str) -> None:
    assert str(limits) == words


def test_what_stands_under_a_field_is_its_documentation_inherited_or_not() -> None:
    assert docs_of(Baking) == {"heat": "Degrees Celsius.", "form": "`round` or `square`."}


def test_an_option_is_named_as_its_field_unless_it_says_otherwise() -> None:
    assert option_of(Baking, "heat") == Option()
    assert option_of(Baking, "salt") is NO_OPTION
    assert [name_of(Baking, f) for f in ("heat", "flour", "salt")] == ["heat", "of-flour", "salt"]


def test_names_are_read_with_commas_between_them() -> None:
    assert parse_names("centred, rank,") == ("centred", "rank")
    assert parse_names("") == ()


@dataclass(frozen=True)
class Newer(Oven):
    """An oven with a lamp, which older ones did not have."""

    lamp: Annotated[bool, LATER] = True


def test_a_record_leaves_out_a_later_field_at_its_default() -> None:
    """What was written before the field existed is then still the same."""
    assert Newer().record() == Oven().record() == {"heat": 180, "fan": False}
    assert Newer(lamp=False).record() == {"heat": 180, "fan": False, "lamp": False}


def test_numbers_are_read_from_a_text() -> None:
    assert parse_numbers("0.1, 1,45", "--x") == (0.1, 1.0, 45.0)
    assert parse_counts("256,128", "--x") == (256, 128)
    for parse, text in ((parse_numbers, "1;2"), (parse_counts, "1.5"), (parse_counts, "")):
        with pytest.raises(CoralError, match=f"--x must look like .* Got {text!r} instead"):
            parse(text, "--x")
