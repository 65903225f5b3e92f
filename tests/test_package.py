"""What is installed is what the tree holds: no file that the package reads is left out of a wheel."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from test_architecture import PACKAGE, ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PATTERNS = PYPROJECT["tool"]["setuptools"]["package-data"]["coral_lens"]


def data_files() -> set[Path]:
    """Every file of the package that is no Python and was not left there by running it."""
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path for path in files if path.suffix != ".py"}


def test_every_file_of_the_package_goes_into_the_wheel() -> None:
    packed = {path for pattern in PATTERNS for path in PACKAGE.glob(pattern)}
    assert data_files() - packed == set()


def test_every_pattern_of_package_data_finds_something() -> None:
    for pattern in PATTERNS:
        assert list(PACKAGE.glob(pattern)), pattern


def test_every_folder_with_code_is_a_package() -> None:
    """Folders without __init__.py are left out of a wheel, code and data alike."""
    for path in PACKAGE.rglob("*.py"):
        assert (path.parent / "__init__.py").exists(), path


def test_the_citation_is_of_this_version_and_licence() -> None:
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    project = PYPROJECT["project"]
    assert re.findall(r"^(version|license): (.+)$", text, flags=re.MULTILINE) == [
        ("version", project["version"]),
        ("license", project["license"]),
    ]
