"""A figure shows a user's names as they are: no mathematics, one line, and SVG that every reader takes."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from coral_lens.report.figures.style import Picture, clipped, looks_of, method_key, panels

NAMES = ("$\\frac$", "$x", "a$b$c", "_$^", "[/b]", "two\nlines", "\x00\x1b[31m", "<script>&amp;", "東京", "x" * 5000)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_drawn_as_it_is(name: str) -> None:
    def paint(figure: Any) -> None:
        (axes,) = panels(figure, 1)
        axes.set_title(clipped(name, 28))
        axes.set_yticks([0, 1], [clipped(name, 24), "b"])
        method_key(figure, looks_of([name, "coral"]))

    picture = Picture("names", paint, 2.0, alt=name, caption="")
    text = "".join(ElementTree.fromstring(picture.svg()).itertext())
    assert clipped(name, 22) in text
    assert picture.png().startswith(b"\x89PNG")


def test_a_long_name_is_cut_and_a_control_character_is_seen() -> None:
    assert clipped("x" * 5000, 10) == "x" * 9 + "…"
    assert clipped("a\nb\x1b", 10) == "a b\\x1b"
