"""How questions are put to a model, as settings. Light: they are also options of the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from coral_lens.data.columns import parse_columns
from coral_lens.data.templates import compiled, read_template, read_text
from coral_lens.errors import CoralError
from coral_lens.storage.files import digest_bytes
from coral_lens.storage.lines import parse_json
from coral_lens.storage.settings import LATER, NO_OPTION, Count, CountOrZero, Option, Range, Settings

ChatTemplate = Callable[..., str]
"""Renders messages: `template(messages, add_generation_prompt=True)`, as `apply_chat_template` of an lm-eval model."""


@dataclass(frozen=True)
class Style(Settings):
    """How questions that bring no template of their own are put to the model."""

    kind: Annotated[Literal["text", "letters", "p-true"], Option("--style")] = "text"
    """How your own questions are asked. `text`: the texts of the options are scored. `letters`: the options are listed in the
    prompt, and their letters are scored. `p-true`: each option is asked about by itself, whether it is right; several may be."""
    chat: Annotated[bool, Option("--apply-chat-template")] = False
    """Wrap prompts in the model's chat template, as lm-eval's --apply_chat_template does."""
    template: Annotated[str, Option(read=read_template), LATER] = ""
    """A file with a template of your own (Jinja), in place of ours: it puts `question`, `options`, `letters`, `context`,
    `instructions` and the columns of the table into words."""
    system: Annotated[str, Option("--system-prompt", read=read_text), LATER] = ""
    """What is said before everything else, or @FILE."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template:
            compiled(self.template)

    def __str__(self) -> str:
        parts = [self.kind, *(["chat"] if self.chat else [])]
        parts += [f"{name} {digest_bytes(text.encode())[:12]}" for name, text in self.texts.items()]
        return "+".join(parts)

    @property
    def texts(self) -> dict[str, str]:
        """The texts that it brings, by their names."""
        return {name: text for name, text in (("template", self.template), ("system", self.system)) if text}


Asked = Literal["choice", "yes-no", "score"]
"""`records.Kind`, which the command line is told of without loading all that records need."""
KIND_WORDS: dict[str, Asked] = {
    **dict.fromkeys(("choice", "multiple-choice"), "choice"),
    **dict.fromkeys(("yes-no", "yes/no", "predicate", "noul", "true-false", "boolean"), "yes-no"),
    **dict.fromkeys(("score", "scale", "ordinal"), "score"),
}
"""What a kind of question may be called in a table."""


def parse_classes(text: str, option: str = "--classes") -> dict[str, str]:
    """Return the classes of `negative,positive`, or of a JSON file: a list of names, or names with their descriptions."""
    path = Path(text)
    if path.suffix.lower() != ".json":
        return classes_of([name.strip() for name in text.split(",")], option)
    try:
        return classes_of(parse_json(path.read_text("utf-8")), str(path))
    except (OSError, ValueError) as error:
        raise CoralError(f"{option} {text} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def classes_of(given: Any, where: str = "classes") -> dict[str, str]:
    """Return the names of classes with their descriptions, which may be empty; refuse what are no classes."""
    named = dict.fromkeys(given, "") if isinstance(given, list | tuple) else given
    is_text = isinstance(named, Mapping) and all(isinstance(t, str) for pair in named.items() for t in pair)
    if not is_text or len(named) < 2 or len(named) != len(given) or not all(name.strip() for name in named):
        raise CoralError(
            f"{where} must name two or more different classes, as a list or as names with descriptions. Got {given!r}."
        )
    return dict(named)


@dataclass(frozen=True)
class TableOptions(Settings):
    """How a table of your own questions is read."""

    columns: Annotated[Mapping[str, str] | None, Option(read=parse_columns)] = None
    """Which column is what, where their names do not tell: `question=prompt,answer=label`. Several columns of options are
    joined by +; a part without a column (`answer=`) is not there."""
    answer_base: Annotated[int, Range(0, 1)] | None = None
    """Answers that are numbers are counted from 0 or from 1; by default that is found from the answers, or asked."""
    kind: Asked | None = None
    """Kind of questions whose rows do not say it: a `choice`, `yes-no`, or a `score` whose options are levels in their order."""
    classes: Annotated[Mapping[str, str] | None, Option(read=parse_classes)] = None
    """The options of questions that have none: `negative,positive`, or a .json file of names with descriptions."""
    instructions: str | None = None
    """How to decide, or what is asked, for every question that has no instructions of its own."""
    skip_bad: bool = False
    """Leave out rows that cannot be read, and say how many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes is not None:
            object.__setattr__(self, "classes", classes_of(self.classes))


@dataclass(frozen=True)
class SourceOptions(Settings):
    """Which questions of a source are read."""

    limit: Count | None = None
    """At most this many questions of each source, the first ones; of a group or tag of tasks, this many of each task."""
    data_dir: Annotated[Path | str | None, Option("--data")] = None
    """Folder with TASK/SPLIT.jsonl[.gz] or .parquet, looked into before the embedded data and the hub."""
    table: TableOptions = TableOptions()
    """How a table of your own questions is read."""


@dataclass(frozen=True)
class TaskOptions(SourceOptions):
    """How a task is asked. The defaults are lm-eval's."""

    split: Annotated[str | None, NO_OPTION] = None
    """None: the split that lm-eval evaluates, which is test where there is one, else validation."""
    num_fewshot: CountOrZero | None = None
    """Worked examples before each question, as in lm-eval. By default as many as the task itself says, which is nearly always
    0; a task that insists on 0 keeps it."""
    chat_template: Annotated[ChatTemplate | None, NO_OPTION] = None
    """Set to wrap prompts as lm-eval's --apply_chat_template does, shots as turns of their own."""
    fewshot_from: str | Path | None = None
    """File that worked examples of your own questions are drawn from, with their answers; never the question itself. By default
    `fit` draws from the training file."""
    seed: Annotated[int, NO_OPTION] = 1234
    """Of the few-shot sampler; lm-eval's default."""
    fixed_shots: bool = False
    """Give every question the same worked examples, which are then computed once. lm-eval draws new ones for each question."""
    include_path: str | Path | None = None
    """Folder with task definitions of your own (YAML, as lm-eval's --include_path has it)."""
    trust_task_code: bool = False
    """Run the Python functions that definitions in --include-path name; without it such a task is refused."""
