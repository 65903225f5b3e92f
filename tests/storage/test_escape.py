"""Texts of users, written for a terminal, Markdown, LaTeX, CSV and file names: nothing in them is taken for a mark."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral_lens.report.tables.clear import RULE
from coral_lens.report.tables.exports import csv_text
from coral_lens.report.tables.formats import BOLD, MARKED
from coral_lens.storage.escape import for_csv, for_latex, for_markdown, for_terminal, in_one_line
from coral_lens.storage.files import MOST_NAME, file_name

HOSTILE = ("[/b]", "$\\frac$", "$x", "a|b", "a\nb", "`x`", "[x](http://x)", "<b>", "=1+1", "\x1b[31m", "..", "x" * 5000)


def test_a_line_has_no_control_characters_and_is_one_line() -> None:
    assert in_one_line("a\tb\r\nc\x1b[2J\x00\u202ed\x85e") == "a b c\\x1b[2J\\x00\\u202ed e"
    assert for_terminal("one\ntwo\x07") == "one\ntwo\\x07"
    assert in_one_line("arc_easy:test, 東京 é −") == "arc_easy:test, 東京 é −"


@given(st.text())
def test_no_text_whatever_moves_the_cursor(text: str) -> None:
    assert all(c.isprintable() or c == " " or not c.isascii() for c in in_one_line(text))
    assert "\x1b" not in for_terminal(text)


def test_markdown_is_escaped_and_plain_names_stay_as_they_are() -> None:
    assert for_markdown("a|b\n[x](https://y) `z` *w* <b> &lt; \\") == (
        "a\\|b \\[x\\](https:\\//y) \\`z\\` \\*w\\* \\<b> \\&lt; \\\\"
    )
    assert for_markdown("_x_ a_b_ www.x.y") == "\\_x\\_ a_b\\_ www\\.x.y"
    for plain in (
        "arc_easy:validation",
        "CORAL − base",
        "iti (sigma=true)",
        "HuggingFaceTB/SmolLM2-135M",
        "p < 0.05 & > 1",
    ):
        assert for_markdown(plain) == plain
    for note in (BOLD, MARKED, RULE):
        assert for_markdown(note) == note


def test_latex_is_escaped() -> None:
    assert for_latex("100% & {a_b} #1 $x$ ~^\\") == (
        r"100\% \& \{a\_b\} \#1 \$x\$ \textasciitilde{}\textasciicircum{}\textbackslash{}"
    )
    assert for_latex("[2pt]\n*") == "{[}2pt] {*}"


@pytest.mark.parametrize("text", ["=1+1", "+cmd", "-x", "@sum", "\t=1", "\r=1", " =1"])
def test_no_cell_starts_a_formula(text: str) -> None:
    # a lone carriage return would end the row
    assert for_csv(text) == "'" + text.replace("\r", "\n")


@pytest.mark.parametrize("value", [-1.5, -3, "-1.5", "+2", "-1e-05", "", "a=b", None, float("nan"), True])
def test_numbers_and_plain_texts_of_a_cell_stay_as_they_are(value: Any) -> None:
    assert for_csv(value) is value


def test_a_csv_file_says_what_was_said() -> None:
    (line,) = csv.reader(io.StringIO(csv_text([("=x", "a,b\nc", -0.25, None)])))
    assert line == ["'=x", "a,b\nc", "-0.25", ""]


@pytest.mark.parametrize("name", [*HOSTILE, ".", ".hidden", "../../x", "/", "", "東" * 200, "\x00"])
def test_every_name_is_a_file_name_of_a_bounded_length(tmp_path: Path, name: str) -> None:
    made = file_name(name)
    assert len(made.encode()) <= MOST_NAME
    assert os.sep not in made
    assert not made.startswith(".")
    (tmp_path / f"{made}.jsonl").write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == [f"{made}.jsonl"]


def test_names_that_were_cut_stay_apart() -> None:
    assert file_name("x" * 5000) != file_name("x" * 5001)
    assert file_name("arc_easy:test") == "arc_easy.test"
