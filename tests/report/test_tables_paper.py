"""The paper's numbers are complete, in range and found by name; a few are pinned as they are printed."""

import itertools
from collections import Counter
from math import isfinite

import pytest

from coral_lens.errors import CoralError
from coral_lens.report.tables.paper import COLUMNS, METHODS, load_paper_numbers, load_stated_numbers

MODELS = ("Mistral-7B-Instruct-v0.3", "Qwen2.5-7B-Instruct", "Deepseek-7B-Chat")
TASKS = {
    "tab:steering_results": ("MMLU", "RACE", "CommonsenseQA"),
    "tab:transfer_results": ("ARC-Challenge", "HellaSwag", "OpenBookQA", "Math-MC"),
}
CELLS = load_paper_numbers()
STATED = load_stated_numbers()


def value(task: str, model: str, method: str, metric: str) -> float:
    (cell,) = (c for c in load_paper_numbers(task=task, model=model, method=method) if c.metric == metric)
    return cell.value


def test_every_table_has_every_model_method_and_column_of_its_tasks_exactly_once() -> None:
    found = Counter((c.table, c.task, c.model, c.method, c.metric) for c in CELLS)
    expected = {
        cell for table, tasks in TASKS.items() for cell in itertools.product([table], tasks, MODELS, METHODS, COLUMNS)
    }
    assert set(found) == expected
    assert set(found.values()) == {1}
    assert Counter(c.table for c in CELLS) == {"tab:steering_results": 225, "tab:transfer_results": 300}


def test_every_number_is_one_that_its_metric_can_take() -> None:
    for cell in CELLS:
        assert cell.value > 0
        assert round(cell.value, 2) == cell.value, "printed with two decimals"
        assert cell.metric == "NLL" or cell.value <= 100


@pytest.mark.parametrize(
    ("task", "model", "method", "metric", "printed"),
    [
        ("MMLU", "Mistral-7B-Instruct-v0.3", "SteerConf", "Acc", 60.53),
        ("MMLU", "Mistral-7B-Instruct-v0.3", "SteerConf", "NLL", 146.54),
        ("MMLU", "Deepseek-7B-Chat", "CORAL", "Brier", 21.33),
        ("RACE", "Deepseek-7B-Chat", "CORAL", "ECE", 2.62),
        ("RACE", "Qwen2.5-7B-Instruct", "CCPS", "Brier", 15.55),
        ("CommonsenseQA", "Qwen2.5-7B-Instruct", "CCPS", "Brier", 6.45),
        ("CommonsenseQA", "Deepseek-7B-Chat", "CORAL", "cwECE", 4.62),
        ("ARC-Challenge", "Mistral-7B-Instruct-v0.3", "SteerConf", "ECE", 34.09),
        ("HellaSwag", "Qwen2.5-7B-Instruct", "ITI", "Brier", 55.97),
        ("OpenBookQA", "Mistral-7B-Instruct-v0.3", "ITI", "Acc", 50.23),
        ("Math-MC", "Mistral-7B-Instruct-v0.3", "ITI", "ECE", 75.94),
        ("Math-MC", "Deepseek-7B-Chat", "CORAL", "Brier", 23.47),
    ],
)
def test_cells_are_as_printed(task: str, model: str, method: str, metric: str, printed: float) -> None:
    assert value(task, model, method, metric) == printed


def test_every_column_has_one_best_and_at_most_two_second() -> None:
    marks: Counter[tuple[str, str, str, str]] = Counter((c.task, c.model, c.metric, c.mark) for c in CELLS)
    columns = {(c.task, c.model, c.metric) for c in CELLS}
    for column in columns:
        assert marks[*column, "best"] == 1
        assert marks[*column, "second"] <= 2


def test_numbers_can_be_asked_for_by_model_task_and_method() -> None:
    assert len(load_paper_numbers(model="Qwen2.5-7B-Instruct")) == 7 * len(METHODS) * len(COLUMNS)
    assert len(load_paper_numbers(task="RACE")) == 3 * len(METHODS) * len(COLUMNS)
    assert len(load_paper_numbers(method="CORAL")) == 21 * len(COLUMNS)
    row = load_paper_numbers(model="Deepseek-7B-Chat", task="MMLU", method="CORAL")
    assert [c.value for c in row] == [53.97, 6.21, 4.36, 61.95, 21.33]
    assert {c.mark for c in row} == {"best"}


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(CoralError, match=r"no method called 'Few-shot'.*Did you mean 'Fewshot'"):
        load_paper_numbers(method="Few-shot")
    with pytest.raises(CoralError, match="no task called 'race'"):
        load_paper_numbers(task="race")


def test_what_the_text_quotes_from_the_tables_is_in_the_tables() -> None:
    quoted = {
        "transfer.arc_mistral_coral": ("ARC-Challenge", "Mistral-7B-Instruct-v0.3", "CORAL", "Acc"),
        "transfer.arc_mistral_iti": ("ARC-Challenge", "Mistral-7B-Instruct-v0.3", "ITI", "Acc"),
        "transfer.arc_mistral_ccps": ("ARC-Challenge", "Mistral-7B-Instruct-v0.3", "CCPS", "Acc"),
        "transfer.hellaswag_deepseek_coral": ("HellaSwag", "Deepseek-7B-Chat", "CORAL", "Acc"),
        "corrsteer.baseline_ece": ("MMLU", "Deepseek-7B-Chat", "Fewshot", "ECE"),
    }
    for key, cell in quoted.items():
        assert STATED[key].value == value(*cell)


def test_stated_numbers_are_finite_placed_and_explained() -> None:
    assert len(STATED) == 80
    for key, number in STATED.items():
        assert number.key == key
        assert isfinite(number.value)
        assert number.place
        assert number.about


def test_stated_numbers_agree_among_themselves_where_they_must() -> None:
    def stated(key: str) -> float:
        return STATED[key].value

    assert stated("heads.layers") * stated("heads.per_layer") == stated("heads.total")
    assert stated("heads.per_layer") * stated("heads.dimension") == stated("activations.d_model")
    assert stated("mmlu.train") + stated("mmlu.validation") + stated("mmlu.evaluation") == stated("mmlu.test")
    assert 100 * stated("heads.above_005") / stated("heads.total") == pytest.approx(8.5, abs=0.05)
    assert 100 * stated("heads.needed") / stated("heads.total") == pytest.approx(55, abs=0.5)
    assert 100 * stated("sae.mean_ece_change") == pytest.approx(stated("sae.mean_ece_change_points"))
