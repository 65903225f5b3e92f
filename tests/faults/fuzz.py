"""Fuzzing of the parsers: inputs that grow by what they reach in the code (atheris), beside those that `inputs` makes up.

python -m faults.fuzz questions 600     one of questions, logs, lens, study, for so many seconds

It runs by hand only (`make fuzz`, which installs atheris). A CoralError is a refusal, and any other error a finding: it is
printed once with the place where it was raised, and its input is kept in `fuzz-findings/`.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import atheris

with atheris.instrument_imports(include=["coral_lens"]):
    from coral_lens.data.questions import read_questions
    from coral_lens.harness.logs import run_of_logs
    from coral_lens.lens.folder import load_lens
    from coral_lens.study.config import load_study

from support.commands import GOLDEN
from support.studies import study_text

from coral_lens.errors import CoralError
from faults.hostile import NUMBERS, TEXTS, as_json, spoiled
from faults.inputs import log_records, question_file, study_file, written_as_jsonl, wrong_reading
from faults.lenses import sealed, spoil_record

PLAIN = (".jsonl", ".csv", ".tsv", ".json", ".parquet", ".arrow", ".xlsx")
ENDINGS = (*PLAIN, *(f"{ending}.gz" for ending in PLAIN))
SEEDS = 300
"""Inputs to begin with."""
FINDINGS = Path("fuzz-findings")


# ------------------------------------------------------------------------------------------------------------- parsers


def read_question_file(data: bytes, home: Path) -> None:
    """The first byte says what the file is called."""
    path = home / f"q{ENDINGS[data[0] % len(ENDINGS)]}" if data else home / "q.csv"
    path.write_bytes(gzip.compress(data[1:], 1) if path.suffix == ".gz" and data[0] < 128 else data[1:])
    if wrong := wrong_reading(read_questions(path), None):
        raise AssertionError(wrong)


def read_log(data: bytes, home: Path) -> None:
    """A log of lm-eval."""
    path = home / "samples_toy_2024-01-01T00-00-00.jsonl"
    path.write_bytes(data)
    run_of_logs([str(path)])


def read_lens(data: bytes, home: Path) -> None:
    """The record of a lens in which the input replaces some keys, under digests that are right."""
    try:
        changes = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(changes, dict):
        sealed(home / "lens", RECORD | changes)
        load_lens(home / "lens")


def read_study(data: bytes, home: Path) -> None:
    """A study."""
    path = home / "study.toml"
    path.write_bytes(data)
    load_study(path)


RECORD: dict[str, Any] = json.loads((GOLDEN / "lens" / "lens.json").read_text("utf-8"))
READERS: dict[str, Callable[[bytes, Path], None]] = {
    "questions": read_question_file,
    "logs": read_log,
    "lens": read_lens,
    "study": read_study,
}


def seed_of(parser: str, rng: random.Random) -> bytes:
    """Return an input to begin with."""
    if parser == "questions":
        name, data, _ = question_file(rng)
        return bytes([ENDINGS.index(name.removeprefix("q")) + 9 * len(ENDINGS) * name.endswith("gz")]) + data
    if parser == "logs":
        return written_as_jsonl(spoiled(log_records(), rng))
    if parser == "lens":
        key = rng.choice(sorted(RECORD.keys() - {"digest", "tensors"}))
        return as_json({key: spoil_record(RECORD, rng).get(key)}).encode("utf-8", "surrogatepass")
    return study_file(study_text(keeping=True, sae="sae/4x"), rng)


# ------------------------------------------------------------------------------------------------------------ mutations


def spoiled_rows(data: bytes, rng: random.Random) -> bytes:
    """Return JSON lines in which one value is another."""
    return written_as_jsonl(spoiled([json.loads(line) for line in data.splitlines()], rng))


def spoiled_table(data: bytes, rng: random.Random) -> bytes:
    """Return a table in which one cell is another."""
    rows = list(csv.reader(io.StringIO(data.decode())))
    row = rng.choice([row for row in rows if row])
    row[rng.randrange(len(row))] = rng.choice([*TEXTS, *map(str, NUMBERS), rng.choice(rng.choice(rows))])
    text = io.StringIO()
    csv.writer(text, delimiter=rng.choice(",,,,\t;")).writerows(rows)
    return text.getvalue().encode("utf-8", "surrogatepass")


def spoiled_question_file(data: bytes, rng: random.Random) -> bytes:
    """Return a file of questions with another value, by what its first byte says that it is."""
    is_table = ENDINGS[data[0] % len(ENDINGS)].removesuffix(".gz") in (".csv", ".tsv")
    return data[:1] + (spoiled_table if is_table else spoiled_rows)(data[1:], rng)


def spoiled_json(data: bytes, rng: random.Random) -> bytes:
    """Return a record with one more key of a lens, or another value."""
    record = json.loads(data)
    key = rng.choice(sorted(RECORD.keys() - {"digest", "tensors"}))
    changed = record | {key: RECORD[key]} if key not in record else spoiled(record, rng)
    return as_json(changed).encode("utf-8", "surrogatepass")


SPOILERS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "questions": spoiled_question_file,
    "logs": spoiled_rows,
    "lens": spoiled_json,
    "study": lambda data, rng: study_file(data.decode(), rng),
}


def mutated(parser: str, data: bytes, most: int, seed: int) -> bytes:
    """Return an input that is near another one: half of the time another value, so that it can be read at all."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        with contextlib.suppress(ValueError, TypeError, IndexError, AttributeError, RecursionError, csv.Error):
            return SPOILERS[parser](data, rng)[:most]
    return bytes(atheris.Mutate(data, most))


