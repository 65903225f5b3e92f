"""The documentation site: every page is in its menu, no link is broken, and it asks the network for nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from test_architecture import ROOT

CONFIG = tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))["project"]
REQUEST = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//|"""
                     r"""<link\b[^>]*\bhref=["']?(?:https?:)?//|@import|url\(["']?(?:https?:)?//""")  # fmt: skip
"""What a browser fetches by itself from somewhere else; a link that a reader follows is none."""


def pages(menu: list[dict[str, Any]]) -> Iterator[str]:
    for entry in menu:
        for target in entry.values():
            yield from [target] if isinstance(target, str) else pages(target)


def test_the_menu_has_every_document_once_and_no_other() -> None:
    documents = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    assert sorted(pages(CONFIG["nav"])) == documents


def test_requests_to_other_places_are_found_and_links_are_not() -> None:
    assert REQUEST.search('<script src="https://example.org/x.js">')
    assert REQUEST.search("<link rel=stylesheet href=//example.org/x.css>")
    assert REQUEST.search("a { background: url(https://example.org/x.png) }")
    assert not REQUEST.search('<a href="https://example.org">there</a> <script src="assets/x.js">')


def test_the_site_builds_without_a_broken_link_and_without_the_network(tmp_path: Path) -> None:
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    built = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=tmp_path, env={**os.environ, "NO_COLOR": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    made = [path for path in (tmp_path / "site").rglob("*") if path.suffix in {".html", ".css"}]
    assert len(made) > len(list(pages(CONFIG["nav"])))
    assert [path.name for path in made if REQUEST.search(path.read_text("utf-8"))] == []
