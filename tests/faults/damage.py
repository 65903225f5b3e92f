"""Damaged files: a byte flipped, the end cut off, nothing left, or the file gone, for every kind of file that commands write.

The kinds are found from what the commands wrote. Two things are asked of each damage. The command that wrote the file, run
again, leaves what an undisturbed run leaves, or says one sentence. A command that reads the file says one sentence, or its own
results are those of an undisturbed run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from support.commands import files_on_the_page

from faults.outcomes import Tally
from faults.workshop import Step, Workshop, content, difference


def flip(path: Path, rng: random.Random) -> None:
    """Change one byte."""
    data = bytearray(path.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= rng.randint(1, 255)
    path.write_bytes(data)


def change_digit(path: Path, rng: random.Random) -> None:
    """Change one digit to another: what stays a readable file."""
    data = bytearray(path.read_bytes())
    digits = [i for i, byte in enumerate(data) if byte in b"0123456789"]
    if digits:
        at = rng.choice(digits)
        data[at] = ord(str((int(chr(data[at])) + rng.randint(1, 9)) % 10))
    path.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    """Keep only the beginning."""
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(max(len(data), 1))])


def empty(path: Path, _: random.Random) -> None:
    """Leave nothing in the file."""
    path.write_bytes(b"")


def remove(path: Path, _: random.Random) -> None:
    """Delete the file."""
    path.unlink()


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "flipped": flip,
    "digit changed": change_digit,
    "truncated": truncate,
    "emptied": empty,
    "missing": remove,
}


@cache
def patterns() -> list[str]:
    """Return the files that the reference names; tests/end_to_end/test_files.py checks it."""
    return list(files_on_the_page())


def kind_of(name: str) -> str:
    """Return the kind of a file: its pattern in the reference, with its ending, or its name without numbers and digests."""
    pattern = next((p for p in patterns() if fnmatchcase(name, p)), None)
    ending = "" if name.endswith(".work") else Path(name).suffix
    return f"{pattern} {ending}".strip() if pattern else re.sub(r"[0-9a-f]{8,}|\d+", "N", name)


TWICE = ("other/", "base/", "base.work/")
"""Folders whose files are of the same kinds as those of `run`, `study` and `states`, and are written by the same code."""

UNREAD = ("states/",)
"""The work of a study, which a finished one does not read again: what is damaged there may stay, but changes nothing."""


CARD_KEPT = "was edited, so it is kept"
"""What is said of a card that is not as it was written: whoever changed it may have meant to."""
OPTIONAL = ("features/steering.json",)
"""What a further command adds to a folder: without it, the folder is that of somebody who has not run that command."""


def kinds(shop: Workshop) -> dict[str, tuple[Step, str]]:
    """Return a file of each kind, with the last command that wrote it."""
    found: dict[str, tuple[Step, str]] = {}
    for step in shop.steps:
        files = [name for name in step.written if (step.after / name).is_file() and not name.startswith(TWICE)]
        found |= {kind_of(name): (step, name) for name in files}
    return found


def damaged_again(shop: Workshop, step: Step, name: str, rng: random.Random) -> Iterator[tuple[str, Tally]]:
    """Damage one file in each way, and run the command that wrote it."""
    for damage, harm in DAMAGES.items():
        tally, folder = Tally(f"{damage}, written again"), shop.bench(step.after)
        harm(folder / name, rng)
        if harmed(folder / name, step.after / name):
            outcome, last = shop.through(step, folder)
            changed = difference(content(folder), last.result)
            if name.startswith(UNREAD):
                changed = difference(without(name, content(folder)), without(name, last.result))
            case = f"{name} {damage}, then `{step.line}`"
            if outcome.code == 0 and name.endswith("README.md") and CARD_KEPT in " ".join(outcome.err.split()):
                tally.add(case, "one sentence")
            else:
                tally.judge(case, outcome, difference=changed)
        yield damage, tally


def without(name: str, files: dict[str, bytes]) -> dict[str, bytes]:
    """Return all files but one."""
    return {n: data for n, data in files.items() if n != name}


def damaged_read(shop: Workshop, reader: Step, name: str, rng: random.Random) -> Iterator[tuple[str, Tally]]:
    """Damage one file in each way, and run a command that reads it, as if for the first time."""
    for damage, harm in DAMAGES.items():
        if damage == "missing" and name in OPTIONAL:
            continue
        tally, folder = Tally(f"{damage}, read"), shop.bench(reader.before)
        harm(folder / name, rng)
        if harmed(folder / name, reader.before / name):
            outcome, last = shop.through(reader, folder)
            wanted = {n: data for n, data in last.result.items() if n in reader.written or n in last.written}
            found = {n: data for n, data in content(folder).items() if n in wanted}
            tally.judge(f"{name} {damage}, then `{reader.line}`", outcome, difference=difference(found, wanted))
        yield damage, tally


def harmed(path: Path, whole: Path) -> bool:
    """Whether damage changed anything: an empty file cannot be emptied."""
    return not path.exists() or path.read_bytes() != whole.read_bytes()


def damage_all(shop: Workshop, *, only: Callable[[str], bool] = lambda _: True, seed: int = 0) -> list[Tally]:
    """Damage a file of each kind in each way; `only` says of which kinds."""
    rng, tallies = random.Random(seed), {}
    for kind, (step, name) in sorted(kinds(shop).items()):
        if not only(kind):
            continue
        ends = [*damaged_again(shop, step, name, rng)]
        later = [s for s in shop.steps if s.number > step.number and s.reads(name) and (s.before / name).exists()]
        for reader in later[:3]:
            ends += damaged_read(shop, reader, name, rng)
        for _, tally in ends:
            total = tallies.setdefault(tally.what, Tally(tally.what))
            for end, n in tally.counts.items():
                total.counts[end] += n
            total.wrong += tally.wrong
    return list(tallies.values())
