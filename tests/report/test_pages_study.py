"""The tables of a study: the paper's averages, its marks for best and second best, and text that LaTeX can read."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from typing import Any

import pytest

from coral_lens.metrics.scores import METRICS, Metrics, Score
from coral_lens.report.pages.study import improvement_picture, render_study, study_headline, study_pictures
from coral_lens.report.tables.paper import paper_tables as paper_numbers
from coral_lens.report.tables.study import COLUMNS, StudyRow, StudyTable, improvements
from coral_lens.report.tables.study_formats import study_csv, study_latex, study_markdown, study_record

PAPER = {
    # test, model: few-shot accuracy and ECE, CORAL's accuracy and ECE (the paper's table of steering results)
    ("MMLU", "Mistral"): (61.34, 18.46, 64.22, 3.27),
    ("MMLU", "Qwen"): (73.19, 16.36, 74.23, 4.23),
    ("MMLU", "Deepseek"): (50.84, 22.12, 53.97, 6.21),
    ("RACE", "Mistral"): (61.43, 3.18, 74.93, 3.08),
    ("RACE", "Qwen"): (58.37, 10.60, 71.04, 3.46),
    ("RACE", "Deepseek"): (55.67, 4.40, 73.06, 2.62),
    ("CommonsenseQA", "Mistral"): (73.71, 15.00, 74.38, 8.78),
    ("CommonsenseQA", "Qwen"): (84.68, 12.16, 85.01, 10.27),
    ("CommonsenseQA", "Deepseek"): (70.52, 15.71, 72.17, 8.54),
}


def metrics_of(method: str, **values: float) -> Metrics:
    scores = {name: Score(v := values.get(name, 0.5), v - 0.01, v + 0.01) for name in METRICS}
    return Metrics(method, "m", "t", "s", 2000, 0, 0.01, 25, 100, 0, scores)


def table_of(test: str, model: str, rows: dict[str, dict[str, float]], **more: Any) -> StudyTable:
    found = tuple(StudyRow(method, metrics_of(method, **values), {}) for method, values in rows.items())
    about: dict[str, Any] = {"kind": "held-out", "n_questions": 2000, "comparisons": ()} | more
    return StudyTable(model, "mix", test, rows=found, **about)


def paper_tables() -> list[StudyTable]:
    return [
        table_of(
            test,
            model,
            {
                "base": {"accuracy": a / 100, "ece": b / 100},
                "coral": {"accuracy": c / 100, "ece": d / 100},
            },
        )
        for (test, model), (a, b, c, d) in PAPER.items()
    ]


def test_the_papers_numbers_average_to_its_abstract() -> None:
    """'improves accuracy by 10 % and expected calibration error by 50 % on average'."""
    (one,) = improvements(paper_tables())
    assert (one.method, one.n_cells) == ("coral", 9)
    assert one.means["accuracy"] == pytest.approx(0.10, abs=0.005)
    assert one.means["ece"] == pytest.approx(0.49, abs=0.005)
    # by hand: CommonsenseQA with Qwen, 85.01 / 84.68 - 1; RACE with Deepseek, 73.06 / 55.67 - 1
    assert one.worst["accuracy"] == pytest.approx(0.0039, abs=1e-4)
    assert one.best["accuracy"] == pytest.approx(0.3124, abs=1e-4)
    (said,) = study_headline(paper_tables())
    assert said.endswith(
        "accuracy changed relative to the unsteered model (mean of 9): CORAL +10.1 %. ECE: CORAL −49.1 %."
    )


def test_kinds_of_tests_are_averaged_apart_and_a_perfect_base_has_no_relative_change() -> None:
    rows = {"base": {"accuracy": 0.5, "ece": 0.0}, "coral": {"accuracy": 0.4, "ece": 0.1}}
    tables = [table_of("a", "m", rows), table_of("b", "m", rows, kind="transfer")]
    held_out, transfer = improvements(tables)
    assert (held_out.kind, transfer.kind) == ("held-out", "transfer")
    assert held_out.means == {"accuracy": pytest.approx(-0.2)}
    assert "n/a" in study_markdown("x", tables)


ROWS = {
    "base": {"accuracy": 0.50, "ece": 0.20, "brier": 0.6},
    "temperature": {"accuracy": 0.50, "ece": 0.05, "brier": 0.5},
    "coral": {"accuracy": 0.60, "ece": 0.10, "brier": 0.4},
}


def test_bold_is_what_leads_in_the_table_of_the_run_and_not_the_largest_value() -> None:
    table = table_of("csqa:validation", "org/a_b", ROWS, best={"accuracy": ("coral",), "ece": ()})
    text = study_markdown("x", [table])
    assert "**60.0** [59.0 to 61.0]" in text
    assert "| 5.0 [4.0 to 6.0]" in text  # the smallest ECE leads nothing
    assert "<u>" not in text
    assert r"\textbf{60.0} {\scriptsize [59.0 to 61.0]}" in study_latex([table])


def test_ece_is_marked_below_a_thousand_questions() -> None:
    table = table_of("x:test", "m", ROWS, n_questions=999)
    assert "ECE ↓ †" in study_markdown("x", [table])
    (_, coral) = improvements([table])
    assert not coral.ranks
    assert "+50.0 % † [+50.0 to +50.0]" in study_markdown("x", [table])
    assert "too few questions to rank methods by ECE" in study_headline([table])[0]


COMPARISON = {
    "method": "coral",
    "against": "base",
    "differences": {name: {"value": 0.1, "low": -0.02, "high": None, "p_value": 0.3} for name in COLUMNS},
    "p_values": {"accuracy": 0.0001},
}


def test_differences_stand_below_the_methods_with_their_corrected_p_values() -> None:
    table = table_of("x:test", "m", ROWS, comparisons=(COMPARISON,))
    line = next(line for line in study_markdown("x", [table]).splitlines() if "CORAL − Few-shot" in line)
    assert "+10.0 ▲ [−2.0 to n/a] (p < 0.001)" in line
    assert r"CORAL $-$ Few-shot & +10.0 {\scriptsize [$-$2.0 to n/a] p $<$ 0.001}" in study_latex([table])
    rows = list(csv.DictReader(io.StringIO(study_csv([table]))))
    (row,) = [r for r in rows if r["against"] == "base" and r["metric"] == "accuracy"]
    assert (row["value"], row["high"], row["p_holm"]) == ("0.1", "", "0.0001")


def test_clear_gains_and_losses_are_counted_by_their_corrected_p_values() -> None:
    worse = COMPARISON | {"p_values": {"accuracy": 0.2, "brier": 0.049, "nll": 0.05}}
    tables = [table_of(f"{i}:test", "m", ROWS, comparisons=(c,)) for i, c in enumerate((COMPARISON, COMPARISON, worse))]
    coral = next(i for i in improvements(tables) if i.method == "coral")
    # every difference is +0.1: a gain in accuracy, a loss in Brier
    assert coral.verdicts == {"accuracy": (2, 0), "brier": (0, 1), "nll": (0, 0)}
    assert "| 2 better | 1 worse | none |" in study_markdown("x", tables)
    temperature = next(i for i in improvements(tables) if i.method == "temperature")
    assert set(temperature.verdicts.values()) == {(0, 0)}


def test_a_mean_in_the_headline_has_its_interval() -> None:
    """By hand: half of each interval is 10 % of the base; two models share a test, so their errors add up: 10 % of both."""

    def compared(width: float) -> dict[str, Any]:
        difference = {"value": 0.1, "low": 0.1 - width, "high": 0.1 + width, "p_value": 0.01}
        return COMPARISON | {"differences": dict.fromkeys(COLUMNS, difference)}

    tables = [table_of("t", model, ROWS, comparisons=(compared(0.05),)) for model in ("a", "b")]
    coral = next(i for i in improvements(tables) if i.method == "coral")
    assert coral.intervals["accuracy"] == pytest.approx((0.2 - 0.1, 0.2 + 0.1))
    apart = [replace(t, test=t.model) for t in tables]
    coral = next(i for i in improvements(apart) if i.method == "coral")
    assert coral.intervals["accuracy"] == pytest.approx((0.2 - 0.1 / 2**0.5, 0.2 + 0.1 / 2**0.5))
    assert "CORAL +20.0 % (+10.0 to +30.0)" in study_headline(tables)[0]


def test_latex_escapes_what_it_would_take_for_its_own_and_closes_what_it_opens() -> None:
    source = study_latex([table_of("a_b:test 100% & {more} #1", "org/x", ROWS)])
    lines = [line for line in source.splitlines() if not line.startswith("%")]
    assert r"a\_b:test 100\% \& \{more\} \#1" in source
    assert source.count(r"\begin{tabular}") == source.count(r"\end{tabular}") == 1
    for line in lines:
        bare = re.sub(r"\\[{}&]", "", line)
        assert bare.count("{") == bare.count("}")
        if line.endswith(r"\\") and "multicolumn" not in line:
            assert bare.count("&") == len(COLUMNS)


def test_a_spread_over_seeds_stands_beside_the_value() -> None:
    rows = (StudyRow("base", metrics_of("base"), {}), StudyRow("coral", metrics_of("coral"), {"accuracy": 0.012}))
    table = StudyTable("m", "mix", "t:test", "transfer", 2000, rows, ())
    assert "(± 1.2)" in study_markdown("x", [table])
    assert r"$\pm$ 1.2" in study_latex([table])


def test_both_families_of_brier_and_nll_and_the_floor_of_ece_and_the_zeros_are_in_every_table() -> None:
    corrected = replace(metrics_of("coral"), n_zero_answer=3, ece_floor=0.043)
    rows = (StudyRow("base", metrics_of("base"), {}), StudyRow("coral", corrected, {"ece": 0.002}))
    text = study_markdown("x", [StudyTable("m", "mix", "t:test", "transfer", 2000, rows, ())])
    assert "| Brier ↓ | NLL ↓ | Brier (top-1) ↓ | NLL (top-1) ↓ |" in text
    assert "(± 0.2, floor 4.3)" in text
    assert "(3 zeros)" in text


def test_the_papers_numbers_stand_beside_those_of_its_own_models_and_for_scale_beside_others() -> None:
    sources = {"RACE (race_question:test)": "race_question:test", "mine.jsonl": "mine.jsonl"}
    (same,) = paper_numbers(["smollm2", "Qwen/Qwen2.5-7B-Instruct"], sources)
    assert (same.task, same.same_model, len(same.rows)) == ("RACE", True, 5)
    (coral,) = [row for row in same.rows if row.label.startswith("CORAL")]
    assert (coral.cells["Acc"].value, coral.cells["ECE"].value) == ("71.04", "3.46")
    (others,) = paper_numbers(["smollm2"], sources)
    assert (others.same_model, len(others.rows)) == (False, 2 * 3)
    table = table_of("race_question:test", "smollm2", ROWS)
    text = study_markdown("x", [table], [others])
    assert "| CORAL, Deepseek-7B-Chat | **73.06** |" in text
    assert "| the paper | held-out | CORAL, as its abstract says | 3 × 3 | +10 % | +50 % | not tested |" in text


def test_the_page_shows_tables_figures_and_what_was_dropped() -> None:
    tables = paper_tables()
    record = {
        "name": "probe <1>",
        "study": {"seed": 0},
        "mixtures": {"mix": {"dropped": {"MMLU": 7}}},
        "tests": {"MMLU": {"source": "mmlu:test"}},
        "versions": {},
    }
    page = render_study(record, tables, study_pictures(tables), [("Mistral", "runs/Mistral/mix/report.html")])
    assert "probe &lt;1&gt;" in page
    assert page.count("<svg") == 1
    assert "The paper on MMLU" in page
    assert "<dt>dropped · MMLU</dt><dd>7</dd>" in page
    assert page.count('<details class="fold">') == 4


def test_the_figure_of_improvements_is_drawn_alike_twice() -> None:
    first, second = (improvement_picture(paper_tables(), 0) for _ in range(2))
    assert first.png() == second.png()
    assert "coral" in first.alt.lower()


def test_json_has_no_nan() -> None:
    table = table_of("x", "m", {"base": {"accuracy": 0.5, "auroc": float("nan")}})
    found = study_record([table])["tables"][0]["methods"]["base"]["scores"]["auroc"]
    assert found == {"value": None, "low": None, "high": None}


def test_names_of_any_kind_break_neither_markdown_nor_latex_nor_csv() -> None:
    nasty = "=a|b\n[x](http://y) 100% \\end{tabular} `z` <b>"
    table, plain = (table_of(name, name, {"base": {}, name: {}}) for name in (nasty, "plain"))
    markdown = study_markdown(nasty, [table])
    bars, plain_bars = (
        [line.count("|") - line.count("\\|") for line in text.splitlines()]
        for text in (markdown, study_markdown("plain", [plain]))
    )
    assert bars == plain_bars
    assert "[x](" not in markdown
    assert "<b>" not in markdown.replace("\\<b>", "")
    latex = "\n".join(line for line in study_latex([table]).splitlines() if not line.startswith("%"))
    assert latex.count(r"\end{tabular}") == 1
    cells = [cell for row in csv.reader(io.StringIO(study_csv([table]))) for cell in row]
    assert not [cell for cell in cells if cell.startswith("=")]
