"""How many files a reader opens along a command, and how often the way turns back: python bench/walk.py [--src DIR] [--show]

Each command runs once with the tiny model of tests/golden. Counted are the files of the package in which a function is
called, in the order of first calls, and the distinct turns back: the way goes from one file to one that was opened before.
Functions that run only while a module is imported do not count. `--src` measures another checkout of the package.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
SAE = ("--model", "model", "--layer", "2", "--expansion", "4", "--batch-size", "64", "--massive", "0")
COMMANDS: dict[str, tuple[str, ...]] = {
    "fit": ("fit", "--model", "model", "--train", "train.jsonl", "--out", "lens"),
    "predict": ("predict", "--lens", "lens", "--questions", "test.jsonl", "--out", "answers.jsonl"),
    "run": ("run", "study.toml", "--out", "study", "--work", "states"),
    "sae train": ("sae", "train", "train.jsonl", "--out", "sae", *SAE),
    "sae select": (
        "sae",
        "select",
        "test.jsonl",
        "--model",
        "model",
        "--sae",
        "sae/4x",
        "--out",
        "features",
        "--k",
        "5",
    ),
    "sae ablate": ("sae", "ablate", "train.jsonl", "--study", "features", "--features", "3", "--random", "2"),
}
PROFILED = """
import json, sys
import torch
torch.set_num_threads(1)
import coral_lens.cli as cli
root = str(cli.__file__).rsplit("cli", 1)[0]
order, known = [], set()

def profile(frame, event, _):
    code = frame.f_code
    is_function = code.co_flags & 1 and not code.co_name.startswith(("<", "__"))
    if event == "call" and is_function and code.co_filename.startswith(root) and code not in known:
        known.add(code)
        order.append(code.co_filename[len(root):])

sys.argv = ["coral", *sys.argv[2:]]
sys.setprofile(profile)
try:
    cli.main()
except SystemExit as end:
    assert not end.code, end.code
finally:
    sys.setprofile(None)
    open("walk.json", "w").write(json.dumps(order))
"""


def walk(folder: Path, src: Path, arguments: tuple[str, ...]) -> list[str]:
    """Return the files in the order in which a command opens them, each as often as the way comes back to it."""
    environment = {**os.environ, "PYTHONPATH": str(src), "CORAL_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PROFILED, "coral", *arguments]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    calls = json.loads((folder / "walk.json").read_text("utf-8"))
    return [file for i, file in enumerate(calls) if i == 0 or calls[i - 1] != file]


def turns_back(way: list[str]) -> int:
    """Return the distinct pairs of files along which the way goes to a file that was opened before."""
    pairs = enumerate(pairwise(way))
    return len({(one, other) for i, (one, other) in pairs if other in way[: i + 1]})


def main() -> None:
    """Print a line for each command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--src", type=Path, default=Path(__file__).parents[1] / "src")
    parser.add_argument("--show", action="store_true", help="print the way itself")
    arguments = parser.parse_args()
    print(f"{'command':12} {'files':>5} {'turns back':>10}")
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("model", "train.jsonl", "test.jsonl", "study.toml"):
            source = GOLDEN / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
        many = (GOLDEN / "train.jsonl").read_text("utf-8").replace("Toy question", "Another question")
        (folder / "test.jsonl").write_text(many.replace('"id": "a', '"id": "b'), "utf-8")
        for name, command in COMMANDS.items():
            way = walk(folder, arguments.src.resolve(), command)
            print(f"{name:12} {len(set(way)):5} {turns_back(way):10}")
            if arguments.show:
                print("  " + "\n  ".join(way))


if __name__ == "__main__":
    main()
