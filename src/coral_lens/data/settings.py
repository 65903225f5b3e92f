"""How questions are put to a model, as settings. Light: they are also options of the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from coral_lens.storage.settings import NO_OPTION, Count, CountOrZero, Option, Settings

ChatTemplate = Callable[..., str]
"""Renders messages: `template(messages, add_generation_prompt=True)`, as `apply_chat_template` of an lm-eval model."""


@dataclass(frozen=True)
class Style(Settings):
    """How questions that bring no template of their own are put to the model."""

    kind: Annotated[Literal["text", "letters"], Option("--style")] = "text"
    """How your own questions are asked. `text`: the texts of the options are scored. `letters`: the options are listed in the
    prompt, and their letters are scored."""
    chat: Annotated[bool, Option("--apply-chat-template")] = False
    """Wrap prompts in the model's chat template, as lm-eval's --apply_chat_template does."""

    def __str__(self) -> str:
        return f"{self.kind}+chat" if self.chat else self.kind


@dataclass(frozen=True)
class SourceOptions(Settings):
    """Which questions of a source are read."""

    limit: Count | None = None
    """At most so many questions of each source, the first ones; of a group or tag, so many of each of its tasks."""
    data_dir: Annotated[Path | str | None, Option("--data")] = None
    """Folder with TASK/SPLIT.jsonl[.gz] or .parquet, looked into before the embedded data and the hub."""


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
    seed: Annotated[int, NO_OPTION] = 1234
    """Of the few-shot sampler; lm-eval's default."""
    fixed_shots: bool = False
    """Give every question the same worked examples, which are then computed once. lm-eval draws new ones for each question."""
