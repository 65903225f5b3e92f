"""A study: models, training mixtures, test sets and methods, as a TOML file says them. Only reads and checks; never loads data.

Ready-made studies are in `configs/` beside this file, and are known by their bare names.

name = "mine"
models = ["smollm2"]

[[mixture]]
name = "both"
sources = [{ task = "arc_easy", split = "train", shots = 0 }, { task = "openbookqa", split = "train", n = 500, shots = 0 }]

[[test]]
task = "arc_challenge"
split = "test"
shots = 0

[[method]]
kind = "listwise"
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from coral_lens.errors import CoralError, nearest
from coral_lens.methods.entry import MethodEntry, StudyPart, StudySeed


class Source(StudyPart):
    """Questions of one split of a task, asked in one way."""

    task: str = Field(min_length=1)
    """Name of a task, a group or a tag, or a file of questions."""
    split: str = ""
    """The split, which must be named; a file has none."""
    n: int | None = Field(default=None, ge=1)
    """So many questions, drawn at random under the study's seed; without it, all."""
    shots: int = Field(ge=0)
    """Worked examples before each question (lm-eval's num_fewshot); the same for a task wherever the study uses it."""

    @property
    def label(self) -> str:
        """Task and split, as every table names them."""
        return f"{self.task}:{self.split}" if self.split else self.task


class Mixture(StudyPart):
    """What lenses are fitted and chosen on."""

    name: str = Field(min_length=1)
    sources: tuple[Source, ...] = Field(min_length=1)
    validation: float = Field(default=0.2, gt=0.0, lt=1.0)
    """Share of all questions, by whole groups, that chooses setting, layer and gamma."""
    held_out: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of all questions, by whole groups and the same of every task, that is kept for a test with `rest`."""
    stratified: bool = True
    """Whether every task has the same shares, rounded up in each; otherwise all questions are divided as one."""

    @model_validator(mode="after")
    def _leaves_something(self) -> Mixture:
        if self.validation + self.held_out >= 1.0:
            raise ValueError("validation and held_out together leave nothing to train on")
        return self

    @property
    def validation_of_rest(self) -> float:
        """The share that validates of what is not held out."""
        return self.validation / (1.0 - self.held_out)


ADAPT_MOST = 500
"""Questions that a method may adapt to a test set on, the paper's number."""


class Test(StudyPart):
    """A test set: a source of its own, or what a mixture holds out."""

    name: str = ""
    """How tables call it; by default its task and split."""
    task: str = ""
    split: str = ""
    n: int | None = Field(default=None, ge=1)
    shots: int | None = Field(default=None, ge=0)
    rest: str = ""
    """Name of the mixture whose held-out questions are tested, one test set for each of its sources."""
    apart: bool = False
    """Whether it stands in tables and never in a mean: a task beside those that are summed up."""
    adapt: str = ""
    """Split of the same task on which a method may adapt to it, if it has a form that does; a row of its own shows that form."""

    @model_validator(mode="after")
    def _is_one_of_two(self) -> Test:
        if bool(self.task) == bool(self.rest):
            raise ValueError("a test has either a task or the name of a mixture as rest")
        if self.rest and (self.split or self.n is not None or self.shots is not None):
            raise ValueError("a test with rest takes split, n and shots from its mixture")
        if self.rest and self.adapt:
            raise ValueError("a test with rest has no split to adapt on")
        if self.task and self.shots is None:
            raise ValueError("shots is missing: say how many worked examples precede each question, 0 for none")
        return self

    @property
    def source(self) -> Source:
        """The questions of a test with a task."""
        assert self.task, "a test with rest has no source of its own"
        return Source(task=self.task, split=self.split, n=self.n, shots=self.shots or 0)

    @property
    def adaptation(self) -> Source | None:
        """The questions that a method may adapt on."""
        return Source(task=self.task, split=self.adapt, n=ADAPT_MOST, shots=self.shots or 0) if self.adapt else None


