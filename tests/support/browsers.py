"""Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = (
    "Left out: the pages of `coral serve` in a browser (tests/serve/test_page_browser.py); apt-get install chromium"
)


@contextmanager
def browser() -> Iterator[Any]:
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # in a container there is often no sandbox for the root user; only our own pages are looked at
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
