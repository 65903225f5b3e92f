"""`make torture`: all faults, as many as wanted, and a table of how they ended. It exits with 1 if any ended wrongly.

python -m faults                      everything
python -m faults kills questions=50   some of it; a number says how many

What is wrong is said as soon as it is seen, and each part when it is done: all of it takes hours.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from support.commands import quiet

from faults import cluster, damage, disks, inputs, kills, lenses, lines, others, pages, sharing
from faults.hostile import TEXTS
from faults.outcomes import Tally, table
from faults.workshop import Workshop

MANY = {
    "kills": 10**9,
    "moments": 20,
    "sigkill": 8,
    "damage": 1,
    "others": 10**9,
    "disks": 12,
    "signals": 3,
    "pairs": 3,
    "threads": 100,
    "forks": 72,
    "questions": 2000,
    "studies": 400,
    "names": 100,
    "logs": 300,
    "lines": 400,
    "light": 10**9,
    "lenses": 200,
    "pages": 1,
    "cluster": 30,
}
"""How many of each are tried by hand: of kills at most so many a command, so all; of moments and sigkill so many a command;
of damage so many bytes a kind of file; of lines so many whole ones, and all light ones; of the cluster so many workers."""

ALONE = {"threads", "forks", "cluster"}
"""Parts that need no workshop."""


def parts(shop: Workshop, home: Path, n: dict[str, int]) -> dict[str, Callable[[], Iterable[Tally]]]:
    """Return the parts of the suite, by name."""
    extract, fit = shop.steps[0], next(step for step in shop.steps if step.line.startswith("fit "))
    return {
        "kills": lambda: kills.kill_all(shop),
        "moments": lambda: (kills.random_moments(shop, step, n=n["moments"]) for step in shop.steps),
        "sigkill": lambda: (kills.real(shop, step, renames=list(range(n["sigkill"]))) for step in (extract, fit)),
        "damage": lambda: (t for seed in range(n["damage"]) for t in damage.damage_all(shop, seed=seed)),
        "others": lambda: [others.other_peoples_files(shop, most=n["others"])],
        "disks": lambda: [
            disks.full_disks(shop, shop.steps, rooms=list(range(n["disks"])), sizes=[2**k for k in range(8, 15)])
        ],
        "signals": lambda: [disks.signals(shop, extract, names=list(disks.ASKED)[: n["signals"]])],
        "pairs": lambda: [kills.pairs(shop, [extract, fit, shop.steps[-2]][: n["pairs"]])],
        "threads": lambda: [sharing.threads(n["threads"])],
        "forks": lambda: [sharing.forks(n["forks"])],
        "questions": lambda: [inputs.hostile_questions(home, n["questions"])],
        "studies": lambda: [inputs.hostile_studies(shop, n["studies"])],
        "names": lambda: [inputs.hostile_names(shop, TEXTS[: n["names"]])],
        "logs": lambda: [inputs.hostile_logs(home, n["logs"])],
        "lines": lambda: [lines.hostile_lines(shop, lines.drawn(n["lines"], seed=0), light=False)],
        "light": lambda: [lines.hostile_lines(shop, lines.all_lines()[: n["light"]], light=True)],
        "lenses": lambda: [lenses.hostile_lenses(fit.after / "lens", fit.after, home, n["lenses"])],
        "pages": lambda: [pages.open_in_browser(home)],
        "cluster": lambda: cluster.all_faults(home, n["cluster"]),
    }


def chosen(arguments: list[str]) -> dict[str, int]:
    """Return how many of each part are tried; a part that is not named is left out, unless none is."""
    named = dict(argument.partition("=")[::2] for argument in arguments)
    if unknown := named.keys() - MANY.keys():
        sys.exit(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(MANY)}")
    return {name: int(named.get(name) or many) for name, many in MANY.items() if not named or name in named}


def furnished(home: Path, asked: dict[str, int]) -> Workshop:
    """Return the workshop, with what kills leave if they are asked for; an empty one where nothing needs it."""
    if asked.keys() <= ALONE:
        return Workshop.found(home)
    print(f"running every command once, in {home}", flush=True)
    if "kills" not in asked:
        return Workshop.make(home, large=bool({"damage", "disks"} & asked.keys()))
    most = asked["kills"] if asked["kills"] < MANY["kills"] else None
    return kills.record_all(home, kills.Recorder(), large=True, most=most)


def run(asked: dict[str, int], home: Path) -> Iterator[Tally]:
    """Run what is asked for, and say how each part ended."""
    shop = furnished(home / "shop", asked)
    for name, part in parts(shop, home, MANY | asked).items():
        begun = time.monotonic()
        for tally in part() if name in asked else ():
            print(
                "\n".join([f"{tally.what}: {tally.counts}, {time.monotonic() - begun:.0f} s", *tally.wrong]), flush=True
            )
            begun = time.monotonic()
            yield tally


def main() -> int:
    """Run what is asked for, and print the table."""
    asked = chosen(sys.argv[1:])
    with quiet(), tempfile.TemporaryDirectory(prefix="torture-") as temporary:
        tallies = list(run(asked, Path(temporary)))
    print(table(tallies))
    return int(any(tally.wrong for tally in tallies))


if __name__ == "__main__":
    sys.exit(main())
