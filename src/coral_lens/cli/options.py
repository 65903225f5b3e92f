"""Options of commands, made of settings. Imports nothing heavy before it is needed.

A command under `flat` that takes a class of settings has every field of it as an option: name, type and default are the
field's, and the help is the docstring under it.

    @app.command()
    @flat
    def extract(source: ..., *, asking: Asking, machine: Machine) -> None:
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, is_dataclass, replace
from functools import cache, wraps
from inspect import Parameter, Signature, signature
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo, ParameterInfo

from coral_lens.data.assets import EMBEDDED
from coral_lens.data.settings import TaskOptions
from coral_lens.errors import CoralError
from coral_lens.storage.escape import for_terminal
from coral_lens.storage.outputs import refuse_inputs
from coral_lens.storage.remote import is_flattened, is_url
from coral_lens.storage.settings import (
    MOST_SEED,
    OneOf,
    Option,
    Range,
    Settings,
    docs_of,
    hints_of,
    option_of,
    refuse_wrong,
    settings_fields,
)

if TYPE_CHECKING:
    from coral_lens.engine.model import Model
    from coral_lens.lens.artefact import Lens
    from coral_lens.records import Question
    from coral_lens.scale.settings import RaySettings
    from coral_lens.scale.worker import ModelSource
    from coral_lens.study.states import Helpers

# ------------------------------------------------------------------------------------------------------------ options


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command in which every field of its settings is an option, in the place of the settings.

    A field that two classes share is one option, and both get its value.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind) and isinstance(kind, type)}
    own = [
        p.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[n]) for n, p in signature(command).parameters.items()
    ]
    options: dict[str, Parameter] = {}
    for parameter in own:
        kind = groups.get(parameter.name)
        for option in iter_options(kind) if kind else [parameter]:
            name_value(option)
            known = options.setdefault(option.name, option)
            assert known.default == option.default, f"{command.__name__} has two defaults of {option.name}"

    read = [name for name, option in options.items() if is_read(option)]

    @wraps(command)
    def called(**values: Any) -> None:
        refuse_unwritable(values.get("out"))
        for name in RESULTS:
            if values.get(name) is not None and not is_url(values[name]):
                refuse_address(Path(values[name]), f"--{name}")
                refuse_inputs(Path(values[name]), inputs_of(values, read), option=f"--{name}")
        others = {p.name: values[p.name] for p in own if p.name not in groups}
        command(**others, **{name: settings_from(kind, values) for name, kind in groups.items()})

    called.__signature__ = Signature(list(options.values()))  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in options.values()}
    return called


SOURCES = ("train", "task", "questions", "validation", "test", "lm_eval_samples")
VALUES = dict.fromkeys(SOURCES, "SOURCE") | {"model": "MODEL", "lens": "LENS", "store": "STORE"}
"""What the help calls the value of an option, by the option's name: each of these may name a file or folder that is read."""
ARGUMENTS = ("source", "more", "study", "files")
"""Arguments, which have no dashes, that may do so too."""
KINDS = {Path: "PATH", int: "NUMBER", float: "NUMBER"}
"""And by its type, where the name says nothing; all others are a TEXT."""
RESULTS = ("out", "work")
"""Options whose paths are written to; all other paths are read."""


def name_value(option: Parameter) -> None:
    """Have the help call the value of an option by a name for people: typer writes `<list[str]>`."""
    mark = mark_of(option)
    if isinstance(mark, OptionInfo) and mark.metavar is None and bare(option.annotation) is not bool:
        mark.metavar = VALUES.get(option.name) or KINDS.get(kind_of(option), "TEXT")


def mark_of(option: Parameter) -> ParameterInfo | None:
    """Return what typer is told of an option or argument."""
    marks = getattr(option.annotation, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, ParameterInfo)), None)


def kind_of(option: Parameter) -> Any:
    """Return the type of an option's value, or of each of its values."""
    kind = bare(option.annotation)
    return bare(get_args(kind)[0]) if get_origin(kind) is list else kind


def is_read(option: Parameter) -> bool:
    """Return whether a value may name a file or folder that is read, as the help says: a SOURCE, a LENS, but not a NAME."""
    mark = mark_of(option)
    named = option.name in ARGUMENTS or (mark is not None and mark.metavar in VALUES.values())
    return option.name not in RESULTS and (named or kind_of(option) is Path)


def inputs_of(values: Mapping[str, Any], read: Sequence[str]) -> list[str | Path]:
    """Return what a command reads; the embedded model is not the folder that may be called as it is."""
    return [one for name in read for one in given([values[name]]) if not (name == "model" and one == EMBEDDED)]


