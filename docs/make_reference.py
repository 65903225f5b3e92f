"""Write docs/reference/api.md and docs/reference/commands.md from docstrings and help texts: python docs/make_reference.py

A test compares the pages with what this program makes of the code as it is.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import coral_lens

HERE = Path(__file__).parent / "reference"
WIDTH = 118
GROUPS = (
    ("From questions to answers", "load_model load_questions fit predict evaluate calibrate adapt"),
    ("What they give", "Lens Answer Answers Run Metrics Predictions"),
    ("Open questions", "load_open_questions fit_open ask OpenAnswer OpenAnswers OpenQuestion Sampling"),
    ("Texts into classes", "CoralClassifier"),
    ("Anyone's probabilities", "audit_probabilities write_audit load_maps apply_maps AuditSettings"),
    ("Loading and saving", "load_lens load_run wrap"),
    ("Whole studies", "load_study run_study Study"),
    ("Settings", "FitSettings Guarantees TaskOptions TableOptions Style Extraction"),
    ("One level below", "extract measure ActivationStore Question OptionTable Options Model CoralError"),
)
"""The order in which the page shows public names; one that is in no group stands at the end."""


# -------------------------------------------------------------------------------------------------------------- API


def api_page() -> str:
    """Return the page of all public names."""
    known = [name for _, names in GROUPS for name in names.split()]
    groups = [*GROUPS, ("More", " ".join(name for name in coral_lens.__all__ if name not in known))]
    parts = [
        "# The Python API",
        "Every name below is imported from `coral_lens`. This page is made from docstrings by "
        "`python docs/make_reference.py`.",
    ]
    for title, names in groups:
        shown = [name for name in names.split() if name in coral_lens.__all__]
        if shown:
            parts += [f"## {title}", *(entry(name) for name in shown)]
    return "\n\n".join(parts) + "\n"


def entry(name: str) -> str:
    """Return one public name: signature, docstring, and for a class its fields and methods."""
    thing = getattr(coral_lens, name)
    if not inspect.isclass(thing):
        return "\n\n".join([f"### `{name}`", code(signature(name, thing)), paragraphs(inspect.getdoc(thing) or "")])
    parts = [f"### `{name}`"]
    if is_dataclass(thing) or hasattr(thing, "model_fields"):
        parts.append(paragraphs(thing.__doc__ if not str(thing.__doc__).startswith(f"{name}(") else ""))
    else:
        parts += [code(signature(name, thing)), paragraphs(inspect.getdoc(thing) or "")]
    fields = "\n".join(field_lines(thing))
    methods = "\n".join(method_lines(thing))
    return "\n\n".join(p for p in [*parts, fields, methods] if p)


def signature(name: str, thing: Any) -> str:
    """Return a call as a reader would write it, wrapped."""
    try:
        text = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return name
    text = re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", text)
    text = re.sub(r"coral_lens\.[a-z_.]+\.", "", text).replace("'", "").replace("collections.abc.", "")
    if len(name + text) <= WIDTH:
        return name + text
    inner, _, returned = text[1:].rpartition(")")
    arguments = split_arguments(inner)
    return f"{name}(\n" + "".join(f"    {a},\n" for a in arguments) + f"){returned}"


def split_arguments(text: str) -> list[str]:
    """Split at the commas that are in no bracket."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "[({") - (char in "])}")
        if char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [p for p in [*parts, text[start:].strip()] if p]


def field_lines(thing: type) -> Iterator[str]:
    """Yield a line for each field that has a docstring under it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            default = f" = {ast.unparse(node.value)}" if node.value is not None else ""
            text = ""
            if (
                isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                text = ": " + one_line(after.value.value)
            kind = ast.unparse(node.annotation).replace("'", "")
            yield wrapped(f"- `{node.target.id}: {kind}{default}`{text}")


def method_lines(thing: type) -> Iterator[str]:
    """Yield a line for each public method and property that the class itself defines."""
    for name, member in vars(thing).items():
        if name.startswith("_"):
            continue
        inner = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        inner = getattr(inner, "func", inner)  # a cached property
        document = inspect.getdoc(inner) if callable(inner) else None
        if document:
            call = name if isinstance(member, property) or not inspect.isfunction(inner) else f"{name}(...)"
            yield wrapped(f"- `{thing.__name__}.{call}`: {one_line(document.split(chr(10) * 2)[0])}")


def paragraphs(text: str | None) -> str:
    """Return a docstring as Markdown: paragraphs filled, indented blocks as code."""
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(text or ""))
    return "\n\n".join(code(textwrap.dedent(b)) if b.startswith("    ") else wrapped(one_line(b)) for b in blocks if b)


def code(text: str) -> str:
    """Return a block of Python."""
    return f"```python\n{text}\n```"


def one_line(text: str) -> str:
    """Return a text without its line breaks."""
    return " ".join(text.split())


def wrapped(text: str) -> str:
    """Fill a line of Markdown; a list item goes on under its text."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


# --------------------------------------------------------------------------------------------------------- commands


def commands_page() -> str:
    """Return the page of all commands with their options."""
    from typer.main import get_command

    from coral_lens.cli import app

    parts = [
        "# The commands",
        "What `coral COMMAND --help` says. This page is made by `python docs/make_reference.py`.",
    ]
    commands = list(walk(get_command(app), ()))
    parts.append("\n".join(["| command | does |", "|---|---|", *(summary_row(*one) for one in commands)]))
    parts += [command_entry(words, command) for words, command in commands]
    return "\n\n".join(parts) + "\n"


def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command that does something, with the words that call it."""
    inner = getattr(command, "commands", None)
    if not inner:
        yield words, command
        return
    for name, child in inner.items():
        yield from walk(child, (*words, name))


def summary_row(words: tuple[str, ...], command: Any) -> str:
    """Return a command in one line: its name, which leads to its entry, and the first sentence of its help."""
    anchor = "-".join(("coral", *words))
    return f"| [`coral {' '.join(words)}`](#{anchor}) | {one_line(command.help.split(chr(10) * 2)[0])} |"


def command_entry(words: tuple[str, ...], command: Any) -> str:
    """Return one command: what it does, its arguments and options."""
    parts = [f"## `coral {' '.join(words)}`", paragraphs(command.help)]
    lines = [option_line(p) for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    return "\n\n".join([*parts, "\n".join(lines)] if lines else parts)


def option_line(parameter: Any) -> str:
    """Return an argument or an option with its default."""
    opts = [*parameter.opts, *getattr(parameter, "secondary_opts", [])]
    name = " / ".join(opts) if parameter.param_type_name == "option" else parameter.name.upper()
    said = one_line(getattr(parameter, "help", None) or "")
    default = parameter.default
    shown = not parameter.required and default not in (None, (), [], False) and not callable(default)
    return wrapped(
        f"- `{name}`: {said}"
        + (f" Default: `{default}`." if shown else "")
        + (" Required." if parameter.required else "")
    )


PAGES = {"api.md": api_page, "commands.md": commands_page}

if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for file, page in PAGES.items():
        (HERE / file).write_text(page(), "utf-8")
