"""The options of every command are the fields of its settings, and nothing drifts from them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from inspect import unwrap
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from coral_lens.analysis.settings import ProbePlan
from coral_lens.cli import app
from coral_lens.cli.check import Looked
from coral_lens.cli.options import Asking, flat, inputs_of, iter_options, settings_from, written_fields
from coral_lens.data.settings import Style, TaskOptions
from coral_lens.errors import CoralError
from coral_lens.lens.probes.mlp import HIDDEN
from coral_lens.lens.probes.registry import LENSES
from coral_lens.lens.rules import BASE_SCORES
from coral_lens.lens.settings import FitSettings, Guarantees
from coral_lens.methods.controls import OtherModel
from coral_lens.sae.settings import AblationPlan, Sampling, SteerPlan, TrainingSettings
from coral_lens.storage.settings import NO_OPTION, Count, Option, Settings, docs_of, option_of, settings_fields

NOT_OPTIONS = {
    TaskOptions: {"split", "chat_template", "seed"},
    Asking: {"split", "chat_template", "seed"},
    Looked: {"split", "chat_template", "seed"},
    FitSettings: {"validation", "stratified"},
    OtherModel: {"validation", "stratified"},
    Guarantees: {"delta"},
    Sampling: {"shard_tokens"},
    TrainingSettings: {"warm_up", "penalty_warm_up", "decay", "resample", "checkpoint"},
    AblationPlan: {"seed"},
    SteerPlan: {"top", "gammas"},
    ProbePlan: {"depths", "epochs"},
}
"""What no command offers, on purpose: a source names its split, a study its share of validation questions and how it divides."""


def every_settings(cls: type = Settings) -> Iterator[type]:
    for inner in cls.__subclasses__():
        if inner.__module__.startswith("coral_lens."):
            yield inner
        yield from every_settings(inner)


def commands(typed: typer.Typer, click: Any, *above: str) -> Iterator[tuple[str, dict[str, type], dict[str, Any]]]:
    """Every command: its words, the settings that it takes, and its parameters."""
    for info in typed.registered_commands:
        name = info.name or info.callback.__name__  # type: ignore[union-attr]
        hints = get_type_hints(unwrap(info.callback), include_extras=True)  # type: ignore[arg-type]
        groups = {n: kind for n, kind in hints.items() if is_dataclass(kind)}
        yield " ".join([*above, name]), groups, {p.name: p for p in click.commands[name].params}
    for group in typed.registered_groups:
        inner = group.typer_instance
        yield from commands(
            inner, click.commands[group.name] if group.name else click, *above, *filter(None, [group.name])
        )


COMMANDS = list(commands(app, get_command(app)))
for module in ("cli", "methods.registry"):
    importlib.import_module(f"coral_lens.{module}")


def test_every_command_is_looked_at() -> None:
    assert {"fit", "extract", "calibrate", "eval", "sae train", "analyse layers"} <= {name for name, _, _ in COMMANDS}


@pytest.mark.parametrize(("name", "groups", "parameters"), COMMANDS, ids=[name for name, _, _ in COMMANDS])
def test_every_field_of_a_commands_settings_is_an_option_with_its_sentence(
    name: str, groups: dict[str, type], parameters: dict[str, Any]
) -> None:
    for kind in groups.values():
        for option in iter_options(kind):
            assert option.name in parameters, f"coral {name} lacks {option.name}"
        for field in written_fields(kind):
            if not field.inner:
                assert parameters[field.key].help, f"nothing stands under {kind.__name__}.{field.field.name}"
                assert field.name in parameters[field.key].opts


@pytest.mark.parametrize("kind", sorted(every_settings(), key=str), ids=lambda kind: kind.__name__)
def test_a_field_is_documented_and_an_option_unless_that_was_decided_otherwise(kind: type) -> None:
    names = [f.name for f in settings_fields(kind)]
    assert [name for name in names if name not in docs_of(kind)] == []
    hidden = {name for name in names if option_of(kind, name).name is None}
    assert hidden == NOT_OPTIONS.get(kind, set())


def test_names_that_a_sentence_lists_are_those_of_the_tables() -> None:
    for name in (*LENSES, "auto"):
        assert f"`{name}`" in docs_of(FitSettings)["lens"]
    for name in BASE_SCORES:
        assert f"`{name}`" in docs_of(FitSettings)["base"]
        FitSettings(base=name)  # type: ignore[arg-type]
    FitSettings(depth=len(HIDDEN))
    with pytest.raises(CoralError, match="depth must lie between 1 and 4"):
        FitSettings(depth=len(HIDDEN) + 1)


# --------------------------------------------------------------------------------------------------------------- flat


@dataclass(frozen=True)
class Inner(Settings):
    """What is inside."""

    size: Annotated[Count, Option("--inner-size")] = 2
    """How large."""
    seed: int = 0
    """Of the inside."""


@dataclass(frozen=True)
class Outer(Settings):
    """What is outside. And more."""

    place: Path
    """Where."""
    inner: Inner = Inner()
    """What is in it."""
    names: Annotated[tuple[str, ...], Option(read=lambda text, option: (option, *text.split("+")))] = ()
    """With a plus."""
    sizes: tuple[int, ...] = (4, 8)
    """Several."""
    sure: bool | None = None
    """Whether."""
    on: bool = True
    """Whether it is on."""
    secret: Annotated[float, NO_OPTION] = 0.5
    """Nobody's business."""