def given(values: Iterable[Any]) -> list[str | Path]:
    """Return all that was given for options of which some may be given several times, and some not at all."""
    return [one for value in values if value is not None for one in (value if isinstance(value, list) else [value])]


@dataclass(frozen=True)
class Written:
    """A field of settings as the command line has it."""

    field: Field[Any]
    hint: Any
    option: Option
    help: str | None

    @property
    def name(self) -> str:
        """The option with its dashes."""
        return self.option.name or f"--{self.field.name.replace('_', '-')}"

    @property
    def key(self) -> str:
        """What the command's function calls it."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def inner(self) -> type | None:
        """Settings inside settings, which have options of their own."""
        kind = bare(self.hint)
        return kind if isinstance(kind, type) and is_dataclass(kind) and self.option.read is None else None

    @property
    def default(self) -> Any:
        """The default of the field, or MISSING."""
        return self.field.default if self.field.default_factory is MISSING else self.field.default_factory()

    def value(self, written: Any) -> Any:
        """Return the field's value for what the command line gives."""
        if self.option.read is not None:
            return self.default if written is None else self.option.read(written, self.name)
        return tuple(written) if isinstance(written, list) else written

    def parameter(self, panel: str) -> Parameter:
        """Return the option as a parameter that typer understands, in a panel of the help."""
        default = list(self.default) if isinstance(self.default, tuple) else self.default
        if self.option.read is not None:
            assert not default, "a default that is read from a text would have to be written as one"
            default = None
        # what is on, or undecided, can be switched off
        switch = f"/--no-{self.name.removeprefix('--')}" if bare(self.hint) is bool and default is not False else ""
        info = typer.Option(self.name + switch, help=self.help, metavar=allowed(self.hint), rich_help_panel=panel)
        return Parameter(
            self.key,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if default is MISSING else default,
            annotation=Annotated[parsed_type(self.hint, self.option), info],
        )


def written_fields(settings: type) -> Iterator[Written]:
    """Yield the fields of a class of settings that the command line has."""
    for field in settings_fields(settings):
        option = option_of(settings, field.name)
        if option.name is not None:
            yield Written(field, hints_of(settings)[field.name], option, docs_of(settings).get(field.name))


def panel_of(settings: type) -> str:
    """Return what the help writes above the options of a class of settings: the first sentence of its docstring."""
    return (settings.__doc__ or "").split("\n")[0].split(". ")[0].rstrip(".")


def iter_options(settings: type) -> Iterator[Parameter]:
    """Yield the options of a class of settings, in a panel of their own; settings inside it have theirs."""
    for field in written_fields(settings):
        if field.inner:
            yield from iter_options(field.inner)
        else:
            yield field.parameter(panel_of(settings))


def settings_from(settings: type, values: dict[str, Any]) -> Any:
    """Return settings made of the values of a command's options."""
    made = {
        field.field.name: settings_from(field.inner, values) if field.inner else field.value(values[field.key])
        for field in written_fields(settings)
    }
    refuse_wrong(settings, made)
    return settings(**made)


def bare(hint: Any) -> Any:
    """Return a type without its marks and without None."""
    if get_origin(hint) is Annotated:
        return bare(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return bare(next(inner for inner in get_args(hint) if inner is not type(None)))
    return hint


def parsed_type(hint: Any, option: Option) -> Any:
    """Return the type that the command line parses: our own sentence refuses a wrong name or number, not the parser's."""
    if option.read is not None:
        return str | None
    kind = bare(hint)
    if get_origin(kind) is tuple:
        return list[bare(get_args(kind)[0])]  # type: ignore[misc]
    kind = str if get_origin(kind) is Literal else kind
    unmarked = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return kind | None if get_origin(unmarked) in (Union, UnionType) else kind


def allowed(hint: Any) -> str | None:
    """Return in short which values a field may have, where that can be said without looking into a table."""
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        limits = next((mark for mark in marks if isinstance(mark, Range)), None)
        if limits and isfinite(limits.least):
            return f"{limits.least}..{limits.most if limits.most < MOST_SEED else ''}"
        if any(isinstance(mark, OneOf) for mark in marks):
            return "NAME"
        return allowed(inner)
    if get_origin(hint) in (Union, UnionType):
        return allowed(next(inner for inner in get_args(hint) if inner is not type(None)))
    return "|".join(get_args(hint)) if get_origin(hint) is Literal else None


# ------------------------------------------------------------------------------------------------- what commands share

DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "npu")
"""Where models can run."""

DataDir = Annotated[Path | None, typer.Option("--data", metavar="PATH", help=docs_of(TaskOptions)["data_dir"])]


