"""What commands share: their options, in groups, and what is made of them. Imports nothing heavy before it is needed.

A group is a dataclass. A command under `flat` that takes one has every field of it as an option of its own:

    @app.command()
    @flat
    def extract(source: ..., *, asking: Asking, machine: Machine) -> None:
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from coral_lens.errors import CoralError

if TYPE_CHECKING:
    from coral_lens.engine.model import Model
    from coral_lens.records import Question, Style


ModelName = Annotated[
    str, typer.Option("--model", help="Hub id, local folder, .gguf file, or `smollm2` (embedded).", show_default=True)
]
LensModel = Annotated[str | None, typer.Option("--model", help="Default: the model that the lens was fitted on.")]
OtherModel = Annotated[
    bool, typer.Option("--other-model", help="Use a lens on a model of other fingerprints; this is recorded.")
]
DataDir = Annotated[
    Path | None,
    typer.Option("--data", help="Folder with TASK/SPLIT.jsonl[.gz] or .parquet, before embedded data and hub."),
]
Limit = Annotated[int | None, typer.Option(help="At most so many questions of each source, the first ones.")]


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command in which every field of a group is an option of its own, in the group's place."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind) and isinstance(kind, type)}

    @wraps(command)
    def called(**values: Any) -> None:
        made = {n: kind(**{f.name: values.pop(f.name) for f in fields(kind)}) for n, kind in groups.items()}
        command(**values, **made)

    def parameters() -> Iterator[Parameter]:
        for name, own in signature(command).parameters.items():
            source, of = (
                (signature(groups[name]).parameters, groups[name]) if name in groups else ({name: own}, command)
            )
            types = get_type_hints(of, include_extras=True)
            for one in source.values():
                yield one.replace(kind=Parameter.KEYWORD_ONLY, annotation=types[one.name])

    found = list(parameters())
    called.__signature__ = Signature(found)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in found}
    return called


@dataclass(frozen=True)
class Machine:
    """Where a model runs."""

    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps. Default: the GPU if there is one.")] = None
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16 or auto. Default: float32 on the CPU.")
    ] = None
    device_map: Annotated[str | None, typer.Option(help="Spread the model over devices, e.g. `auto` (accelerate).")] = (
        None
    )

    def open(self, name: str) -> Model:
        """Load a model with a word on standard error, since it can take a while."""
        from coral_lens.engine.loading import load_model

        typer.echo(f"loading {name} ...", err=True)
        return load_model(name, device=self.device, dtype=self.dtype, device_map=self.device_map)

    def opener(self, name: str) -> Callable[[], Model]:
        """Return a function that gives the model, loaded when it is first called: questions are read before that."""
        return cache(lambda: self.open(name))


@dataclass(frozen=True)
class Styling:
    """How own questions are written."""

    style: Annotated[
        str, typer.Option(help="How own questions are asked: `text` scores options, `letters` their letters.")
    ] = "text"
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Wrap prompts in the model's chat template.")
    ] = False

    def made(self) -> Style:
        """Return the prompt style of that name."""
        from coral_lens.records import Style

        if self.style not in ("text", "letters"):
            raise CoralError(f"Unknown style {self.style!r}; use text or letters.")
        return Style(self.style, self.apply_chat_template)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Asking:
    """Which questions of a source are asked, and after how many worked examples."""

    num_fewshot: Annotated[int | None, typer.Option(help="Worked examples before each question, as in lm-eval.")] = None
    fixed_shots: Annotated[
        bool, typer.Option("--fixed-shots", help="The same worked examples for every question: faster.")
    ] = False
    limit: Limit = None
    data: DataDir = None

    def gather(self, sources: list[str], *, chat: Callable[[], Model] | None = None) -> list[Question]:
        """Load the questions of all sources, in the chat template of a model if one is given; an id twice is refused."""
        from coral_lens.data.questions import load_questions
        from coral_lens.data.tasks import TaskOptions

        options = TaskOptions(
            num_fewshot=self.num_fewshot,
            fixed_shots=self.fixed_shots,
            limit=self.limit,
            data_dir=folder_of_data(self.data),
            chat_template=chat().chat_template if chat else None,
        )
        questions = [q for source in sources for q in load_questions(source, options)]
        seen: set[str] = set()
        for question in questions:
            if question.id in seen:
                raise CoralError(
                    f"The question id {question.id!r} comes twice in {', '.join(sources)}; make ids unique."
                )
            seen.add(question.id)
        return questions


def folder_of_data(data: Path | None) -> Path | None:
    """Return --data, which must be a folder."""
    if data is not None and not data.is_dir():
        raise CoralError(f"--data {data} is not a folder.")
    return data


def parse_layers(text: str | None, option: str = "--layers") -> tuple[int, ...] | None:
    """Return the layers of `0,16` or `12-20`, or None for all."""
    if text is None:
        return None
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", part, re.ASCII)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise CoralError(f"{option} must look like 0,16 or 12-20. Got {text!r} instead.")
        layers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(layers))


def beside(out: Path) -> Path:
    """Return the folder for intermediate results beside `out`, which must have a name of its own for that."""
    if not out.name or out.name == "..":
        raise CoralError(f"--out {out} has no name of its own; choose a new name inside it.")
    return out.with_name(f"{out.name}.work")


def remove_work(folder: Path) -> None:
    """Delete the states of a finished prediction."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
