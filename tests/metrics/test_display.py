"""Results print as a small table, in HTML with every text escaped, and as a frame with every digit."""

from __future__ import annotations

from dataclasses import dataclass

from coral_lens.metrics.display import Shown, Table, as_text, cell


@dataclass(frozen=True, repr=False)
class Weather(Shown):
    city: str

    def table(self) -> Table:
        rows = ((self.city, 21.123456, 3), ("Oslo", None, 12))
        return Table("Weather", ("city", "degrees", "days"), rows, ("Measured at noon.",))


def test_a_result_prints_aligned_and_rounded() -> None:
    assert str(Weather("Rome")).splitlines() == [
        "Weather",
        "city  degrees  days",
        "Rome    21.12     3",
        "Oslo             12",
        "Measured at noon.",
    ]
    assert repr(Weather("Rome")) == str(Weather("Rome"))


def test_html_escapes_what_a_user_wrote() -> None:
    page = Weather("<script>alert(1)</script>")._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert page.count("<tr>") == 3


def test_a_frame_has_every_digit() -> None:
    frame = Weather("Rome").to_frame()
    assert list(frame.columns) == ["city", "degrees", "days"]
    assert frame["degrees"][0] == 21.123456


def test_long_cells_are_cut_and_line_breaks_are_not_kept() -> None:
    assert cell("a\nb") == "a b"
    assert len(cell("x" * 500)) == 60
    assert (cell(True), cell(False), cell(None)) == ("yes", "no", "")


def test_a_table_without_rows_is_its_title_and_notes() -> None:
    assert as_text(Table("Nothing", ("a",), (), ("Yet.",))) == "Nothing\nYet."
