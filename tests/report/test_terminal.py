"""The terminal shows a user's names as they are."""

from __future__ import annotations

import pytest
from rich.table import Table
from rich.text import Text

from coral_lens.report.terminal import plain_console
from coral_lens.storage.escape import in_one_line


@pytest.mark.parametrize("name", ["[/b]", "[bold]x", "[link=http://x]y[/link]", ":smile:", "\\[x"])
def test_marks_in_a_name_are_letters(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(name, box=None)
    table.add_row(name)
    table.add_row(Text(name))
    plain_console().print(table)
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == [name] * 3


def test_a_name_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    plain_console().print(Text(in_one_line("\x1b[2J\x07")))
    assert capsys.readouterr().out == "\\x1b[2J\\x07\n"
