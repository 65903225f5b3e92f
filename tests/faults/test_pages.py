"""Pages with hostile text in every field have the elements of pages with harmless text, and their policy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import quiet

from faults.pages import HARMLESS, PAGES, hostile_text, wrong_page


@pytest.fixture(autouse=True, scope="module")
def calm() -> Iterator[None]:
    with quiet():
        yield


@pytest.mark.parametrize("name", PAGES)
def test_text_stays_text(name: str, tmp_path: Path) -> None:
    hostile = PAGES[name](hostile_text(), tmp_path)
    assert wrong_page(PAGES[name](HARMLESS, tmp_path), hostile) == ""
    assert "harmed" in hostile, "the text is on the page"


@pytest.mark.parametrize("name", ["run", "reproduction"])
def test_text_stays_text_on_figures_that_are_drawn(name: str, tmp_path: Path) -> None:
    with quiet(draws=True):
        hostile, harmless = (PAGES[name](text, tmp_path) for text in (hostile_text(), HARMLESS))
    assert "<path" in hostile, "it is drawn"
    assert wrong_page(without_strokes(harmless), without_strokes(hostile)) == ""


def without_strokes(page: str) -> str:
    """A page without the lines of its figures, of which long names may need another number."""
    return re.sub(r"<(?:path|use|g|defs|clipPath|rect)\b[^>]*>|</(?:g|defs|clipPath)>", "", page)


@pytest.mark.parametrize("hole", ["{}", "<p title='{}'>", '<p title="{}">', "<p {}>", "<style>{}</style>"])
def test_a_hole_is_seen(hole: str) -> None:
    policy = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">'
    assert wrong_page(policy + hole.format(HARMLESS), policy + hole.format(hostile_text()))
    assert wrong_page(hole.format(HARMLESS), hole.format(HARMLESS)), "a page without a policy"
