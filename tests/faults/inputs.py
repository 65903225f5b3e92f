"""Hostile inputs: files of questions, studies and logs of lm-eval. Each is accepted as meant, or refused.

Where the generator knows what a file means, another reading is silence: an answer that is not the one that was written.
"""

from __future__ import annotations

import csv
import gzip
import io
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
from openpyxl import Workbook

from coral_lens.data.questions import read_questions
from coral_lens.records import UNKNOWN, Question
from faults.hostile import TEXTS, as_json, spoiled, spoiled_bytes
from faults.outcomes import Tally, call, coral
from faults.workshop import Workshop

# ---------------------------------------------------------------------------------------------------------- questions

WORDS = ("red", "a blue whale", "A", "b", "true", "0.5", "ä", "yes|no", "=2", "3/4", "None")


def question_rows(rng: random.Random) -> list[dict[str, Any]]:
    """Return sound questions; the options of some files are numbers, whose answers are easily taken for their places."""
    digits = rng.random() < 0.3
    rows = []
    for i in range(rng.randint(1, 6)):
        n = rng.randint(2, 5)
        options = [str(k + rng.randint(0, 1)) for k in range(n)] if digits else rng.sample(WORDS, n)
        options = list(dict.fromkeys(options)) if len(set(options)) > 1 else ["1", "2"]
        rows.append(
            {"id": f"q{i}", "question": f"{i}: which?", "options": options, "answer": rng.randrange(len(options))}
        )
    return rows


def written_as_csv(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    """Return the questions as CSV, with the options as a JSON list and the answers as their places."""
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows(cells_of(rows))
    return text.getvalue().encode()


def cells_of(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """Return the questions as a sheet, with a header and the options as a JSON list."""
    return [list(rows[0]), *([as_json(v) if isinstance(v, list) else v for v in row.values()] for row in rows)]


def written_as_tsv(rows: list[dict[str, Any]]) -> bytes:
    """Return the questions as CSV with tabs."""
    return written_as_csv(rows, "\t")


def written_as_json(rows: list[Any]) -> bytes:
    """Return the questions as one JSON list."""
    return as_json(rows).encode("utf-8", "surrogatepass")


def written_as_parquet(rows: list[dict[str, Any]]) -> bytes:
    """Return the questions as parquet."""
    out = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows), out)
    return out.getvalue()


def written_as_arrow(rows: list[dict[str, Any]]) -> bytes:
    """Return the questions as a file, or of an odd number of them as a stream, of Arrow's."""
    out, table = io.BytesIO(), arrow.Table.from_pylist(rows)
    with (arrow.ipc.new_stream if len(rows) % 2 else arrow.ipc.new_file)(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def written_as_xlsx(rows: list[dict[str, Any]]) -> bytes:
    """Return the questions as a workbook."""
    out, book = io.BytesIO(), Workbook()
    for cells in cells_of(rows):
        book.active.append(cells)
    book.save(out)
    return out.getvalue()


def written_as_jsonl(rows: list[Any]) -> bytes:
    """Return the questions as JSON lines."""
    return "".join(as_json(row) + "\n" for row in rows).encode("utf-8", "surrogatepass")


def wrong_reading(questions: list[Question], rows: list[dict[str, Any]] | None) -> str:
    """Say what is wrong with what was read: no question at all, or another than was written."""
    for q in questions:
        if not q.text.strip() or len(q.options) < 2 or not (q.answer == UNKNOWN or 0 <= q.answer < len(q.options)):
            return f"accepted {q}"
    if rows is None:
        return ""
    found = [(q.id, q.answer) for q in questions]
    wanted = [(row["id"], row["answer"]) for row in rows]
    return "" if found == wanted else f"read {found} where {wanted} was written"


FORMS = {
    "q.csv": written_as_csv,
    "q.jsonl": written_as_jsonl,
    "q.json": written_as_json,
    "q.tsv": written_as_tsv,
    "q.parquet": written_as_parquet,
    "q.arrow": written_as_arrow,
    "q.xlsx": written_as_xlsx,
}
"""How questions are written, by the name of their file."""
OFTEN = (6, 6, 2, 2, 2, 2, 1)
"""How often each is drawn: most files of users are of the first two kinds, and workbooks take long."""


def question_file(rng: random.Random) -> tuple[str, bytes, list[dict[str, Any]] | None]:
    """Return the name and content of a file, and what it means if it was not spoiled."""
    rows = question_rows(rng)
    (name,) = rng.choices(list(FORMS), OFTEN)
    if rng.random() < 0.4:
        return name, FORMS[name](rows), rows
    if rng.random() < 0.5:
        return spoiled_table(name, spoiled(rows, rng))
    data = spoiled_bytes(FORMS[name](rows), rng)
    return (f"{name}.gz", spoiled_bytes(gzip.compress(data), rng), None) if rng.random() < 0.2 else (name, data, None)


def spoiled_table(name: str, rows: Any) -> tuple[str, bytes, None]:
    """Return a file of spoiled rows; where its kind has no such values, as JSON lines, in which everything may stand."""
    try:
        return name, FORMS[name](rows), None
    except Exception:  # each library refuses in its own way
        return "q.jsonl", written_as_jsonl(rows if isinstance(rows, list) else [rows]), None


def hostile_questions(home: Path, n: int) -> Tally:
    """Read so many files of questions."""
    tally, home = Tally("question files"), fresh(home / "questions")
    for seed in range(n):
        name, data, rows = question_file(random.Random(seed))
        path, read = home / f"{seed}-{name}", list[Question]()
        path.write_bytes(data)
        outcome = call(lambda path=path, read=read: read.extend(read_questions(path)))
        tally.judge(f"question file {seed}, {name}", outcome, difference=wrong_reading(read, rows) if read else "")
        path.unlink()
    return tally


# ------------------------------------------------------------------------------------------------------------ studies

TOML_VALUES = (
    '""',
    "-1",
    "0",
    "1e999",
    "nan",
    "true",
    "[]",
    "{}",
    "[[]]",
    '["x", 1]',
    "9" * 400,
    "[" * 5000,
    "1979-05-27",
)


def study_file(text: str, rng: random.Random) -> bytes:
    """Return a study of which one line was spoiled."""
    lines = text.strip().splitlines()
    at = rng.randrange(len(lines))
    key, equals, _ = lines[at].partition(" = ")
    match rng.randrange(5):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, rng.choice(lines))
        case 2 if equals:
            lines[at] = f"{key} = {as_json(rng.choice(TEXTS))}"
        case 3:
            return spoiled_bytes(text.encode(), rng)
        case _:
            lines[at] = f"{key} = {rng.choice(TOML_VALUES)}"
    return "\n".join(lines).encode()


