"""`make torture`: all faults, as many as wanted, and a table of how they ended. It exits with 1 if any ended wrongly.

python -m faults                      everything
python -m faults kills questions=50   some of it; a number says how many
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from faults import damage, disks, inputs, kills, lenses, pages
from faults.outcomes import Tally, table
from faults.workshop import Workshop, command_of, quiet

MANY = {
    "kills": 10**9,
    "sigkill": 8,
    "damage": 1,
    "disks": 12,
    "signals": 3,
    "questions": 2000,
    "studies": 400,
    "names": 100,
    "logs": 300,
    "lines": 400,
    "lenses": 200,
    "pages": 1,
}
"""How many of each are tried by hand: of kills at most so many a command, so all; of damage so many bytes a kind of file."""


def parts(shop: Workshop, home: Path, n: dict[str, int]) -> dict[str, Callable[[], list[Tally]]]:
    """Return the parts of the suite but for the kills, by name."""
    extract, fit = shop.steps[0], shop.steps[1]
    return {
        "sigkill": lambda: [kills.real(shop, step, renames=list(range(n["sigkill"]))) for step in (extract, fit)],
        "damage": lambda: [t for seed in range(n["damage"]) for t in damage.damage_all(shop, seed=seed)],
        "disks": lambda: [
            disks.full_disks(shop, shop.steps, rooms=list(range(n["disks"])), sizes=[2**k for k in range(8, 15)])
        ],
        "signals": lambda: [disks.signals(shop, extract, names=list(disks.ASKED)[: n["signals"]])],
        "questions": lambda: [inputs.hostile_questions(home, n["questions"])],
        "studies": lambda: [inputs.hostile_studies(shop, n["studies"])],
        "names": lambda: [inputs.hostile_names(shop, n["names"])],
        "logs": lambda: [inputs.hostile_logs(home, n["logs"])],
        "lines": lambda: [inputs.hostile_lines(shop, n["lines"], command_of)],
        "lenses": lambda: [lenses.hostile_lenses(fit.after / "lens", fit.after, home, n["lenses"])],
        "pages": lambda: [pages.open_in_browser(home)],
    }


def chosen(arguments: list[str]) -> dict[str, int]:
    """Return how many of each part are tried; a part that is not named is left out, unless none is."""
    named = dict(argument.partition("=")[::2] for argument in arguments)
    if unknown := named.keys() - MANY.keys():
        sys.exit(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(MANY)}")
    return {name: int(named.get(name) or many) for name, many in MANY.items() if not named or name in named}


def main() -> int:
    """Run what is asked for."""
    asked, tallies = chosen(sys.argv[1:]), list[Tally]()
    with quiet(), tempfile.TemporaryDirectory(prefix="torture-") as temporary:
        home = Path(temporary)
        if "kills" in asked:
            most = asked["kills"] if asked["kills"] < MANY["kills"] else None
            shop, found = kills.kill_all(home / "kills", kills.Recorder(), large=True, most=most)
            tallies += found
        else:
            shop = Workshop.make(home / "shop", large=len(asked) == len(MANY))
        for name, run in parts(shop, home, MANY | asked).items():
            if name in asked:
                tallies += run()
    for line in (line for tally in tallies for line in tally.wrong):
        print(line)
    print(table(tallies))
    return int(any(tally.wrong for tally in tallies))


if __name__ == "__main__":
    sys.exit(main())