# ------------------------------------------------------------------------------------------------------------- findings


class Findings:
    """What went wrong, once for each place in the code."""

    def __init__(self, parser: str, seconds: int) -> None:
        self.parser, self.end = parser, time.monotonic() + seconds
        self.places, self.n_inputs, self.n_refused = set[str](), 0, 0

    def try_input(self, data: bytes, home: Path) -> None:
        """Read one input; the last one ends the process, because libFuzzer leaves without a word to Python."""
        if time.monotonic() > self.end:
            self.summary()
            shutil.rmtree(home, ignore_errors=True)
            os._exit(bool(self.places))
        self.n_inputs += 1
        try:
            READERS[self.parser](data, home)
        except CoralError as error:
            self.n_refused += 1
            if "\n" in str(error):
                self.note(data, "more than one line", str(error))
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            self.note(data, f"{type(error).__name__} in {last.filename}:{last.lineno}", str(error)[:200])

    def note(self, data: bytes, place: str, said: str) -> None:
        """Print a finding and keep its input, if its place is new."""
        if place not in self.places:
            self.places.add(place)
            FINDINGS.mkdir(exist_ok=True)
            path = FINDINGS / f"{self.parser}-{len(self.places)}"
            path.write_bytes(data)
            print(f"FOUND {self.parser}: {place}: {said} ({path})", flush=True)

    def summary(self) -> None:
        """Print how many inputs were read, and how they ended."""
        print(
            f"{self.parser}: {self.n_inputs:,} inputs, {self.n_refused:,} in one sentence, {len(self.places)} places in which "
            "something else went wrong",
            flush=True,
        )


def main() -> None:
    """Fuzz one parser."""
    parser, seconds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 600
    home = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    shutil.copytree(GOLDEN / "lens", home / "lens")
    corpus = home / "corpus"
    corpus.mkdir()
    for seed in range(SEEDS):
        (corpus / f"{seed:04}").write_bytes(seed_of(parser, random.Random(seed)))
    findings = Findings(parser, seconds)
    options = ["-max_len=20000", "-len_control=20", "-timeout=20", "-rss_limit_mb=4096", "-verbosity=0"]
    atheris.Setup(
        [sys.argv[0], *options, str(corpus)],
        lambda data: findings.try_input(data, home),
        custom_mutator=lambda data, most, seed: mutated(parser, data, most, seed),
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