def hostile_studies(shop: Workshop, n: int) -> Tally:
    """Ask of so many studies what they would run."""
    tally, folder = Tally("study files"), shop.bench(shop.steps[-1].after)  # with the autoencoder that it names
    text = (folder / "study.toml").read_text("utf-8")
    for seed in range(n):
        (folder / "hostile.toml").write_bytes(study_file(text, random.Random(seed)))
        tally.judge(f"study file {seed}", coral(folder, "run", "hostile.toml", "--check"))
    return tally


NAMED = """
name = "own"
models = ["model"]
layers = [1]
mixture = [{{ name = {name}, sources = [{{ task = "train.jsonl", shots = 0 }}] }}]
test = [{{ task = "test.jsonl", name = {name}, shots = 0 }}]

[[method]]
kind = "isotonic"
name = {name}
"""


def hostile_names(shop: Workshop, names: Sequence[str]) -> Tally:
    """Run a whole study in which every name is hostile, but for its own, which must be a plain word."""
    tally = Tally("names")
    for name in names:
        folder = shop.bench(shop.steps[0].before)
        (folder / "named.toml").write_text(NAMED.format(name=as_json(name).replace("\\u001b", "\\u001B")), "utf-8")
        before = {p.name for p in folder.parent.iterdir()}
        outcome = coral(folder, "run", "named.toml", "--out", "study", "--work", "states")
        outside = sorted({p.name for p in folder.parent.iterdir()} - before)
        tally.judge(f"name {name[:40]!r}", outcome, difference=", ".join(f"{p} is outside" for p in outside))
    return tally


# --------------------------------------------------------------------------------------------------------------- logs


def log_records() -> list[dict[str, Any]]:
    """Return what lm-eval logs of three questions."""
    return [
        {
            "doc_id": i,
            "doc": {"question": f"{i}?", "choices": ["a", "b"]},
            "target": str(i % 2),
            "arguments": {f"gen_args_{j}": {"arg_0": f"{i}?", "arg_1": f" {o}"} for j, o in enumerate("ab")},
            "resps": [[[str(-1.0 - j), "False"]] for j in range(2)],
            "filtered_resps": [[str(-1.0 - j), "False"] for j in range(2)],
            "filter": "none",
            "metrics": ["acc", "acc_norm"],
            "acc": float(i % 2 == 0),
            "acc_norm": float(i % 2 == 0),
        }
        for i in range(3)
    ]


def hostile_logs(home: Path, n: int) -> Tally:
    """Measure so many logs of lm-eval."""
    tally = Tally("lm-eval logs")
    for seed in range(n):
        rng, folder = random.Random(seed), fresh(home / "logs")
        data = written_as_jsonl(spoiled(log_records(), rng))
        path = folder / "model" / f"samples_{rng.choice(['toy', '[b]', '..', 'x' * 200])}.jsonl"
        path.parent.mkdir()
        path.write_bytes(spoiled_bytes(data, rng) if rng.random() < 0.3 else data)
        outcome = coral(folder, "eval", "--lm-eval-samples", str(path), "--out", "out")
        tally.judge(f"log {seed}", outcome, difference="NaN is shown" if " nan" in outcome.out else "")
    return tally


def fresh(folder: Path) -> Path:
    """Return an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
