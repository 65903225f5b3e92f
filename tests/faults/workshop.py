"""A folder in which every command has run once: the undisturbed results that all faults are compared with.

The commands are the lines of `support.commands`. Which file a command writes, and which command reads it, is found by running
them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from support.commands import LINES, furnish

from coral_lens.storage.shards import Journal, damaged_tensors, shard_path
from faults.outcomes import Outcome, coral

TIMED = ("*cost.json", "*costs.json", "*costs.md", "study/report.html", "cache/*")
"""Files that hold seconds, which no two runs have in common."""
ROWS = "analysis.work/*.jsonl"
"""Journals in which a row is found by its key: one that is made again stands last, and the results are the same."""
PARTS = "journal-*-of-*"
"""Journals of processes that fill one store, which have random names; what all of them say together is compared."""


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
        if any(fnmatchcase(name, PARTS) for name in names):
            found[(Path(place) / PARTS).relative_to(folder).as_posix()] = shards_in(Path(place))
    return found


def shards_in(store: Path) -> bytes:
    """Return the numbers of the shards that are known to be whole."""
    known = Journal(store).entries.items()
    return repr(sorted(n for n, digests in known if not damaged_tensors(shard_path(store, n), digests))).encode()


def is_random(name: str) -> bool:
    """Tell whether a file has another name at every run."""
    return fnmatchcase(name, f"*/{PARTS}-*")


def difference(found: dict[str, bytes], wanted: dict[str, bytes]) -> str:
    """Say in which files two folders differ; empty if in none."""
    found, wanted = ({n: data for n, data in files.items() if not is_random(n)} for files in (found, wanted))
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

    @property
    def is_part(self) -> bool:
        """Whether it does a part of what a later command finishes."""
        return "--part" in self.arguments

    @property
    def out(self) -> str:
        """Where it writes to; empty where the line does not say so."""
        words = [*self.arguments, ""]
        return words[words.index("--out") + 1] if "--out" in words else ""

    def reads(self, name: str) -> bool:
        """Whether its line names the folder of a file."""
        top = re.escape(name.split("/")[0])
        return re.search(rf"(?<![\w.-]){top}(?![\w.-])", self.line) is not None


@dataclass
class Workshop:
    """Every command, undisturbed."""

    home: Path
    """Where everything is kept."""
    place: Path
    """Where commands run."""
    steps: list[Step]

    @staticmethod
    def found(home: Path) -> Workshop:
        """Return the workshop that was made in a folder."""
        places = [home / f"at-{number}" for number in range(len(LINES) + 1)]
        steps = [Step(n, line, places[n - 1], places[n]) for n, line in enumerate(LINES, start=1)]
        return Workshop(home, home / "now", steps)

    @staticmethod
    def make(home: Path, *, large: bool = False, around: Callable[[Step, Path], Any] | None = None) -> Workshop:
        """Run the commands one after another; `around` gives a context for each."""
        shop = Workshop.found(home)
        copied(furnish(shop.place, large=large), home / "at-0")
        for step in shop.steps:
            with around(step, shop.place) if around else contextlib.nullcontext():
                outcome = coral(shop.place, *step.arguments)
            assert outcome.code == 0, f"{step.line}\n{outcome.err}"
            copied(shop.place, step.after)
        return shop

    def with_bench(self, place: Path) -> Workshop:
        """Return the same with another place to work in, for what does not compare results."""
        return Workshop(self.home, place, self.steps)

    def bench(self, source: Path) -> Path:
        """Lay a copy where the commands ran: some results name the folder of what they were made of."""
        shutil.rmtree(self.place, ignore_errors=True)
        return copied(source, self.place)

    def again(self, step: Step, folder: Path) -> tuple[Outcome, str]:
        """Run a command in a folder; return how it ended and what differs from the undisturbed run."""
        outcome = coral(folder, *step.arguments)
        return outcome, difference(content(folder), step.result)

    def finishing(self, step: Step) -> list[Step]:
        """Return the commands that finish what a part has begun, in their order; none for any other command."""
        later = [s for s in self.steps[step.number :] if step.is_part and s.out == step.out]
        n_parts = next((i for i, s in enumerate(later) if not s.is_part), -1)
        return later[: n_parts + 1]

    def through(self, step: Step, folder: Path) -> tuple[Outcome, Step]:
        """Run a command in a folder, and what finishes its work: what others did is looked at only then. Return the last end."""
        for one in (step, *self.finishing(step)):
            outcome = coral(folder, *one.arguments)
            if outcome.code != 0:
                break
        return outcome, one