def refuse_device(device: str | None) -> None:
    """Refuse what is not the name of a device."""
    if device is not None:
        kind, colon, number = device.partition(":")
        if kind.lower() == "gpu":
            raise CoralError("Unknown device 'gpu'; call it cuda (NVIDIA and AMD), mps (Apple) or xpu (Intel).")
        OneOf(DEVICES).refuse("device", kind)
        if colon and not number.isdecimal():
            raise CoralError(f"device must look like cuda or cuda:1. Got {device!r} instead.")


@dataclass(frozen=True)
class TrainingPlace(Settings):
    """Where networks are trained."""

    device: str | None = None
    """cpu, cuda, cuda:1, mps. By default the GPU if there is one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_device(self.device)

    def usable(self) -> str:
        """Return the device, which must be there."""
        from coral_lens.lens.training_data import usable_device

        return usable_device(self.device)


@dataclass(frozen=True)
class Machine(Settings):
    """Where a model runs."""

    device: str | None = None
    """cpu, cuda, cuda:1, mps. By default the GPU if there is one."""
    dtype: Literal["auto", "float32", "mixed", "bfloat16", "int8", "float16"] | None = None
    """The arithmetic. `auto`, the default, is the checkpoint's own on a GPU; on the CPU it is `mixed` (float32 states, products
    in bfloat16) where that is 1.5 times as fast as float32, else float32. `int8` is faster still, and less exact."""
    device_map: str | None = None
    """Spread the model over devices, such as `auto` (accelerate)."""
    adapter: str | None = None
    """Folder or hub id of a LoRA adapter, which is added to the model's weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_device(self.device)

    def open(self, name: str, *, dtype: str | None = None) -> Model:
        """Load a model with a word on standard error, since it can take a while; `dtype` is for where none is asked for."""
        from coral_lens.engine.loading import load_model
        from coral_lens.lens.training_data import usable_device

        if self.device:
            usable_device(self.device)
        typer.echo(f"loading {name} ...", err=True)
        dtype = self.dtype or dtype
        return load_model(name, device=self.device, dtype=dtype, device_map=self.device_map, adapter=self.adapter)

    def opener(self, name: str, *, like: Mapping[str, Any] | None = None) -> Callable[[], Model]:
        """Return a function that gives the model, loaded when it is first called: questions are read before that.

        `like` is the record of a model that something was made with: its precision is taken unless another is asked for.
        """

        def load() -> Model:
            from coral_lens.engine.precision import recorded_precision

            return self.open(name, dtype=recorded_precision(like or {}, device=self.device))

        return cache(load)

    def source(self, name: str, *, like: Mapping[str, Any] | None = None) -> ModelSource:
        """Return how others load a model; `like` is as in `opener`."""
        from coral_lens.engine.precision import recorded_precision
        from coral_lens.scale.worker import ModelSource

        dtype = self.dtype or recorded_precision(like or {}, device=self.device)
        path = Path(name).expanduser()
        place = str(path.absolute()) if path.exists() else ""
        return ModelSource(name, place, self.device, dtype, self.device_map, self.adapter)


@dataclass(frozen=True)
class ModelChoice(Settings):
    """The model."""

    model: str = "smollm2"
    """Hub id, local folder, .gguf file, or `smollm2` (embedded)."""
    machine: Machine = Machine()
    """Where it runs."""

    def opener(self, *, folder: str | Path | None = None) -> Callable[[], Model]:
        """Return a function that gives the model, loaded when it is first called; as it was for the store in a folder, if any."""
        return self.machine.opener(self.model, like=model_of(folder) if folder else None)

    def source(self, folder: str | Path | None = None) -> ModelSource:
        """Return how others load the model; as it was for the store in a folder, if any."""
        return self.machine.source(self.model, like=model_of(folder) if folder else None)


def model_of(store: str | Path) -> Mapping[str, Any] | None:
    """Return the record of the model that a store is of, if there is one; a URL that cannot be reached is refused."""
    from coral_lens.storage.files import kept_record
    from coral_lens.storage.places import MANIFEST, working_place

    with working_place(store) as place:
        place.fetch(MANIFEST)
        return (kept_record(place.folder / MANIFEST) or {}).get("model")


@dataclass(frozen=True)
class LensModelChoice(Settings):
    """The model of a lens."""

    model: str | None = None
    """By default the model that the lens was fitted on."""
    machine: Machine = Machine()
    """Where it runs."""

    def opener(self, fitted_on: Mapping[str, Any]) -> Callable[[], Model]:
        """Return a function that gives the model, loaded when it is first called; `fitted_on` is the record of a lens's."""
        return self.machine.opener(self.model or fitted_on["name"], like=fitted_on)


