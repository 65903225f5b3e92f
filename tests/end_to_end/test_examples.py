"""The examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_quickstart_answers_its_twenty_new_questions() -> None:
    run = [sys.executable, str(EXAMPLES / "quickstart.py")]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 20
    assert all(line.rstrip().endswith("%") for line in lines)
