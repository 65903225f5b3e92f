"""Templates of one's own: Jinja in a sandbox, which puts a question into words and can do nothing else.

A template comes with a lens, and a lens may come from a stranger: it reaches no attribute, no file and no name but those of the
question, and what it writes is bounded. It never sees the answer.

    {{ context }}
    Frage: {{ question }}
    {% for letter, option in lettered %}{{ letter }}) {{ option }}
    {% endfor %}Antwort:
    {%- macro continuation(option, letter) %} {{ letter }}{% endmacro %}
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from coral_lens.errors import CoralError

MOST_TEMPLATE = 50_000
"""Characters of a template."""
MOST_TEXT = 2_000_000
"""Characters of whatever a template writes or puts together."""
FILTERS = ("lower", "upper", "title", "capitalize", "trim", "join", "length", "count", "first", "last", "list", "default",
           "string", "int", "reverse", "sort")  # fmt: skip
"""Filters that make nothing much larger than what they are given."""
METHODS = ("strip", "lstrip", "rstrip", "lower", "upper", "title", "capitalize", "startswith", "endswith", "split", "items",
           "keys", "values", "get")  # fmt: skip
"""Methods of texts and of objects that may be called; a macro of the template itself may be, too."""


class TemplateError(CoralError):
    """What is wrong with a template, in one sentence."""


@lru_cache(maxsize=64)
def compiled(text: str) -> Any:
    """Return a template that is ready to be filled in; refuse what is none, or does more than put into words."""
    import jinja2
    from jinja2 import nodes

    if len(text) > MOST_TEMPLATE:
        raise TemplateError(f"The template has {len(text):,} characters; {MOST_TEMPLATE:,} are allowed.")
    environment = sandbox()
    try:
        tree = environment.parse(text)
        for node in tree.find_all((nodes.Concat, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)):
            does = (
                "joins texts by ~, for which {{ a }}{{ b }} stands"
                if isinstance(node, nodes.Concat)
                else "reads others"
            )
            raise TemplateError(f"The template, line {node.lineno}, {does}; that is not allowed.")
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"The template, line {error.lineno}: {error.message}.") from error
    except jinja2.TemplateError as error:
        raise TemplateError(f"The template cannot be used: {error}.") from error


@lru_cache(maxsize=1)
def sandbox() -> Any:
    """Return the sandbox in which templates are filled in."""
    from jinja2 import StrictUndefined
    from jinja2.exceptions import SecurityError
    from jinja2.runtime import Macro
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "+" and isinstance(left, str) and isinstance(right, str):
                return bounded(left + right)
            if not all(isinstance(side, int | float) and abs(side) < 1e6 for side in (left, right)):
                raise SecurityError(f"{operator} is for numbers")
            return super().call_binop(context, operator, left, right)

        def is_safe_callable(self, obj: Any) -> bool:
            return isinstance(obj, Macro) or getattr(obj, "__name__", "") in METHODS

    environment = Sandbox(undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals.clear()
    environment.filters = {name: environment.filters[name] for name in FILTERS} | {"join": joined, "replace": replaced}
    return environment


def bounded(text: str) -> str:
    """Return a text that is not too long."""
    from jinja2.exceptions import SecurityError

    if len(text) > MOST_TEXT:
        raise SecurityError(f"a text has more than {MOST_TEXT:,} characters")
    return text


def joined(values: Sequence[Any], between: str = "") -> str:
    """Join values, as the filter of this name does."""
    texts = [bounded(str(value)) for value in values]
    bounded(" " * min(MOST_TEXT + 1, sum(map(len, texts)) + len(between) * len(texts)))
    return between.join(texts)


def replaced(text: str, old: str, new: str) -> str:
    """Replace parts of a text, as the filter of this name does."""
    bounded(" " * min(MOST_TEXT + 1, len(text) + str(text).count(old) * len(new)))
    return str(text).replace(old, new)


def fill_in(
    text: str, values: dict[str, Any], choices: Sequence[tuple[str, str]]
) -> tuple[str, tuple[str, ...] | None]:
    """Return what a template makes of a question, and for each (option, letter) what it has scored; None if it does not say."""
    import jinja2

    template = compiled(text)
    try:
        module = template.make_module(values)
        macro = getattr(module, "continuation", None)
        scored = None if macro is None else tuple(bounded(str(macro(option, letter))) for option, letter in choices)
        prompt = bounded(str(module))
    except jinja2.UndefinedError as error:
        known = ", ".join(sorted(values))
        raise TemplateError(
            f"The template asks for what the question has not: {error.message}. It has {known}."
        ) from error
    except (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        ArithmeticError,
        RecursionError,
        AttributeError,
        KeyError,
    ) as error:
        raise TemplateError(f"The template cannot be filled in: {type(error).__name__}: {error}.") from error
    return prompt, scored


def read_template(text: str, option: str = "--template") -> str:
    """Return the template in a file; it must be one."""
    path = Path(text)
    try:
        template = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise CoralError(f"{option} {text} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    try:
        compiled(template)
    except TemplateError as error:
        raise CoralError(f"{option} {text}: {error}") from error
    return template


def read_text(text: str, option: str = "") -> str:
    """Return a text, or what the file holds that is named after an @."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise CoralError(f"{option} {text} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
