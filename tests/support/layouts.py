"""The same fifty questions in every layout in which people have them: each writes a file, or makes a frame, that means the same.

Exports of programs that are not at hand in every test run lie in tests/data/exports; `python -m support.layouts` makes them again
with openpyxl and LibreOffice.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from coral_lens.data.settings import TableOptions
from coral_lens.records import Question

EXPORTS = Path(__file__).parents[1] / "data" / "exports"
THINGS = (
    "red fox",
    "blue, deep sea",
    'the "old" oak',
    "a; b",
    "Zürich",
    "pipe | line",
    "tab\tstop",
    "it's",
    "naïve",
    "中文",
)
Row = dict[str, Any]
Made = tuple[Any, TableOptions | None]
"""A source, and what must be said to have it read."""


def rows() -> list[Row]:
    """Fifty questions of three or four options, with whatever cells of tables may hold."""
    made = []
    for i in range(50):
        n = 3 + (i % 3 > 0)
        options = [f"{THINGS[(i + 3 * j) % 10]} {j}" for j in range(n)]
        text = f"Number {i}: which is it, {THINGS[i % 10]}?" + ("\nSecond line." if i % 7 == 0 else "")
        made.append(
            {"id": f"q{i}", "question": text, "options": options, "answer": (i * 5) % n, "subject": f"s{i % 4}"}
        )
    return made


def meant() -> list[Question]:
    """The questions that every layout must load to."""
    return [Question(r["id"], r["id"], r["question"], tuple(r["options"]), r["answer"]) for r in rows()]


LETTERS = "ABCD"


def lettered(row: Row) -> Row:
    return {**row, "answer": LETTERS[row["answer"]]}


def without(row: Row, *names: str) -> Row:
    return {name: value for name, value in row.items() if name not in names}


def in_columns(row: Row, names: list[str], answer: Any) -> Row:
    """A row whose options have columns of their own."""
    padded = [*row["options"], *[""] * (len(names) - len(row["options"]))]
    return {**without(row, "options", "answer"), **dict(zip(names, padded, strict=True)), "answer": answer}


# ------------------------------------------------------------------------------------------------------------------- JSON


def lines(folder: Path, made: list[Row], name: str = "q.jsonl", *, bom: bytes = b"") -> Made:
    data = bom + "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made).encode()
    return written(folder / name, data)


def document(folder: Path, value: Any, name: str = "q.json") -> Made:
    return written(folder / name, json.dumps(value, ensure_ascii=False, indent=1).encode())


def written(path: Path, data: bytes) -> Made:
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path, None


def by_label(row: Row, labels: str) -> Row:
    """As ARC has it: texts and labels side by side, and the key is a label."""
    n = len(row["options"])
    choices = {"text": row["options"], "label": list(labels[:n])}
    return {**without(row, "options", "answer"), "choices": choices, "answerKey": labels[row["answer"]]}


def objects(row: Row) -> Row:
    choices = [{"label": LETTERS[j], "text": text} for j, text in enumerate(row["options"])]
    return {**without(row, "options", "answer"), "choices": choices, "answerKey": LETTERS[row["answer"]]}


def nested(row: Row) -> Row:
    """As the files of CommonsenseQA and OpenBookQA have it."""
    flat = objects(row)
    question = {"stem": row["question"], "choices": flat["choices"]}
    return {"id": row["id"], "question": question, "answerKey": flat["answerKey"], "subject": row["subject"]}


def keyed(row: Row) -> Row:
    """As MedQA has it."""
    options = {LETTERS[j]: text for j, text in enumerate(row["options"])}
    return {**row, "options": options, "answer": LETTERS[row["answer"]]}


def valued(row: Row) -> Row:
    """As requests for decisions have it."""
    options = [{"value": text} for text in row["options"]]
    return {**row, "options": options, "answer": row["options"][row["answer"]]}


def transposed(made: list[Row]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in made] for name in made[0]}


JSON: dict[str, Callable[[Path], Made]] = {
    "lines, answers from 0": lambda f: lines(f, rows()),
    "lines, answers from 1": lambda f: lines(f, [{**r, "answer": r["answer"] + 1} for r in rows()]),
    "lines, letters": lambda f: lines(f, [lettered(r) for r in rows()]),
    "lines, small letters": lambda f: lines(f, [{**r, "answer": LETTERS[r["answer"]].lower()} for r in rows()]),
    "lines, texts": lambda f: lines(f, [{**r, "answer": r["options"][r["answer"]]} for r in rows()]),
    "lines, answer_index": lambda f: lines(f, [{**without(r, "answer"), "answer_index": r["answer"]} for r in rows()]),
    "lines, answers of one": lambda f: lines(f, [{**without(r, "answer"), "answers": [r["answer"]]} for r in rows()]),
    "lines, gzipped": lambda f: lines(f, rows(), "q.jsonl.gz"),
    "lines, ndjson": lambda f: lines(f, rows(), "q.ndjson"),
    "lines called json": lambda f: lines(f, rows(), "q.json"),
    "lines, byte order mark": lambda f: lines(f, rows(), bom=b"\xef\xbb\xbf"),
    "a list": lambda f: document(f, rows()),
    "a list, gzipped": lambda f: document(f, rows(), "q.json.gz"),
    "under data": lambda f: document(f, {"version": "1.1", "data": rows()}),
    "under questions": lambda f: document(f, {"questions": rows()}),
    "lists of columns": lambda f: document(f, transposed(rows())),
    "columns by row": lambda f: document(
        f, {name: {str(i): v for i, v in enumerate(values)} for name, values in transposed(rows()).items()}
    ),
    "rows by id": lambda f: document(f, {r["id"]: without(r, "id") for r in rows()}),
    "columns and data": lambda f: document(
        f, {"columns": list(rows()[0]), "index": list(range(50)), "data": [list(r.values()) for r in rows()]}
    ),
    "labels that are letters": lambda f: lines(f, [by_label(r, LETTERS) for r in rows()]),
    "labels that are numbers": lambda f: lines(f, [by_label(r, "1234") for r in rows()]),
    "labels of both kinds": lambda f: lines(
        f, [by_label(r, LETTERS if i % 2 else "1234") for i, r in enumerate(rows())]
    ),
    "options that are objects": lambda f: lines(f, [objects(r) for r in rows()]),
    "a question that is an object": lambda f: lines(f, [nested(r) for r in rows()]),
    "options by letter": lambda f: lines(f, [keyed(r) for r in rows()]),
    "options with values": lambda f: lines(f, [valued(r) for r in rows()]),
}

# --------------------------------------------------------------------------------------------------------------------- CSV


def table(
    folder: Path, made: list[Row], name: str = "q.csv", *, encoding: str = "utf-8", first: str = "", **how: Any
) -> Made:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(made[0]), **{"lineterminator": "\n"} | how)
    writer.writeheader()
    writer.writerows(made)
    return written(folder / name, (first + text.getvalue()).encode(encoding))


def columns(names: list[str], answer: Callable[[Row], Any]) -> list[Row]:
    return [in_columns(row, names, answer(row)) for row in rows()]


def letter(row: Row) -> str:
    return LETTERS[row["answer"]]


def in_cell(write: Callable[[list[str]], str]) -> list[Row]:
    return [{**row, "options": write(row["options"])} for row in rows()]


AD = ["A", "B", "C", "D"]
SAID = TableOptions(columns={"question": "prompt", "answer": "klass", "id": "key", "options": "w+x+y+z"})


def renamed(folder: Path) -> Made:
    made = [
        {
            ("prompt" if k == "question" else "klass" if k == "answer" else "key" if k == "id" else k): v
            for k, v in row.items()
        }
        for row in columns(["w", "x", "y", "z"], letter)
    ]
    return table(folder, made)[0], SAID


CSV: dict[str, Callable[[Path], Made]] = {
    "options as JSON": lambda f: table(f, in_cell(lambda o: json.dumps(o))),
    "options as Python": lambda f: table(f, in_cell(repr)),
    "option_a": lambda f: table(f, columns([f"option_{k}" for k in "abcd"], letter)),
    "Option A": lambda f: table(f, columns([f"Option {k}" for k in AD], letter)),
    "choice0": lambda f: table(f, columns([f"choice{k}" for k in range(4)], lambda r: r["answer"])),
    "option1, answers from 1": lambda f: table(f, columns([f"option{k}" for k in "1234"], lambda r: r["answer"] + 1)),
    "opa": lambda f: table(f, columns([f"op{k}" for k in "abcd"], lambda r: r["answer"])),
    "answerA": lambda f: table(f, columns([f"answer{k}" for k in AD], letter)),
    "A, letters": lambda f: table(f, columns(AD, letter)),
    "A, texts": lambda f: table(f, columns(AD, lambda r: r["options"][r["answer"]])),
    "A, numbers with a point": lambda f: table(f, columns(AD, lambda r: f"{r['answer']}.0")),
    "semicolons of a German Excel": lambda f: table(
        f, columns(AD, letter), delimiter=";", encoding="utf-8-sig", lineterminator="\r\n"
    ),
    "tabs": lambda f: table(f, columns(AD, letter), "q.tsv", delimiter="\t"),
    "tabs called csv": lambda f: table(f, columns(AD, letter), delimiter="\t"),
    "bars between cells": lambda f: table(f, columns(AD, letter), delimiter="|"),
    "everything quoted": lambda f: table(f, columns(AD, letter), quoting=csv.QUOTE_ALL),
    "single quotes": lambda f: table(f, columns(AD, letter), quotechar="'", quoting=csv.QUOTE_ALL),
    "escaped quotes of a database": lambda f: table(
        f, columns(AD, letter), doublequote=False, escapechar="\\", quoting=csv.QUOTE_ALL
    ),
    "Unicode text of Excel": lambda f: table(f, columns(AD, letter), "q.tsv", delimiter="\t", encoding="utf-16"),
    "a line that says sep": lambda f: table(f, columns(AD, letter), delimiter=";", first="sep=;\n"),
    "lines of an old Macintosh": lambda f: table(f, columns(AD, letter), lineterminator="\r"),
    "gzipped": lambda f: table(f, columns(AD, letter), "q.csv.gz"),
    "other names": renamed,
}

# ------------------------------------------------------------------------------------------------------ libraries and programs


def pandas_frame() -> Any:
    import pandas as pd

    return pd.DataFrame(rows())


def pandas_csv(folder: Path) -> Made:
    """With its index, and the options as it writes lists."""
    pandas_frame().to_csv(folder / "q.csv")
    return folder / "q.csv", None


def pandas_json(orient: str) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        pandas_frame().to_json(folder / "q.json", orient=orient, force_ascii=False)
        return folder / "q.json", None

    return make


def pandas_parquet(folder: Path) -> Made:
    pandas_frame().to_parquet(folder / "q.parquet")
    return folder / "q.parquet", None


def gaps_in_pandas(_: Path) -> Made:
    """A column of numbers with a gap holds floats, and what is missing is no number."""
    import pandas as pd

    frame = pd.DataFrame(columns(AD, lambda r: r["answer"]))
    frame.loc[frame["D"] == "", "D"] = None
    frame["answer"] = frame["answer"].astype(float)
    return frame, None


def polars_frame() -> Any:
    import polars as pl

    return pl.DataFrame(rows())


def polars_file(name: str) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        import polars as pl

        if name.endswith(".parquet"):
            polars_frame().write_parquet(folder / name)
        elif name.endswith(".arrow"):
            polars_frame().write_ipc(folder / name)
        elif name.endswith(".jsonl"):
            polars_frame().write_ndjson(folder / name)
        else:
            pl.DataFrame(columns(AD, letter)).write_csv(folder / name)
        return folder / name, None

    return make


def dataset() -> Any:
    from datasets import Dataset

    return Dataset.from_list([by_label(row, LETTERS) for row in rows()])


def saved_dataset(folder: Path) -> Made:
    dataset().save_to_disk(str(folder / "saved"))
    return folder / "saved", None


def arrow_table() -> Any:
    import pyarrow as pa

    return pa.Table.from_pylist(rows())


def arrow_file(name: str, *, stream: bool = False) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        import pyarrow as pa

        made, out = arrow_table(), io.BytesIO()
        with (pa.ipc.new_stream if stream else pa.ipc.new_file)(out, made.schema) as writer:
            writer.write_table(made, max_chunksize=7)
        return written(folder / name, out.getvalue())

    return make


def parquet_gz(folder: Path) -> Made:
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(arrow_table(), out)
    return written(folder / "q.parquet.gz", out.getvalue())


def workbook(path: Path) -> None:
    """Write the questions as somebody would in Excel: numbers are numbers, and empty cells are empty."""
    from openpyxl import Workbook

    book = Workbook()
    sheet = book.active
    made = columns(AD, lambda row: row["answer"] + 1)
    sheet.append(list(made[0]))
    for row in made:
        sheet.append([None if value == "" else value for value in row.values()])
    book.save(path)


def excel(folder: Path) -> Made:
    workbook(folder / "q.xlsx")
    return folder / "q.xlsx", None


LIBRARIES: dict[str, Callable[[Path], Made]] = {
    "list of dicts": lambda _: (rows(), None),
    "pandas frame": lambda _: (pandas_frame(), None),
    "pandas frame with gaps": gaps_in_pandas,
    "pandas CSV": pandas_csv,
    "pandas JSON": pandas_json("columns"),
    "pandas JSON, records": pandas_json("records"),
    "pandas JSON, split": pandas_json("split"),
    "pandas JSON, table": pandas_json("table"),
    "pandas parquet": pandas_parquet,
    "polars frame": lambda _: (polars_frame(), None),
    "polars CSV": polars_file("q.csv"),
    "polars parquet": polars_file("q.parquet"),
    "polars Arrow": polars_file("q.arrow"),
    "polars lines": polars_file("q.jsonl"),
    "datasets in memory": lambda _: (dataset(), None),
    "datasets folder": saved_dataset,
    "Arrow in memory": lambda _: (arrow_table(), None),
    "Arrow file": arrow_file("q.arrow"),
    "Arrow stream": arrow_file("q.arrow", stream=True),
    "Arrow file, gzipped": arrow_file("q.arrow.gz"),
    "feather": arrow_file("q.feather"),
    "parquet, gzipped": parquet_gz,
    "openpyxl workbook": excel,
}
NAMES = ("openpyxl.xlsx", "libreoffice.xlsx", "libreoffice.csv", "libreoffice-semicolons.csv", "libreoffice-tabs.tsv",
         "libreoffice-utf16.csv", "libreoffice-unquoted.csv")  # fmt: skip
PROGRAMS: dict[str, Callable[[Path], Made]] = {name: lambda _, name=name: (EXPORTS / name, None) for name in NAMES}
LAYOUTS = {**JSON, **CSV, **LIBRARIES, **PROGRAMS}

# ------------------------------------------------------------------------------------------- the exports of programs, made again

FILTERS = {
    "libreoffice.xlsx": "xlsx",
    "libreoffice.csv": "csv:Text - txt - csv (StarCalc):44,34,76,1",
    "libreoffice-semicolons.csv": "csv:Text - txt - csv (StarCalc):59,34,76,1",
    "libreoffice-tabs.tsv": "csv:Text - txt - csv (StarCalc):9,34,76,1",
    "libreoffice-utf16.csv": "csv:Text - txt - csv (StarCalc):59,34,65535,1",
    "libreoffice-unquoted.csv": "csv:Text - txt - csv (StarCalc):44,34,76,1,,0,false",
}
"""How LibreOffice calls its exports: separator, quotes and encoding are numbers."""


def make_exports() -> Iterator[str]:
    """Write the exports of openpyxl and LibreOffice."""
    EXPORTS.mkdir(exist_ok=True)
    source = EXPORTS / "openpyxl.xlsx"
    workbook(source)
    yield source.name
    for name, how in FILTERS.items():
        out = EXPORTS / "made"
        subprocess.run(["soffice", "--headless", "--convert-to", how, "--outdir", str(out), str(source)], check=True)
        made = next(out.iterdir())
        made.replace(EXPORTS / name)
        out.rmdir()
        yield name


if __name__ == "__main__":
    for exported in make_exports():
        print(exported)
