"""A line of every command that works for long, the folder in which they run, and the page that names what they write.

The lines are in their order: what one writes, a later one reads. `WITHOUT_WORK` says of each other command why it is not here.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

from coral_lens.cli import app
from coral_lens.engine import extract
from coral_lens.report.figures.style import Picture
from support.studies import study_text

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
PAGE = ROOT / "docs" / "reference" / "files.md"
LINES = """
extract train.jsonl --model model --heads all --out store
extract train.jsonl --model model --out parted --part 1/2
extract train.jsonl --model model --out parted --part 2/2
extract --out parted --finish
fit --model model --train train.jsonl --out lens
adapt --lens lens --questions more.jsonl --out adapted
calibrate --lens lens --questions more.jsonl
eval --lens lens --task test.jsonl --out run
eval --lens lens --task test.jsonl --out other
audit answered.jsonl --out audit
predict --lens lens --questions test.jsonl --out answers.jsonl
fit --model model --open open.jsonl --out openlens --candidates 8 --temperature 1 --max-tokens 64 --examples 0 --layers 1
ask --lens openlens --questions open.jsonl --out opened.jsonl
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
run study.toml --out study --work states --part 1/2
run study.toml --out study --work states --part 2/2
run study.toml --out study --work states
fit --model model --train train.jsonl --out lens --lens ridge
""".strip().splitlines()
"""The commands; the last one replaces a lens."""

WITHOUT_WORK = {
    "serve": "writes nothing but a log of answers that is asked for; tests/serve/test_server.py ends it",
    "push": "sends to the hub what is on the disk",
    "lm-eval": "is lm-eval's own command line",
    "demo": "is `fit` and `eval` on the embedded data",
    "reproduce": "is the lines above on the paper's data; tests/study/test_reproduce.py stops it, breaks it and goes on",
    "doctor": "writes nothing",
    "tasks": "writes nothing",
    "show": "writes nothing",
    "cache list": "writes nothing",
    "cache clear": "removes what is kept; what it has not removed is removed by the next one",
    "assets": "fetches from the network; tests/data/test_assets.py interrupts it",
}
"""The other commands, and why they are not among the lines above."""

DRAWN = {"png": lambda self: b"\x89PNG", "svg": lambda self: "<svg></svg>"}
DRAWING = {name: getattr(Picture, name) for name in DRAWN}
CUT = extract.cut_shards
SHARD_BYTES = 20_000
"""Of a shard of the stores that the lines write, so that the largest have several."""
ON_THE_PAGE = {"ANSWERS": "answers.jsonl", "OPENED": "opened.jsonl", "WORK": "states"}
"""What the lines call a folder of the page, where it is not its name in small letters."""


def leaves(command: Any, *above: str) -> Iterator[tuple[str, Any]]:
    """Yield every command that does something, by the words that call it."""
    inner = getattr(command, "commands", {}) or {}
    for name, one in inner.items():
        yield from leaves(one, *above, name)
    if not inner:
        yield " ".join(above), command


COMMANDS: dict[str, Any] = dict(leaves(get_command(app)))
"""All commands, as the command line knows them."""


def command_of(line: str) -> str:
    """Return the command of a line, without its arguments."""
    return next(c for c in sorted(COMMANDS, key=len, reverse=True) if f"{line} ".startswith(f"{c} "))


def furnish(folder: Path, *, large: bool) -> Path:
    """Put the inputs of all lines into a new folder; `large`: with a study in which every method takes part."""
    folder.mkdir(parents=True)
    (folder / "model").symlink_to(GOLDEN / "model")
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(GOLDEN / name, folder)
    rows = [
        {"id": f"m{i}", "question": f"{i}: which?", "options": [f"red {i}", "green", "blue"], "answer": i % 2}
        for i in range(60)
    ]
    (folder / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    asked = [{"question": f"{i}: how many?", "answers": [str(i), "none"]} for i in range(40)]
    (folder / "open.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked), "utf-8")
    answered = [row | {"probs": [0.5 + i / 150, 0.3 - i / 300, 0.2 - i / 300]} for i, row in enumerate(rows)]
    (folder / "answered.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answered), "utf-8")
    (folder / "study.toml").write_text(study_text(keeping=large, sae="sae/4x"), "utf-8")
    return folder


@contextlib.contextmanager
def usual_shards() -> Iterator[None]:
    """Cut stores as those of users are cut, also where it is quiet: processes of a cluster know nothing of small shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extract, "cut_shards", CUT)
        yield


@contextlib.contextmanager
def quiet(*, draws: bool = False) -> Iterator[None]:
    """Draw no figures unless asked to, compute on one thread, cut stores into small shards, and keep out of the user's cache."""
    n_threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        # not what makes a shard: what fits into one is kept in memory
        patch.setattr(extract, "cut_shards", lambda planned, _: CUT(planned, SHARD_BYTES))
        for name, drawn in (DRAWING if draws else DRAWN).items():
            patch.setattr(Picture, name, drawn)
        patch.setenv("CORAL_CACHE", "cache")
        torch.set_num_threads(1)
        yield
    torch.set_num_threads(n_threads)


def files_on_the_page() -> dict[str, str]:
    """Return the patterns of docs/reference/files.md as the lines call their folders, and the keys beside them."""
    rows = re.findall(r"^\| `([A-Z]+)([^`]*)` \| [^|]+ \| ([^|]*)\|$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    named = [(f"{ON_THE_PAGE.get(top, top.lower())}{rest}", keys.strip()) for top, rest, keys in rows]
    assert len(named) == len(dict(named)), "a file stands on the page twice"
    return dict(named)
