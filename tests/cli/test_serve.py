"""`coral serve` says what is wrong with its options before it loads anything."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from coral_lens.cli import app
from coral_lens.cli.options import Machine


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "There is no lens to serve: fit one on your labelled questions"),
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
