"""`coral serve` says what is wrong with its options before it loads anything."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from coral_lens.cli import app
from coral_lens.cli.options import Machine


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--lens none", "none is not a lens: it has no lens.json"),
        ("--lens none --host 0.0.0.0", "can be reached by others: give --api-key-env NAME"),
        ("--lens none --api-key-env NO_SUCH_KEY", "The environment variable NO_SUCH_KEY is not set"),
        ("--lens none --queue 3", "--queue 3 is shorter than one request may be"),
        ("--lens none --port 70000", "port must lie between 0 and 65535. Got 70000 instead."),
        ("--lens none --deadline 0", "deadline must be above 0 and at most 86400"),
    ],
)
def test_a_mistake_is_one_sentence_before_a_model_is_loaded(
    line: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "open", pytest.fail)
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    result = CliRunner().invoke(app, ["serve", *line.split()])
    assert sentence in str(result.exception)


def test_without_a_lens_the_one_that_ships_is_served_with_the_embedded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def note(self: Machine, name: str, *, dtype: str | None = None) -> None:
        opened.append((name, dtype))
        raise KeyboardInterrupt

    monkeypatch.setattr(Machine, "open", note)
    CliRunner().invoke(app, ["serve", "--port", "0"])
    assert opened == [("smollm2", "float32")]
