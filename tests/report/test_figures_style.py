"""A figure shows a user's names as they are: no mathematics, one line, and SVG that every reader takes."""

from __future__ import annotations

import io
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

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


def test_files_of_a_picture_are_painted_once_and_show_what_each_shows_by_itself() -> None:
    painted: list[int] = []

    def paint(figure: Any) -> None:
        painted.append(1)
        (axes,) = panels(figure, 1)
        axes.plot([0, 1], [0, 1])
        method_key(figure, looks_of(["base", "coral"]))

    picture = Picture("line", paint, 2.0, alt="a line", caption="")
    files = picture.files()
    assert len(painted) == 1
    assert files[".svg"].decode() == picture.svg()
    both, alone = (Image.open(io.BytesIO(data)).convert("L") for data in (files[".png"], picture.png()))
    assert both.size == alone.size
    ink = [sum(i * n for i, n in enumerate(one.histogram())) / (both.size[0] * both.size[1]) for one in (both, alone)]
    assert abs(ink[0] - ink[1]) < 1, "the same ink but for the hints of letters"