@dataclass(frozen=True)
class Other(Settings):
    """Shares a field."""

    seed: int = 0
    """Of the other."""
    style: Style = Style()  # noqa: RUF009  (frozen)
    """How."""


def run(*arguments: str) -> tuple[Any, ...]:
    """What a command gets for these words."""
    made: list[Any] = []
    tool = typer.Typer()

    @tool.command()
    @flat
    def command(word: str, *, outer: Outer, other: Other) -> None:
        made.extend((word, outer, other))

    result = CliRunner().invoke(tool, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return tuple(made)


def test_a_command_gets_the_defaults_of_its_settings() -> None:
    assert run("w", "--place", "here") == ("w", Outer(Path("here")), Other())


def test_a_command_gets_what_is_written() -> None:
    words = "w --place p --inner-size 3 --names a+b --sizes 1 --sizes 2 --no-sure --no-on --seed 7 --style letters"
    _, outer, other = run(*words.split())
    assert outer == Outer(Path("p"), Inner(3, seed=7), ("--names", "a", "b"), (1, 2), sure=False, on=False)
    assert other == Other(7, Style("letters")), "a field that two classes share is one option"


def test_a_wrong_value_is_refused_as_python_refuses_it() -> None:
    with pytest.raises(CoralError) as written:
        run("w", "--place", "p", "--inner-size", "0")
    with pytest.raises(CoralError) as made:
        Inner(0)
    assert str(written.value) == str(made.value) == "inner-size must be at least 1. Got 0 instead."
    with pytest.raises(CoralError, match="Unknown style 'prose'; use one of text, letters"):
        run("w", "--place", "p", "--style", "prose")


def test_help_has_the_sentence_the_default_and_the_values_of_each_field() -> None:
    tool = typer.Typer(rich_markup_mode="markdown")

    @tool.command()
    @flat
    def command(*, outer: Outer) -> None: ...

    said = re.sub(r"[│╭╰─╮╯\s]+", " ", CliRunner().invoke(tool, ["--help"], env={"COLUMNS": "200"}).output)
    assert " What is outside " in said, "the first sentence of the class is a heading"
    for words in ("--inner-size 1.. How large. [default: 2]", "--sure --no-sure", "[default: 4, 8]"):
        assert words in said
    assert "secret" not in said


def test_settings_are_made_of_values_by_the_names_of_their_options() -> None:
    assert settings_from(Inner, {"inner_size": 5, "seed": 1, "else": None}) == Inner(5, 1)


def test_a_folder_that_is_called_as_the_embedded_model_may_be_written_to() -> None:
    values = {"model": ["smollm2", "mine"], "task": "smollm2", "lens": None}
    assert inputs_of(values, ["model", "task", "lens"]) == ["mine", "smollm2"]
