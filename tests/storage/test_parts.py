"""Parts cover all pieces, each once, and what is no part is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coral_lens.errors import CoralError
from coral_lens.storage.parts import Part, parse_part


@given(st.integers(1, 40), st.integers(0, 200))
def test_the_parts_have_every_piece_once_and_are_of_one_size(of: int, n_pieces: int) -> None:
    shares = [list(Part(number, of).share(n_pieces)) for number in range(1, of + 1)]
    assert sorted(piece for share in shares for piece in share) == list(range(n_pieces))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_part_is_read_as_it_is_written() -> None:
    assert parse_part(" 3 / 16 ") == Part(3, 16)
    assert str(Part(3, 16)) == "3/16"


@pytest.mark.parametrize("text", ["", "3", "3/", "0/4", "5/4", "-1/4", "1/100000", "1.5/2", "one/two", "٣/٤"])
def test_what_is_no_part_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(CoralError, match=r"^--part must .* instead\.$"):
        parse_part(text)
