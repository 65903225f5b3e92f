"""Files of one's own as tasks: questions of several files that are fitted together name their file.

Nobody says that two files hold one kind of question, so each is a task of the training, with its own scale and its own check.
Trap: nothing that comes later bears such a name. A file that is predicted names no task, whatever it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from coral_lens.data.open_questions import OpenQuestion
from coral_lens.records import UNNAMED, Question

Own = TypeVar("Own", Question, OpenQuestion)
BEGINNING = f"{UNNAMED} ("
"""With this begins the name of a task that is a file."""


def apart_by_file(questions: Sequence[Own]) -> list[Own]:
    """Return questions of which those that name no task are of the task of their file, where they come from several places.

    Those of one file stay as they are, and so do those that Python made of no file.
    """
    files = [file_of(q) if q.task == UNNAMED else None for q in questions]
    tasks = tasks_of([file for file in files if file is not None])
    pairs = zip(questions, files, strict=True)
    return [q if file is None or file not in tasks else replace(q, task=tasks[file]) for q, file in pairs]


def file_of(question: Question | OpenQuestion) -> str:
    """Return the file that a question was read from; empty where it was not."""
    return getattr(question.table, "file", "")


def tasks_of(files: Sequence[str]) -> dict[str, str]:
    """Return the name of the task that each of several files is; one file has none.

    Folders are nobody's business, so files of one name get numbers.
    """
    places, tasks = list(dict.fromkeys(files)), dict[str, str]()
    for file in places if len(places) > 1 else ():
        name, n = Path(file).name, 1
        while (task := f"{BEGINNING}{name})" if n == 1 else f"{BEGINNING}{name}, {n})") in tasks.values():
            n += 1
        tasks[file] = task if file else UNNAMED
    return tasks


def is_file_task(task: str) -> bool:
    """Whether a training task is a file, so that nothing else is of this task by its name."""
    return task == UNNAMED or task.startswith(BEGINNING)
