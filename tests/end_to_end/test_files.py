"""docs/reference/files.md names every file that the commands write, with its keys, and no other."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from safetensors import safe_open
from support.studies import study_text
from typer.testing import CliRunner

from coral_lens.cli import app
from coral_lens.data.cache import KINDS
from coral_lens.report.figures.style import Picture

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "files.md"
COMMANDS = """
extract train.jsonl --model model --heads all --out STORE
fit --model model --train train.jsonl --out LENS
eval --lens LENS --task test.jsonl --out RUN
eval --lens LENS --task test.jsonl --out other
report RUN other --out COMPARED
predict --lens LENS --questions test.jsonl --out ANSWERS
sae train train.jsonl --model model --layer 2 --expansion 4 --batch-size 64 --massive 0 --out SAE
sae select train.jsonl --model model --sae SAE/4x --out FEATURES --k 5
sae ablate more.jsonl --limit 30 --study FEATURES --features 3 --random 2
sae steer --study FEATURES --validation more.jsonl --test test.jsonl
sae report FEATURES
run study.toml --out STUDY --work WORK
analyse layers --store STORE --out ANALYSIS
analyse dimensions --store STORE --out ANALYSIS
"""
INPUTS = ("model", "train.jsonl", "test.jsonl")


@pytest.fixture(autouse=True, scope="module")
def quiet(one_thread: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Picture, "png", lambda self: b"\x89PNG")
        patch.setattr(Picture, "svg", lambda self: "<svg></svg>")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every command has written what it writes, under the names of the page."""
    folder = tmp_path_factory.mktemp("files")
    for name in INPUTS:
        source = ROOT / "tests" / "golden" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    more = [
        {"id": f"m{i}", "question": f"{i}: which?", "options": [f"red {i}", "green", "blue"], "answer": i % 2}
        for i in range(60)
    ]
    (folder / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in more), "utf-8")
    (folder / "study.toml").write_text(study_text(keeping=True, sae="SAE/4x"), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("CORAL_CACHE", str(folder / "CACHE"))
        for command in COMMANDS.strip().splitlines():
            result = CliRunner().invoke(app, command.split(), catch_exceptions=False)
            assert result.exit_code == 0, result.output
    return folder


def rows() -> dict[str, str]:
    """The patterns of the page, and the keys beside them."""
    found = re.findall(r"^\| `([A-Z][^`]*)` \| [^|]+ \| ([^|]*)\|$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    assert len(found) == len(dict(found)), "a file stands on the page twice"
    return {pattern: keys.strip() for pattern, keys in found}


def written(folder: Path) -> list[str]:
    """What the commands wrote for keeps, without locks and what was there before."""
    files = [p.relative_to(folder) for p in folder.rglob("*") if p.is_file() and not p.name.endswith(".lock")]
    return sorted(f.as_posix() for f in files if f.parts[0].split(".")[0].isupper())


def keys_in(path: Path) -> set[str]:
    """The keys of a JSON record or of the lines of a file, or the names of tensors."""
    if path.suffix == ".safetensors":
        with safe_open(path, "np") as tensors:
            return set(tensors.keys())
    text = path.read_text("utf-8")
    return set(json.loads(text if path.suffix == ".json" else text.splitlines()[0]))


def wrong_keys(path: Path, named: set[str]) -> set[str]:
    """The keys that are in a file and not named, or named and not in it."""
    found = keys_in(path)
    unnamed = {key for key in found if not any(fnmatchcase(key, name) for name in named)}
    return unnamed | {name for name in named if not any(fnmatchcase(key, name) for key in found)}


def test_the_page_names_what_is_written_and_its_keys(folder: Path) -> None:
    """One test, so that the commands run once however many processes share the suite."""
    files, page = written(folder), {p: keys for p, keys in rows().items() if not p.startswith("CACHE/")}
    assert [f for f in files if not any(fnmatchcase(f, pattern) for pattern in page)] == []
    assert [pattern for pattern in page if not any(fnmatchcase(f, pattern) for f in files)] == []
    for pattern in (p for p, keys in page.items() if keys):
        path = next(folder / f for f in files if fnmatchcase(f, pattern))
        assert wrong_keys(path, set(re.findall(r"`([^`]+)`", page[pattern]))) == set(), pattern


def test_the_cache_on_the_page_is_what_coral_cache_lists_and_the_code_keeps_there() -> None:
    page = {pattern.split("/")[1] for pattern in rows() if pattern.startswith("CACHE")}
    assert page == {place for place, _ in KINDS.values()}
    sources = (path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    kept = re.findall(r'(?:cache_dir\(\) / |record_path\(model, )"([^"]+)"', "".join(sources))
    assert page == set(kept)
