"""The paper's own numbers, put through our tables in its shape, come out as the paper prints them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from coral_lens.metrics.scores import METRICS, Metrics, Score
from coral_lens.report.tables.paper import COLUMNS, MODELS, load_paper_numbers
from coral_lens.report.tables.paper_shape import (
    OURS,
    ROWS,
    STEERING,
    TRANSFER,
    abstract_means,
    model_names,
    our_panel,
    paper_panel,
    shape_latex,
    shape_markdown,
    table_one,
    table_two,
)
from coral_lens.report.tables.study import StudyRow, StudyTable, improvements, row_label

NAMES = {"MMLU": "mmlu:test held out of mmlu", "RACE": "race_question:test", "CommonsenseQA": "commonsense_qa:validation",
         "ARC-Challenge": "arc_challenge:test", "HellaSwag": "hellaswag:validation", "OpenBookQA": "openbookqa:test",
         "Math-MC": "math_mc:test"}  # fmt: skip
HUB = {name: hub for hub, name in MODELS.items()}


def table_of(model: str, task: str, *, methods: tuple[str, ...] = tuple(ROWS), **more: object) -> StudyTable:
    """What the paper prints of a model on a task, as if a study of ours had measured it."""
    rows = []
    for method in methods:
        numbers = {n.metric: n.value / 100 for n in load_paper_numbers(task=task, model=model, method=method)}
        values = {OURS[c]: numbers[c] for c in COLUMNS}
        scores = {m: Score(v := values.get(m, 0.5), v - 0.02, v + 0.02) for m in METRICS}
        rows.append(StudyRow(ROWS[method], Metrics(method, "", "", "", 2000, 0, 0.01, 25, 100, 0, scores), {}))
    kind = "held-out" if task in STEERING else "transfer"
    about = {"n_questions": 2000, "comparisons": (), "shots": 5} | more
    return StudyTable(HUB[model], "mix", NAMES[task], kind, rows=tuple(rows), **about)  # type: ignore[arg-type]


def everything() -> list[StudyTable]:
    return [table_of(model, task) for model in MODELS.values() for task in (*STEERING, *TRANSFER)]


def test_every_value_and_all_but_ten_marks_come_out_as_the_paper_prints_them() -> None:
    """Ten of its marks are wrong by its own numbers, which docs/paper-audit.md lists."""
    wrong = 0
    for model in MODELS.values():
        for task in (*STEERING, *TRANSFER):
            ours, theirs = our_panel(table_of(model, task), heading=""), paper_panel(task, model, heading="")
            assert [row.label for row in ours.rows] == ["SteerConf", "Few-shot", "ITI", "CCPS", "CORAL"]
            for mine, printed in zip(ours.rows, theirs.rows, strict=True):
                for column in COLUMNS:
                    a, b = mine.cells[column], printed.cells[column]
                    assert a.value == b.value
                    wrong += (a.best, a.second) != (b.best, b.second)
    # each wrong mark makes two cells differ, where another should have had it; ties share one
    assert 10 <= wrong <= 20


def test_table_1_has_benchmark_blocks_and_table_2_model_blocks() -> None:
    tables, models = everything(), list(MODELS)
    first = table_one(tables, models)
    assert [block.title for block in first] == list(STEERING)
    assert [p.heading for p in first[0].panels] == [*MODELS.values(), *MODELS.values()]
    assert [p.ours for p in first[0].panels] == [True] * 3 + [False] * 3
    second = table_two(tables, models)
    assert [block.title for block in second][:3] == list(MODELS.values())
    assert [p.heading for p in second[0].panels] == list(TRANSFER)
    assert first[0].panels[0].about == "2,000 questions, 5 shots"


def test_models_of_one_name_are_called_by_as_much_of_their_folders_as_tells_them_apart() -> None:
    names = model_names(["a/run1/model", "a/run2/model", "b/other", "smollm2", next(iter(MODELS))])
    assert list(names.values()) == ["run1/model", "run2/model", "other", "smollm2", next(iter(MODELS.values()))]
    assert model_names(["/x/same/m", "/y/same/m", "m"]) == {m: m for m in ("/x/same/m", "/y/same/m", "m")}, (
        "all of the path"
    )
    assert model_names(["m/", "m"]) == {"m/": "m/", "m": "m"}


def test_what_was_not_run_is_a_dash_and_has_no_mark() -> None:
    some = table_of("Deepseek-7B-Chat", "RACE", methods=("Fewshot", "CORAL"), shots=0)
    panel = our_panel(some, heading="x")
    assert [row.label for row in panel.rows] == ["SteerConf", "0-shot", "ITI", "CCPS", "CORAL"]
    assert {cell.value for cell in panel.rows[0].cells.values()} == {"—"}
    assert panel.rows[4].cells["Acc"].best
    assert panel.rows[1].cells["Acc"].second
    assert panel.rows[4].cells["Acc"].interval == "71.1 to 75.1"
    assert our_panel(None, heading="x").about == "not run"


def test_the_means_are_those_of_the_abstract_and_mathqa_has_no_part_in_them() -> None:
    means = abstract_means(everything())
    assert (means["held-out"].n_cells, means["transfer"].n_cells) == (9, 12)
    assert means["held-out"].means == pytest.approx({"accuracy": 0.1009, "ece": 0.4911}, abs=1e-4)
    assert means["transfer"].means["accuracy"] == pytest.approx(0.1391, abs=1e-4)
    mathqa = table_of("Deepseek-7B-Chat", "RACE")
    apart = replace(mathqa, test="mathqa:test", kind="transfer", apart=True)
    assert abstract_means([*everything(), apart]) == means
    # and in the summary of a study, the same test has none either
    transfer = [t for t in everything() if t.kind == "transfer"]
    assert improvements([*transfer, apart]) == improvements(transfer)
    assert improvements([apart])[0].n_cells == 1, "alone it is all there is"


def test_the_unsteered_row_is_called_0_shot_where_there_are_no_shots() -> None:
    assert row_label("base", 0) == "0-shot"
    assert row_label("base", 5) == row_label("base") == "Few-shot"
    assert row_label("coral", 0) == "CORAL"


def test_latex_and_markdown_have_the_papers_shape() -> None:
    blocks = table_one(everything(), list(MODELS)[:1])
    latex = shape_latex(blocks)
    assert latex.count(r"\begin{tabular}{@{}l ccccc@{}}") == 3 * 4
    assert latex.count(r"\rowcolor{blue!5} CORAL & ") == 3 * 4
    assert r"CORAL & \textbf{64.22} & \textbf{3.27} & \textbf{2.83} & \textbf{54.30} & \textbf{17.92} \\" in latex
    assert r"Few-shot & \underline{61.34} & 18.46" in latex
    assert latex.count("{") == latex.count("}")
    markdown = shape_markdown(blocks)
    line = next(line for line in markdown.splitlines() if line.startswith("| CORAL"))
    assert len(re.findall(r"\|", line)) == 2 + 4 * 5
    assert "**64.22** [62.2 to 66.2]" in line
