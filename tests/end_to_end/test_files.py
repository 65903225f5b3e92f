"""docs/reference/files.md names every file that the commands write, with its keys, and no other."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

from faults.workshop import Workshop
from safetensors import safe_open
from support.commands import ROOT, files_on_the_page

from coral_lens.data.cache import KINDS

TWICE = ("parted/", "adapted/", "openlens/", "other/", "base/", "base.work/")
"""Folders like `store`, `lens`, `run`, `study` and `states`, of which the page says that they hold the same."""


def written(workshop: Workshop) -> list[str]:
    """What the commands wrote for keeps, without locks and what was there before."""
    folder, before = workshop.steps[-1].after, workshop.steps[0].before
    files = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock"]
    return sorted(f for f in files if not (before / f).exists() and not f.startswith(("cache/", *TWICE)))


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


def test_the_page_names_what_is_written_and_its_keys(workshop: Workshop) -> None:
    folder, files = workshop.steps[-1].after, written(workshop)
    page = {p: keys for p, keys in files_on_the_page().items() if not p.startswith("cache/")}
    assert [f for f in files if not any(fnmatchcase(f, pattern) for pattern in page)] == []
    assert [pattern for pattern in page if not any(fnmatchcase(f, pattern) for f in files)] == []
    for pattern in (p for p, keys in page.items() if keys):
        path = next(folder / f for f in files if fnmatchcase(f, pattern))
        assert wrong_keys(path, set(re.findall(r"`([^`]+)`", page[pattern]))) == set(), pattern


def test_the_cache_on_the_page_is_what_coral_cache_lists_and_the_code_keeps_there() -> None:
    page = {pattern.split("/")[1] for pattern in files_on_the_page() if pattern.startswith("cache/")}
    assert page == {place for place, _ in KINDS.values()}
    sources = (path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    kept = re.findall(r'(?:cache_dir\(\) / |record_path\(model, |remembered\()"([^"]+)"', "".join(sources))
    assert page == set(kept)
