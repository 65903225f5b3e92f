"""Probabilities are read from every layout in which people have them, to the same numbers, and what is none is named."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.audits import CLASSES, Row, lines, rows

from coral_lens.audit.systems import AuditedSet
from coral_lens.audit.tables import read_table
from coral_lens.data.settings import TableOptions
from coral_lens.errors import CoralError
from coral_lens.metrics.scores import score

N = 30
Write = Callable[[Path], Any]


def without(row: Row, *names: str) -> Row:
    return {name: value for name, value in row.items() if name not in names}


def by_class(row: Row, prefix: str = "prob_") -> Row:
    return without(row, "probs", "options") | {
        f"{prefix}{c}": p for c, p in zip(row["options"], row["probs"], strict=True)
    }


def as_csv(path: Path, made: list[Row], delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(made[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(made)
    return path


def in_cells(row: Row) -> Row:
    return row | {name: json.dumps(row[name]) for name in ("options", "probs")}


def saved_dataset(folder: Path) -> Path:
    Dataset.from_list(rows(N)).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def parquet(folder: Path) -> Path:
    pd.DataFrame(rows(N)).to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


LAYOUTS: dict[str, Write] = {
    "lines": lambda folder: lines(folder / "a.jsonl", rows(N)),
    "one document": lambda folder: lines(folder / "a.json", [rows(N)]),  # type: ignore[list-item]
    "rows in Python": lambda _: rows(N),
    "labels by index": lambda _: [r | {"label": CLASSES.index(r["label"])} for r in rows(N)],
    "labels by letter": lambda _: [r | {"label": "ABCD"[CLASSES.index(r["label"])]} for r in rows(N)],
    "labels by place": lambda _: [without(r, "label") | {"answer_index": CLASSES.index(r["label"])} for r in rows(N)],
    "by option": lambda _: [
        without(r, "options") | {"probs": dict(zip(CLASSES, r["probs"], strict=True))} for r in rows(N)
    ],
    "by option, in another order": lambda _: [
        r | {"probs": dict(reversed(list(zip(CLASSES, r["probs"], strict=True))))} for r in rows(N)
    ],
    "other names": lambda _: [
        without(r, "probs", "label") | {"predicted_probabilities": r["probs"], "gold": r["label"]} for r in rows(N)
    ],
    "rounded": lambda _: [r | {"probs": [round(p, 4) for p in r["probs"]]} for r in rows(N)],
    "cells of CSV": lambda folder: as_csv(folder / "a.csv", [in_cells(r) for r in rows(N)]),
    "a column for each class": lambda folder: as_csv(folder / "a.csv", [by_class(r) for r in rows(N)]),
    "classes, with semicolons": lambda folder: as_csv(folder / "a.csv", [by_class(r, "p_") for r in rows(N)], ";"),
    "classes, with tabs": lambda folder: as_csv(folder / "a.tsv", [by_class(r, "proba_") for r in rows(N)], "\t"),
    "parquet": parquet,
    "a saved dataset": saved_dataset,
    "a dataset": lambda _: Dataset.from_list(rows(N)),
    "a frame of pandas": lambda _: pd.DataFrame(rows(N)),
    "a frame of pandas with classes": lambda _: pd.DataFrame([by_class(r) for r in rows(N)]),
    "a frame of polars": lambda _: pl.DataFrame(rows(N)),
}


def read(source: Any, said: TableOptions | None = None) -> AuditedSet:
    (found,) = read_table(source, said or TableOptions(), name="mine")
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_says_the_same(tmp_path: Path, layout: str) -> None:
    found = read(LAYOUTS[layout](tmp_path))
    (predictions,) = found.systems.values()
    assert [CLASSES[a] for a in predictions.answers] == [r["label"] for r in rows(N)]
    expected = np.concatenate([r["probs"] for r in rows(N)])
    assert predictions.probs == pytest.approx(expected, abs=1e-4 if layout == "rounded" else 1e-12)
    assert [q.id for q in found.questions] == [r["id"] for r in rows(N)]
    assert {q.options for q in found.questions} == {CLASSES}
    assert found.column("topic") == [r["topic"] for r in rows(N)]


def test_columns_may_be_named() -> None:
    made = [without(r, "probs", "label") | {"p": r["probs"], "wanted": r["label"]} for r in rows(N)]
    found = read(made, TableOptions(columns={"probs": "p", "answer": "wanted"}))
    assert [CLASSES[q.answer] for q in found.questions] == [r["label"] for r in rows(N)]


def test_columns_of_ids_groups_and_questions_may_be_named_and_belong_to_the_questions() -> None:
    made = [without(r, "id", "question") | {"key": r["id"], "asked": r["question"], "id": "same"} for r in rows(N)]
    made = [r | {"article": f"a{i // 3}"} for i, r in enumerate(made)]
    found = read(made, TableOptions(columns={"id": "key", "group": "article", "question": "asked"}))
    assert [q.id for q in found.questions] == [r["id"] for r in rows(N)]
    assert [q.text for q in found.questions] == [r["question"] for r in rows(N)]
    (predictions,) = found.systems.values()
    assert predictions.groups == tuple(f"a{i // 3}" for i in range(N)), "intervals draw whole articles"
    unnamed = read([without(r, "key") for r in made], TableOptions(columns={"id": ""}))
    assert len({q.id for q in unnamed.questions}) == N, "a column that holds no ids can be said to be none"


def test_the_probability_of_yes_is_a_distribution_of_two() -> None:
    found = read(
        [{"probability": 0.9, "label": True}, {"probability": 0.3, "label": False}, {"probability": 1, "label": 0}]
    )
    (predictions,) = found.systems.values()
    assert predictions.probs.tolist() == pytest.approx([0.1, 0.9, 0.7, 0.3, 0.0, 1.0])
    assert predictions.answers.tolist() == [1, 0, 0]
    assert {q.kind for q in found.questions} == {"yes-no"}


@pytest.mark.parametrize("confidence", [0.0, 0.0004, 0.2, 0.25, 1 / 3, 0.5, 0.51, 0.9, 1.0])
@pytest.mark.parametrize("right", [True, False])
def test_a_confidence_alone_keeps_what_is_said_and_whether_it_is_right(confidence: float, right: bool) -> None:
    (said,) = read([{"confidence": confidence, "correct": right}] * 1).systems.values()
    assert score(said, "accuracy") == float(right)
    assert said.probs.max() == pytest.approx(max(confidence, 1e-3))


def test_a_number_is_the_same_answer_as_a_data_frame_writes_it_beside_a_gap() -> None:
    frame = pd.DataFrame({"confidence": [0.8, 0.7, 0.6], "prediction": [1.0, 2.0, None], "label": [1, 3, 2]})
    found = read(frame, TableOptions(skip_bad=True))
    (said,) = found.systems.values()
    assert score(said, "accuracy") == 0.5


def test_a_confidence_may_stand_beside_what_was_answered() -> None:
    found = read(
        [{"confidence": 0.8, "prediction": "a", "label": "a"}, {"confidence": 0.7, "prediction": "b", "label": "a"}]
    )
    assert found.top_only
    (said,) = found.systems.values()
    assert said.answers.tolist() == [0, 1]


def test_rows_that_name_their_systems_are_one_set_for_each() -> None:
    made = [r | {"model": name} for name in ("one", "two") for r in rows(4)]
    sets = read_table(made, TableOptions(), name="mine")
    assert [list(s.systems) for s in sets] == [["one"], ["two"]]
    assert [len(s.questions) for s in sets] == [4, 4]


def test_a_cell_may_hold_several_systems() -> None:
    found = read([r | {"probs": {"one": r["probs"], "two": [0.25] * 4}} for r in rows(4)])
    assert list(found.systems) == ["one", "two"]
    assert set(found.systems["two"].probs) == {0.25}


def test_answers_of_a_lens_are_compared_with_the_model_as_it_is() -> None:
    found = read([r | {"base_probs": [0.25] * 4, "lens": "mine"} for r in rows(4)])
    assert list(found.systems) == ["mine", "base"]


BROKEN: dict[str, tuple[Row, str]] = {
    "a sum that is not 1": ({"probs": [0.5, 0.2, 0.1, 0.1]}, r"line 3, .*probs.*sum to 0\.9"),
    "a negative one": ({"probs": [1.2, -0.2, 0.0, 0.0]}, "line 3.*from 0 to 1"),
    "no number": ({"probs": ["a", "b", "c", "d"]}, "line 3.*list of probabilities is expected"),
    "not a list": ({"probs": 3}, "line 3.*list of probabilities is expected"),
    "one alone": ({"probs": [1.0]}, "line 3.*two or more"),
    "too few": ({"probs": [0.5, 0.5]}, "line 3.*4 options have 2 probabilities"),
    "not a number": ({"probs": [float("nan"), 1.0, 0.0, 0.0]}, "line 3"),
    "nothing": ({"probs": None}, "line 3.*no probabilities"),
    "another label": ({"label": "sapm"}, "line 3.*'?sapm"),
    "a label out of range": ({"label": 7}, "line 3.*7"),
    "no label": ({"label": None}, "line 3.*have no label"),
    "an id twice": ({"id": "q0"}, "line 3.*'q0' comes twice"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_what_cannot_be_read_is_named_by_its_line(tmp_path: Path, broken: str) -> None:
    change, complaint = BROKEN[broken]
    made = rows(5)
    made[2] |= change
    with pytest.raises(CoralError, match=complaint) as raised:
        read(lines(tmp_path / "a.jsonl", made))
    assert "a.jsonl" in str(raised.value)


def test_bad_rows_are_left_out_if_asked_for() -> None:
    made = rows(5)
    made[2] |= {"probs": [0.5, 0.2, 0.1, 0.1]}
    assert len(read(made, TableOptions(skip_bad=True)).questions) == 4


def test_a_table_without_probabilities_says_how_to_name_them(tmp_path: Path) -> None:
    with pytest.raises(CoralError, match=r"no probabilities; found question, label.*--columns probs=NAME"):
        read(lines(tmp_path / "a.jsonl", [{"question": "Why?", "label": "a"}]))
    with pytest.raises(CoralError, match="unknown part 'prob'"):
        read(rows(3), TableOptions(columns={"prob": "x"}))
    with pytest.raises(CoralError, match="there is no 'x', which --columns takes for the probs"):
        read(rows(3), TableOptions(columns={"probs": "x"}))
    with pytest.raises(CoralError, match="needs `correct`, or `prediction` and `label`"):
        read([{"confidence": 0.5}])


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-3, 3) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["probs", "label", "options", "id", "confidence", "correct", "probability", "kind", "system",
                         "prob_a", "prob_b", "answers", "type", "probabilities", "response"])  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.dictionaries(NAMES, JSON, max_size=5), max_size=3))
def test_no_rows_whatever_raise_anything_but_a_coral_error(made: list[Row]) -> None:
    try:
        sets = read_table(made, TableOptions(), name="mine")
    except CoralError:
        return
    assert all(np.isfinite(p.probs).all() for one in sets for p in one.systems.values())
