"""A folder in which every command has run once: the undisturbed results that all faults are compared with.

The commands are those of the command line: `LINES` has one for each that works for long, `WITHOUT_WORK` says of each other one
why a kill costs nothing. Which file a command writes, and which command reads it, is found by running them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from support.studies import study_text
from typer.main import get_command

from coral_lens.cli import app
from coral_lens.report.figures.style import Picture
from faults.outcomes import Outcome, coral

GOLDEN = Path(__file__).parents[1] / "golden"
LINES = """
extract train.jsonl --model model --heads all --out store
fit --model model --train train.jsonl --out lens
calibrate --lens lens --questions more.jsonl
eval --lens lens --task test.jsonl --out run
eval --lens lens --task test.jsonl --out other
predict --lens lens --questions test.jsonl --out answers.jsonl
report run other --out compared
analyse confidence run
analyse layers --store store --out analysis
analyse dimensions --store store --out analysis
analyse heads --store store --out analysis
analyse data --store store --out analysis --draws 1 --layers 1
analyse probes --store store --out analysis --seeds 1 --layers 1 --grid-depth 0
baseline isotonic --model model --train train.jsonl --task test.jsonl --out base
sae train train.jsonl --model model --layer 2 --expansion 4 --batch-size 64 --massive 0 --out sae
sae select train.jsonl --model model --sae sae/4x --out features --k 5
sae ablate more.jsonl --limit 30 --study features --features 3 --random 2
sae steer --study features --validation more.jsonl --test test.jsonl
sae report features
run study.toml --out study --work states
fit --model model --train train.jsonl --out lens --lens ridge
"""
"""The commands in their order; the last one replaces a lens."""

WITHOUT_WORK = {
    "push": "sends to the hub what is on the disk",
    "lm-eval": "is lm-eval's own command line",
    "demo": "is `fit` and `eval` on the embedded data",
    "doctor": "writes nothing",
    "tasks": "writes nothing",
    "show": "writes nothing",
    "cache list": "writes nothing",
    "cache clear": "removes what is kept; what it has not removed is removed by the next one",
    "assets": "fetches from the network; tests/data/test_assets.py interrupts it",
}
"""The other commands, and why they are not among the lines above."""

TIMED = ("*cost.json", "*costs.json", "*costs.md", "study/report.html", "cache/*")
"""Files that hold seconds, which no two runs have in common."""
ROWS = "analysis.work/*.jsonl"
"""Journals in which a row is found by its key: one that is made again stands last, and the results are the same."""
DRAWN = {"png": lambda self: b"\x89PNG", "svg": lambda self: "<svg></svg>"}


def paths_of(command: Any, *above: str) -> list[str]:
    """Return every command that does something, by the words that call it."""
    inner = getattr(command, "commands", {}) or {}
    return [p for name, one in inner.items() for p in paths_of(one, *above, name)] or [" ".join(above)]


ALL_COMMANDS = paths_of(get_command(app))


def command_of(line: str) -> str:
    """Return the command of a line, without its arguments."""
    return next(c for c in sorted(ALL_COMMANDS, key=len, reverse=True) if f"{line} ".startswith(f"{c} "))


def lines_of() -> list[str]:
    """Return the lines of all commands."""
    return LINES.strip().splitlines()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Draw no figures, compute on one thread, and keep out of the user's cache."""
    n_threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for name, drawn in DRAWN.items():
            patch.setattr(Picture, name, drawn)
        patch.setenv("CORAL_CACHE", "cache")
        torch.set_num_threads(1)
        yield
    torch.set_num_threads(n_threads)


def furnish(folder: Path, *, large: bool) -> Path:
    """Put the inputs of all commands into a new folder."""
    folder.mkdir(parents=True)
    (folder / "model").symlink_to(GOLDEN / "model")
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(GOLDEN / name, folder)
    rows = [
        {"id": f"m{i}", "question": f"{i}: which?", "options": [f"red {i}", "green", "blue"], "answer": i % 2}
        for i in range(60)
    ]
    (folder / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (folder / "study.toml").write_text(study_text(keeping=large, sae="sae/4x"), "utf-8")
    return folder


def copied(source: Path, target: Path) -> Path:
    """Copy a folder with its links."""
    return Path(shutil.copytree(source, target, symlinks=True))


def content(folder: Path) -> dict[str, bytes]:
    """Return every file that counts: neither locks nor what holds seconds."""
    found = {}
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(place) / name
            key = path.relative_to(folder).as_posix()
            if not name.endswith(".lock") and not any(fnmatchcase(key, pattern) for pattern in TIMED):
                data = path.read_bytes()
                found[key] = b"".join(sorted(data.splitlines(keepends=True))) if fnmatchcase(key, ROWS) else data
    return found


def difference(found: dict[str, bytes], wanted: dict[str, bytes]) -> str:
    """Say in which files two folders differ; empty if in none."""
    changed = [f"{name} differs" for name in sorted(found.keys() & wanted.keys()) if found[name] != wanted[name]]
    more = [f"{name} is new" for name in sorted(found.keys() - wanted.keys())]
    return ", ".join([*changed, *more, *(f"{name} is missing" for name in sorted(wanted.keys() - found.keys()))])


@dataclass(frozen=True)
class Step:
    """One command of the workshop: what was there before, and what is there after."""

    number: int
    line: str
    before: Path
    after: Path
    said: str

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.line)

    @cached_property
    def result(self) -> dict[str, bytes]:
        """Every file that is there after it."""
        return content(self.after)

    @cached_property
    def written(self) -> dict[str, bytes]:
        """The files that it made or changed."""
        before = content(self.before)
        return {name: data for name, data in self.result.items() if before.get(name) != data}

    def reads(self, name: str) -> bool:
        """Whether its line names the folder of a file."""
        top = re.escape(name.split("/")[0])
        return re.search(rf"(?<![\w.-]){top}(?![\w.-])", self.line) is not None


@dataclass
class Workshop:
    """Every command, undisturbed."""

    home: Path
    steps: list[Step] = field(default_factory=list)

    @staticmethod
    def make(home: Path, *, large: bool = False, around: Callable[[str, Path], Any] | None = None) -> Workshop:
        """Run the commands one after another; `around` gives a context for each."""
        shop, folder = Workshop(home), furnish(home / "now", large=large)
        before = copied(folder, home / "at-0")
        for number, line in enumerate(lines_of(), start=1):
            with around(line, folder) if around else contextlib.nullcontext():
                outcome = coral(folder, *shlex.split(line))
            assert outcome.code == 0, f"{line}\n{outcome.err}"
            after = copied(folder, home / f"at-{number}")
            shop.steps.append(Step(number, line, before, after, outcome.out))
            before = after
        return shop

    def bench(self, source: Path) -> Path:
        """Lay a copy where the commands ran: some results name the folder of what they were made of."""
        shutil.rmtree(self.home / "now", ignore_errors=True)
        return copied(source, self.home / "now")

    def again(self, step: Step, folder: Path) -> tuple[Outcome, str]:
        """Run a command in a folder; return how it ended and what differs from the undisturbed run."""
        outcome = coral(folder, *step.arguments)
        return outcome, difference(content(folder), step.result)