class Study(StudyPart):
    """Everything that `coral run` needs to know but where data and results are."""

    name: str = Field(pattern=r"^[\w][\w.-]*$", max_length=100)
    """Also the folder that results go to."""
    models: tuple[str, ...] = Field(min_length=1)
    """Hub ids, local folders, .gguf files, or `smollm2`."""
    seed: StudySeed = 0
    """Of the samples and of what mixtures hold out."""
    seeds: tuple[StudySeed, ...] = Field(default=(0,), min_length=1)
    """Each method is fitted under each; tables show the first, and the spread over all."""
    base: Literal["sum", "token", "char", "pmi"] = "token"
    """Score whose softmax is the base probability."""
    style: Literal["text", "letters"] = "text"
    """How questions from files are asked; tasks bring their own prompts."""
    chat: bool = False
    """Whether the model's chat template is wrapped around prompts."""
    fixed_shots: bool = False
    """The same worked examples for every question of a task: faster. lm-eval draws new ones for each."""
    zero_shot: bool = True
    """Whether tables of tests with shots have one more row: the unsteered model on the same questions without them."""
    layers: tuple[int, ...] | None = None
    """Layers to keep and to try; without it, all."""
    read: tuple[Literal["answer", "listed", "context"], ...] = ("answer",)
    """Where states are read: at options' own tokens, at their texts where prompts list them, at the last token before them."""
    neutral: bool = False
    """Whether options are scored after a neutral context too; the base `pmi` needs that, and has it done."""

    @property
    def scores_neutral(self) -> bool:
        """Whether options are scored after a neutral context too."""
        return self.neutral or self.base == "pmi"

    mixture: tuple[Mixture, ...] = Field(min_length=1)
    test: tuple[Test, ...] = Field(min_length=1)
    guard: tuple[Source, ...] = ()
    """More questions that must not be trained on, though this study does not test on them."""
    method: tuple[MethodEntry, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_are_unique(self) -> Study:
        for things, names in {
            "models": self.models,
            "seeds": self.seeds,
            "mixtures": [m.name for m in self.mixture],
            "methods": [m.row for m in self.method],
        }.items():
            twice = next((n for n in names if list(names).count(n) > 1), None)
            if twice is not None:
                raise ValueError(f"two {things} are called {twice!r}; names must differ")
        return self

    def mixture_named(self, name: str) -> Mixture:
        """Return a mixture by its name."""
        mixture = next((m for m in self.mixture if m.name == name), None)
        if mixture is None:
            known = [m.name for m in self.mixture]
            raise CoralError(
                f"Study {self.name!r} has no mixture called {name!r}, whose rest it would test.{nearest(name, known)} "
                f"Its mixtures: {', '.join(known)}."
            )
        return mixture

    @property
    def sources(self) -> list[Source]:
        """Every source that the study names, each once."""
        trained = chain.from_iterable(m.sources for m in self.mixture)
        return list(dict.fromkeys([*trained, *self.tested, *self.adapted, *self.guard]))

    @property
    def tested(self) -> list[Source]:
        """The sources of tests that do not test a rest."""
        return [t.source for t in self.test if t.task]

    @property
    def adapted(self) -> list[Source]:
        """The sources that methods may adapt on."""
        return [t.adaptation for t in self.test if t.adaptation]


PARTS: dict[str, type[StudyPart]] = {
    "mixture": Mixture,
    "sources": Source,
    "test": Test,
    "guard": Source,
    "method": MethodEntry,
}


READY_MADE = Path(__file__).parent / "configs"


def ready_made() -> dict[str, str]:
    """Return the ready-made studies by name, each with the line that says what it is."""
    paths = sorted(READY_MADE.glob("*.toml"), key=lambda path: path.stem)
    return {path.stem: path.read_text("utf-8").partition("\n")[0].removeprefix("# ") for path in paths}


def study_path(source: str | Path) -> Path:
    """Return the file of a study: a path as it is, and a bare name that is no file as a ready-made study."""
    path, name = Path(source), str(source)
    # a folder of that name is where the results of an earlier run are
    if path.suffix == ".toml" or path.name != name or path.is_file():
        return path
    known = ready_made()
    if name not in known:
        raise CoralError(
            f"There is no study called {name!r}.{nearest(name, known)} `coral run --list` lists the ready-made ones; the file of "
            "another one must exist or end in .toml."
        )
    return READY_MADE / f"{name}.toml"


def load_study(source: str | Path) -> Study:
    """Read a study from a file, or a ready-made one by its name; an error is one sentence that says what is wrong, and where."""
    path = study_path(source)
    try:
        text = path.read_bytes().decode("utf-8")
        content = frozen(tomllib.loads(text))  # arrays become tuples, which strict mode would refuse
    except FileNotFoundError:
        raise CoralError(f"There is no study {path}; `coral run --list` lists the ready-made ones.") from None
    except tomllib.TOMLDecodeError as error:
        raise CoralError(f"{path} is not valid TOML: {error}.") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, a path with a null character, a number too long
        raise CoralError(f"{path} cannot be read: {error}.") from None
    except RecursionError:
        raise CoralError(f"{path} is not valid TOML for a study: it is nested too deep.") from None
    try:
        return Study.model_validate(content)
    except ValidationError as error:
        raise CoralError(f"{path}{complaint(error, text)}") from None


def study_of(content: dict[str, Any]) -> Study:
    """Return the study that a command line describes; what is wrong with it is one sentence."""
    try:
        return Study.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise CoralError(f"{', '.join(places(first['loc']))}: {first['msg'].removeprefix('Value error, ')}.") from None


def frozen(value: Any) -> Any:
    """Return a value with tuples in place of lists, however deep."""
    if isinstance(value, dict):
        return {k: frozen(v) for k, v in value.items()}
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def complaint(error: ValidationError, text: str) -> str:
    """Say where in the file what is wrong: `, line 7 (mixture 1, sources 2): there is no key 'spilt'. Did you mean ...`"""
    complaints = error.errors(include_url=False, include_input=False)
    # a misspelt key is both unknown and missing: name the spelling
    first = min(complaints, key=lambda e: e["type"] != "extra_forbidden")
    place = list(first["loc"])
    unknown, missing = first["type"] == "extra_forbidden", first["type"] == "missing"
    key = str(place.pop()) if (unknown or missing) else ""
    where = ", ".join(places(place))
    spot = line_of(key or next((str(p) for p in reversed(place) if isinstance(p, str)), ""), text)
    head = f", line {spot}" if spot and not missing else ""
    head += f" ({where})" if where else ""
    if unknown:
        return f"{head}: there is no key {key!r} here.{nearest(key, known_keys(place))} Known: {', '.join(known_keys(place))}."
    if missing:
        return f"{head}: the key {key!r} is missing."
    return f"{head}: {first['msg'].removeprefix('Value error, ')}."


def places(loc: Sequence[int | str]) -> Iterator[str]:
    """Yield a place in the file as people count: `mixture 1`, `sources 2`, `n`."""
    for i, part in enumerate(loc):
        if isinstance(part, str):
            number = loc[i + 1] if i + 1 < len(loc) else None
            yield f"{part} {number + 1}" if isinstance(number, int) else part


def known_keys(loc: Sequence[int | str]) -> list[str]:
    """Return the keys that a place in the file may have."""
    inner = next((part for part in reversed(loc) if part in PARTS), None)
    return list((PARTS[str(inner)] if inner else Study).model_fields)


def line_of(key: str, text: str) -> int | None:
    """Return the line in which a key stands, if there is only one."""
    lines = [
        i for i, line in enumerate(text.splitlines(), 1) if re.search(rf"(?<![\w-])\"?{re.escape(key)}\"?\s*=", line)
    ]
    return lines[0] if len(lines) == 1 and key else None
