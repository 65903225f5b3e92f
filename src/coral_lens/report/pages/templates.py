"""Fills in the HTML files of this folder. Whatever is not our own markup is escaped, and a missing value is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from coral_lens.errors import need
from coral_lens.report.tables.formats import percent

if TYPE_CHECKING:
    from jinja2 import Environment


def fill_template(template: str, *values: Mapping[str, Any], **more: Any) -> str:
    """Return a page made of a template and what it shows."""
    need("report", by="A report page")
    from markupsafe import Markup

    known = {"css": Markup(text_of("page.css")), "script_digests": ""}
    return (
        templates()
        .get_template(template)
        .render({**known, **{name: value for part in (*values, more) for name, value in part.items()}})
    )


@cache
def templates() -> Environment:
    """Return the templates, each compiled once."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(text_of), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["percent"] = percent
    return environment


def text_of(name: str) -> str:
    """Return a template, a style sheet or a script of this folder."""
    return (files("coral_lens.report.pages") / name).read_text(encoding="utf-8")


def leaves_of(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of a nested record, named by their path; a list is one leaf."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves_of(inner, f"{name} · {key}" if name else str(key))
    elif isinstance(value, list | tuple):
        yield name, ", ".join(map(str, value)) or "none"
    else:
        yield name, "none" if value is None else str(value)
