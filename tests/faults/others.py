"""Other people's files: a file that a command would write is there already, and is not ours. It stays as it is.

Which files those are is found from what the command wrote. Where a command goes on, as one that does without the file, its
own results do not matter here.
"""

from __future__ import annotations

import re

from faults.outcomes import Outcome, Tally, coral
from faults.workshop import Step, Workshop

MINE = b"Years of work that nobody else has.\n"
NOBODYS = r"[0-9a-f]{8,}|/\d+-\d+x\.safetensors$"
"""Names that nobody gives: with a digest in them, or with the number of a step."""


def plantable(step: Step) -> list[str]:
    """Return the files that a command makes new."""
    files = [name for name in step.written if (step.after / name).is_file() and not name.startswith("cache/")]
    new = [name for name in files if not (step.before / name).exists()]
    return [name for name in new if not re.search(NOBODYS, name)]


def planted(shop: Workshop, step: Step, name: str) -> tuple[Outcome, str]:
    """Put a file of somebody else where a command would write its own, and run it; say what became of the file."""
    path = shop.bench(step.before) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(MINE)
    outcome = coral(shop.place, *step.arguments)
    if not path.is_file():
        return outcome, f"{name} is gone"
    return outcome, "" if path.read_bytes() == MINE else f"{name} was replaced"


def other_peoples_files(shop: Workshop, *, most: int) -> Tally:
    """Plant the files that every command makes, one at a time, at most so many of each command."""
    tally = Tally("files of others")
    ours = {later.number for step in shop.steps for later in shop.finishing(step)}
    for step in shop.steps:
        # a folder that a part has begun is ours, and what is wrong in it is mended
        names = [] if step.number in ours else plantable(step)
        for name in names[:: max(1, len(names) // most)][:most]:
            outcome, harm = planted(shop, step, name)
            if harm:  # however it ended
                outcome = Outcome(0, outcome.out, outcome.err)
            tally.judge(f"{name} of somebody else, then `{step.line}`", outcome, difference=harm)
    return tally
