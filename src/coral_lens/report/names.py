"""What people call tasks and methods. Only pages, figures and the terminal say these names: files keep the exact ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

TASKS = {
    "arc_challenge": "ARC-Challenge",
    "arc_easy": "ARC-Easy",
    "commonsense_qa": "CommonsenseQA",
    "commonsense_qa_cloze": "CommonsenseQA",
    "copa": "COPA",
    "hellaswag": "HellaSwag",
    "math_mc": "Math-MC",
    "mathqa": "MathQA",
    "mmlu": "MMLU",
    "mmlu_continuation": "MMLU",
    "openbookqa": "OpenBookQA",
    "piqa": "PIQA",
    "race": "RACE",
    "race_question": "RACE",
    "sciq": "SciQ",
    "social_iqa": "Social IQa",
    "winogrande": "WinoGrande",
}
"""Well-known tasks under the names that their papers gave them."""
METHODS = {"coral": "CORAL", "coral ridge": "CORAL ridge"}
"""Methods whose name is written in another way than in files."""
_FILE = re.compile(r".*[/\\]([^/\\]+)$")
_HELD_OUT = re.compile(r"(.+) held out of .+")
_NAMED = re.compile(r"(.+) \(([^()]*)\)")
_SOURCE = re.compile(r"[\w./\\-]+:[\w-]+( held out of .+)?|.+\.(jsonl|csv)(\.gz)?( held out of .+)?")


def method_name(method: str) -> str:
    """Return a method's name for people; one of two runs keeps its run's name in front."""
    run, colon, plain = method.rpartition(": ")
    return f"{run}{colon}{METHODS.get(plain, plain)}"


def task_name(exact: str) -> str:
    """Return the name of a test set: `arc_easy:validation` is ARC-Easy, a file its last name, `mine (arc_easy:test)` mine."""
    if held_out := _HELD_OUT.fullmatch(exact):
        return task_name(held_out[1])
    if named := _NAMED.fullmatch(exact):
        own, inside = named.groups()
        return str(own) if _SOURCE.fullmatch(inside) else f"{task_name(own)} ({inside})"
    if file := _FILE.fullmatch(exact):
        return file[1]
    task = exact.partition(":")[0]
    if task in TASKS:
        return TASKS[task]
    family, _, subject = task.partition("_")
    return f"{TASKS[family]}, {subject.replace('_', ' ')}" if family == "mmlu" and subject else exact


def task_names(exact: Iterable[str]) -> dict[str, str]:
    """Return a name for each test set, and no name twice: two of one name have their split or, failing that, all of it."""
    plain = {name: task_name(name) for name in exact}
    alike = Counter(plain.values())
    longer = {name: with_split(name) if alike[said] > 1 else said for name, said in plain.items()}
    alike = Counter(longer.values())
    return {name: f"{plain[name]} ({name})" if alike[said] > 1 else said for name, said in longer.items()}


def last_parts(path: str, n: int) -> str:
    """Return the last n parts of a name; all of it, as it is, where it has no more."""
    parts = [part for part in path.split("/") if part]
    return "/".join(parts[-n:]) if n < len(parts) else path


def last_part(path: str) -> str:
    """Return what a folder is called, without where it is."""
    return last_parts(path, 1)


def told_apart(paths: Sequence[str], name: Callable[[str], str]) -> dict[str, str]:
    """Return the name of each path, and no name twice: those of one name keep as many folders as tell them apart."""
    names = {path: name(path) for path in paths}
    for alike in [one for one, n in Counter(names.values()).items() if n > 1]:
        same = [path for path in names if names[path] == alike]
        longest = max(path.count("/") for path in same) + 2
        depth = next(
            n for n in range(2, longest + 1) if n == longest or len({last_parts(p, n) for p in same}) == len(same)
        )
        names |= {path: last_parts(path, depth) for path in same}
    return names


def with_split(exact: str) -> str:
    """Return `ARC-Easy, validation`; what names no split is told apart by its whole name."""
    _, colon, split = exact.partition(":")
    return f"{task_name(exact)}, {split}" if colon else f"{task_name(exact)} ({exact})"