@dataclass(frozen=True)
class AnyModelChoice(LensModelChoice):
    """The model of a lens, or another one."""

    other_model: bool = False
    """Use a lens on a model of other fingerprints; this is recorded."""

    def settled(self, lens: Lens, loaded: Callable[[], Model]) -> Lens:
        """Return a lens as it is to be used: on its own model, or on another one."""
        return lens.adopted(loaded()) if self.other_model else lens


@dataclass(frozen=True)
class OtherModelChoice(AnyModelChoice):
    """The model of a lens, or another one."""

    home: bool = False
    """The questions are of the kind that the lens was fitted on. Say so for files of your own, which name no task: without it
    they count as a new task, on which the lens is trusted less and the model's own answer more."""

    def settled(self, lens: Lens, loaded: Callable[[], Model]) -> Lens:
        """Return a lens as it is to be used: on another model, or at home."""
        lens = super().settled(lens, loaded)
        return lens.at_home() if self.home else lens


@dataclass(frozen=True)
class Asking(TaskOptions):
    """Which questions of a source are asked, and after how many worked examples."""

    def gather(
        self, sources: list[str], *, chat: Callable[[], Model] | None = None, own_shots: bool = False
    ) -> list[Question]:
        """Load the questions of all sources, in the chat template of a model if one is given; an id twice is refused.

        With `own_shots`, a file gives its own worked examples unless another is named.
        """
        folder_of_data(self.data_dir)
        if chat:
            chat().needs_chat_template()
        options = replace(self, chat_template=chat().chat_template) if chat else self
        drawn = [replace(options, fewshot_from=self.fewshot_from or (s if own_shots else None)) for s in sources]
        questions = [q for source, of in zip(sources, drawn, strict=True) for q in load_aloud(source, of)]
        seen: set[str] = set()
        for question in questions:
            if question.id in seen:
                raise CoralError(
                    f"The question id {question.id!r} comes twice in {', '.join(sources)}; make ids unique."
                )
            seen.add(question.id)
        return questions


def load_aloud(source: str, options: TaskOptions) -> list[Question]:
    """Load the questions of a source, and of a table say in one line on standard error what was understood."""
    from coral_lens.data.questions import Questions, load_questions

    questions = load_questions(source, options)
    if isinstance(questions, Questions):
        typer.echo(for_terminal(f"{source}: {questions.summary}"), err=True)
    return questions


def folder_of_data(data: str | Path | None) -> Path | None:
    """Return --data, which must be a folder."""
    if data is not None and not Path(data).is_dir():
        raise CoralError(f"--data {data} is not a folder.")
    return Path(data) if data is not None else None


def refuse_address(path: Path, option: str) -> None:
    """Refuse an address where results go to a folder."""
    if is_flattened(path):
        raise CoralError(
            f"{option} must be a folder, and {path} is an address; only stores of states can be at one (`coral extract --out`, "
            "and wherever --store is read)."
        )


def refuse_unwritable(out: str | Path | None) -> None:
    """Refuse a place for results in which nothing can be written, before anything is computed."""
    if out is None or is_url(out):
        return
    out = Path(out)
    # os.path, because a folder that may not be looked into is then simply not there
    place = next(p for p in (out, *out.absolute().parents) if os.path.exists(p))
    if place != out and not os.path.isdir(place):
        raise CoralError(f"--out {out} cannot be written: {place} is a file; choose another place.")
    if not os.access(place, os.W_OK):
        raise CoralError(f"--out {out} cannot be written: permission denied in {place}; choose another place.")


def beside(out: Path) -> Path:
    """Return the folder for intermediate results beside `out`, which must have a name of its own for that."""
    if not out.name or out.name == "..":
        raise CoralError(f"--out {out} has no name of its own; choose a new name inside it.")
    return out.with_name(f"{out.name}.work")


@contextmanager
def work_for(folder: Path, lens: Lens, model: Model, questions: Sequence[Question]) -> Iterator[Path | None]:
    """Yield the folder in which a lens scores many questions, None for few.

    Once the block has ended well, the store in it is deleted, and nothing else.
    """
    from coral_lens.engine.activations import is_store, remove_store
    from coral_lens.engine.extract import is_small

    if is_small(model, questions, lens.extraction) and not is_store(folder):
        yield None
    else:
        yield folder
        remove_store(folder)


@contextmanager
def helpers_on(spread: RaySettings, machine: Machine) -> Iterator[Helpers | None]:
    """Yield who computes states and fits on a cluster while the block runs; None where no cluster is named."""
    if spread.ray is None:
        yield None
        return
    from coral_lens.scale.cluster import connected
    from coral_lens.scale.study import RayHelpers
    from coral_lens.storage.progress import shown

    with connected(spread) as cluster:
        yield RayHelpers(cluster, machine.source, lambda said: typer.echo(for_terminal(said), err=True), shown)
