"""Logs of lm-eval become Predictions with lm-eval's own accuracies, or one sentence with file and line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coral_lens.errors import CoralError
from coral_lens.harness.logs import find_logs, load_log, load_logs, run_of_logs
from coral_lens.harness.requests import choices_of, n_options
from coral_lens.metrics.scores import score
from coral_lens.report.pages.run import render_report
from coral_lens.report.runs import load_run, save_run

Record = dict[str, Any]
Write = Callable[..., Path]


def record(number: int, logprobs: Sequence[float], target: Any, **changes: Any) -> Record:
    """A line as lm-eval 0.4.13 writes it: numbers and targets as text, arguments under names."""
    pairs = changes.pop("pairs", [("Question?\nAnswer:", f" option {i}" + "x" * i) for i in range(len(logprobs))])
    answers = [[str(x), "False"] for x in logprobs]
    line = {
        "doc_id": number,
        "doc": {},
        "target": str(target),
        "arguments": {f"gen_args_{i}": {"arg_0": c, "arg_1": o} for i, (c, o) in enumerate(pairs)},
        "resps": [[a] for a in answers],
        "filtered_resps": answers,
        "filter": "none",
        "metrics": ["acc", "acc_norm"],
        "acc": 0.0,
        **changes,
    }
    return {key: value for key, value in line.items() if value is not None}


RAGGED = [
    record(0, [-1.0, -2.0], 0, acc=1.0),
    record(1, [-3.0, -2.0, -9.0], 2),
    record(2, [-5.0, -4.0, -6.0, -7.0], 1, acc=1.0),
]


@pytest.fixture
def log(tmp_path: Path) -> Write:
    def write(lines: Sequence[Record | str], name: str = "model/samples_toy_2026-01-02T03-04-05.678.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), "utf-8")
        return path

    return write


# ------------------------------------------------------------------------------------------------------- as they are


def test_ragged_questions_worked_by_hand(log: Write) -> None:
    found = load_log(log(RAGGED))
    predictions = found.predictions()
    assert (found.task, predictions.model, predictions.method) == ("toy", "model", "sum (acc)")
    assert predictions.ids == ("toy/0", "toy/1", "toy/2")
    assert predictions.answers.tolist() == [0, 2, 1]
    assert predictions.offsets.tolist() == [0, 2, 5, 9]
    assert predictions.probs[:2] == pytest.approx([1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))])
    assert score(predictions, "accuracy") == pytest.approx(2 / 3)
    assert found.questions[0].options == ("option 0", "option 1x")


def test_the_rule_of_acc_norm_divides_by_the_characters_of_the_choices(log: Write) -> None:
    pairs = [("Q", " ab"), ("Q", " abcdefgh")]
    found = load_log(log([record(0, [-2.0, -4.0], 1, pairs=pairs)]))
    assert found.rules == ("sum", "char")
    chars = found.predictions("char")
    assert chars.probs == pytest.approx(np.exp([-1.0, -0.5]) / np.exp([-1.0, -0.5]).sum())
    assert score(chars, "accuracy") == 1.0
    assert score(found.predictions("sum"), "accuracy") == 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": ["acc"]},
        {"arguments": None},
        {"pairs": [("a", " x"), ("b", " x")]},
        {"pairs": [("a", " x"), ("a", " ")]},
    ],
    ids=["not asked for", "no requests", "options in the context", "an empty option"],
)
def test_lengths_that_are_not_known_give_no_rule_of_their_own(changes: Record, log: Write) -> None:
    found = load_log(log([record(0, [-2.0, -4.0], 0, acc=1.0, **changes)]))
    assert found.rules == ("sum",)
    with pytest.raises(CoralError, match=r"cannot be read by the base rule 'char'; use sum\.$"):
        found.predictions("char")


def test_corrected_probabilities_are_not_divided_by_lengths(log: Write) -> None:
    lines = [record(i, np.log(p).tolist(), 0, acc=1.0) for i, p in enumerate([(0.7, 0.3), (0.5, 0.2, 0.3)])]
    found = load_log(log(lines))
    assert found.rules == ("sum",)
    assert found.predictions().probs == pytest.approx([0.7, 0.3, 0.5, 0.2, 0.3])


def test_requests_of_mutual_information_are_left_out(log: Write) -> None:
    pairs = [("Q", " a"), ("Q", " bb"), ("Q", " c"), ("", " a"), ("", " bb"), ("", " c")]
    found = load_log(log([record(0, [-1.0, -2.0, -3.0, -0.1, -0.1, -0.1], 0, acc=1.0, pairs=pairs)]))
    assert found.questions[0].options == ("a", "bb", "c")
    assert found.table.logprobs.tolist() == [-1.0, -2.0, -3.0]


def test_older_logs_and_those_in_memory_hold_lists_and_numbers(log: Write) -> None:
    lines = [
        record(0, [-1.0, -2.0], 0, acc=1.0) | {
            "target": 0,
            "arguments": [["Q", " a"], ["Q", " b"]],
            "filtered_resps": [[-1.0, False], [-2.0, False]],
        },
        record(1, [-1.0, -2.0], 1, filtered_resps=None),
    ]  # fmt: skip
    assert load_log(log(lines)).table.logprobs.tolist() == [-1.0, -2.0, -1.0, -2.0]


def test_a_probability_of_0_is_one(log: Write) -> None:
    found = load_log(log([record(0, [-1.0, -np.inf], 1)]))
    assert found.predictions().probs.tolist() == [1.0, 0.0]


# ----------------------------------------------------------------------------------------------------------- filters


def test_of_several_filters_the_unfiltered_answers_are_taken_or_those_asked_for(log: Write) -> None:
    lines = [record(0, [-1.0, -2.0], 0, acc=1.0), record(0, [-2.0, -1.0], 0, filter="odd")]
    path = log(lines)
    assert load_log(path).table.logprobs.tolist() == [-1.0, -2.0]
    assert load_log(path, filter_name="odd").table.logprobs.tolist() == [-2.0, -1.0]
    with pytest.raises(CoralError, match="holds the filters none, odd; name one of them"):
        load_log(path, filter_name="even")
    only = log([record(0, [-2.0, -1.0], 0, filter="odd")])
    assert len(load_log(only).questions) == 1
    two = log([record(0, [-1.0, -2.0], 0, acc=1.0, filter="even"), record(0, [-2.0, -1.0], 0, filter="odd")])
    with pytest.raises(CoralError, match="holds the filters even, odd"):
        load_log(two)
    hostile = log([record(0, [-1.0, -2.0], 0, filter=name) for name in ("a\nb", "c\x1b[31m" + "d" * 5000)])
    with pytest.raises(CoralError, match=r"holds the filters a b, c\\x1b\[31md{71}; name one") as refused:
        load_log(hostile)
    assert "\n" not in str(refused.value)


# ----------------------------------------------------------------------------------------------------- right options

NUMBERS = [("Q", " 2"), ("Q", " 1"), ("Q", " 0")]


def test_a_target_is_the_number_or_the_text_of_an_option_as_lm_evals_verdicts_say(log: Write) -> None:
    # the option `0` is the third: read as text the answer to both is wrong at first sight only
    as_text = [
        record(0, [-9.0, -9.0, -1.0], "0", acc=1.0, pairs=NUMBERS),
        record(1, [-1.0, -9.0, -9.0], "0", pairs=NUMBERS),
    ]
    assert load_log(log(as_text)).table.answers.tolist() == [2, 2]
    as_index = [record(0, [-1.0, -9.0, -9.0], "0", acc=1.0, pairs=NUMBERS)]
    assert load_log(log(as_index)).table.answers.tolist() == [0]
    letters = [record(0, [-1.0, -2.0], "B", pairs=[("Q", " A"), ("Q", " B")], acc=None)]
    assert load_log(log(letters)).table.answers.tolist() == [1]
    with pytest.raises(CoralError, match=r"line 1: target '0' may be the number or the text of an option"):
        load_log(log([record(0, [-9.0, -1.0, -9.0], "0", pairs=NUMBERS)]))


def test_options_in_the_context_take_their_answer_from_the_verdict(log: Write) -> None:
    pairs = [("The cat", " sat"), ("The dog", " sat")]
    lines = [record(0, [-1.0, -2.0], "sat", acc=1.0, pairs=pairs), record(1, [-1.0, -2.0], "sat", pairs=pairs)]
    found = load_log(log(lines))
    assert found.table.answers.tolist() == [0, 1]
    assert found.questions[0].options == ("The cat", "The dog")


def test_a_list_of_one_target_is_that_one(log: Write) -> None:
    assert load_log(log([record(0, [-1.0, -2.0], [0], acc=1.0)])).table.answers.tolist() == [0]


BAD = {
    "several right": ([record(0, [-1.0, -2.0], [0, 1])], "line 1: 2 options are right"),
    "no label": ([RAGGED[0], record(1, [-1.0, -2.0], "")], "line 2: the right option cannot be told from target ''"),
    "another verdict": ([record(0, [-1.0, -2.0], 0, acc=0.0)], "line 1: the right option cannot be told"),
    "no target": ([record(0, [-1.0, -2.0], 0) | {"target": None}], "line 1: 'target' is missing"),
    "no number": ([record(0, [-1.0, -2.0], 0, doc_id=None)], "line 1: 'doc_id' is missing"),
    "text": ([record(0, [-1.0, -2.0], 0, filtered_resps=["so", "say"])], "line 1: .*not of a multiple-choice task"),
    "generated": (
        [record(0, [-1.0, -2.0], 0, filtered_resps=["Answer: B"])],
        "line 1: .*not of a multiple-choice task",
    ),
    "one request": ([record(0, [-1.0], 0, acc=1.0)], "line 1: not of a multiple-choice task"),
    "no answers": ([record(0, [-1.0, -2.0], 0, filtered_resps=None, resps=None)], "line 1: its log-likelihoods"),
    "nan": ([record(0, [-1.0, float("nan")], 0)], "line 1: its log-likelihoods"),
    "nothing": ([record(0, [-np.inf, -np.inf], 0)], "line 1: its log-likelihoods"),
    "too few": ([record(0, [-1.0, -2.0], 0, pairs=[("Q", " a")] * 3)], "line 1: 3 requests have 2 answers"),
    "twice": ([RAGGED[0], RAGGED[0]], "some documents twice"),
    "no json": ([RAGGED[0], "{"], "line 2: not valid JSON"),
    "a list": (["[1]"], "line 1: a JSON object is expected, found list"),
    "empty": ([""], "holds no samples"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_a_log_that_cannot_be_used_gets_one_sentence(case: str, log: Write) -> None:
    lines, complaint = BAD[case]
    path = log(lines)
    with pytest.raises(CoralError, match=complaint) as error:
        load_log(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


# ----------------------------------------------------------------------------------------------------- several files


def test_files_of_the_same_questions_stand_side_by_side_and_others_apart(log: Write, tmp_path: Path) -> None:
    log(RAGGED, "a/samples_toy_2026-01-02T03-04-05.678.jsonl")
    log(RAGGED, "b/samples_toy_2026-01-02T03-04-05.678.jsonl")
    log(RAGGED[:2], "c/samples_toy_2026-01-02T03-04-05.678.jsonl")
    log(RAGGED, "c/samples_other_task_2026-01-02T03-04-05.678.jsonl")
    evaluations = {e.name: e for e in load_logs([tmp_path])}
    assert set(evaluations) == {"toy (a)", "toy (c)", "other_task"}
    both = evaluations["toy (a)"].predictions
    assert list(both) == [f"{m}: {rule}" for m in "ab" for rule in ("sum (acc)", "char (acc_norm)")]
    assert list(evaluations["other_task"].predictions) == ["sum (acc)", "char (acc_norm)"]


def test_two_runs_of_one_model_are_told_apart_by_their_file(log: Write) -> None:
    names = [f"m/samples_toy_2026-01-0{day}T03-04-05.678.jsonl" for day in (2, 3)]
    (evaluation,) = load_logs([log(RAGGED, name) for name in names])
    assert list(evaluation.predictions) == [
        f"{Path(name).stem}: {rule}" for name in names for rule in ("sum (acc)", "char (acc_norm)")
    ]


def test_files_folders_and_patterns_are_found_once(log: Write, tmp_path: Path) -> None:
    path = log(RAGGED)
    assert find_logs([path, path.parent, tmp_path, str(tmp_path / "*" / "samples_*.jsonl")]) == [path]
    with pytest.raises(CoralError, match=r"none: no such file, nor a folder with samples_\*\.jsonl"):
        find_logs([tmp_path / "none"])


def test_a_run_of_logs_comes_back_from_its_folder_and_its_report_speaks_of_no_lens(log: Write, tmp_path: Path) -> None:
    run = run_of_logs([log(RAGGED)])
    save_run(run, tmp_path / "run")
    again = load_run(tmp_path / "run")
    assert again.title == run.title == "model: lm-eval's samples"
    (one,), (other,) = run.evaluations, again.evaluations
    assert one.questions == other.questions
    assert all(np.array_equal(p.probs, other.predictions[m].probs) for m, p in one.predictions.items())
    page = render_report(again)
    assert "How the lens was chosen" not in page
    assert "66.7 % accuracy" in page


# ------------------------------------------------------------------------------------------------ what requests tell


@given(st.lists(st.text("ab ", max_size=4), min_size=2, max_size=5), st.sampled_from([" ", "", "\n", "\n\n"]))
def test_the_delimiter_is_the_white_space_that_all_options_share(options: list[str], delimiter: str) -> None:
    found = choices_of([delimiter + option for option in options])
    # where all options begin with a space of their own, a request does not tell it from the delimiter
    shared = 0
    while all(option[shared : shared + 1] == " " for option in options):
        shared += 1
    assert found == tuple(option[shared:] for option in options)


def test_which_requests_are_options_worked_by_hand() -> None:
    options = [("Q", " a"), ("Q", " b")]
    assert n_options(options) == 2
    assert n_options([*options, ("", " a"), ("", " b")]) == 4 - 2
    assert n_options([("", " a"), ("", " b"), ("", " a"), ("", " b")]) == 2, "a task without a context"
    assert n_options([("", " a"), ("", " b"), ("", " c"), ("", " d")]) == 4
    assert n_options([("x1", " y"), ("x2", " y"), ("", " 1"), ("", " 2")]) == 2, "options in the context"
    assert n_options([("Q", " a"), ("", " a")]) == 2, "two contexts of one continuation"


# ------------------------------------------------------------------------------------------------- whatever they hold

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["[" * 3000, "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
fields = st.sampled_from(
    ["doc_id", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "acc", "acc_norm"]
)


@given(changes=st.dictionaries(fields, json_values, max_size=3), which=st.integers(0, 2))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_log_with_anything_in_a_field_is_read_or_refused_with_its_line(
    log: Write, changes: Record, which: int
) -> None:
    path = log([{**line, **changes} if i == which else line for i, line in enumerate(RAGGED)])
    message, questions = str(path), ()
    try:
        questions = load_log(path).questions
    except CoralError as error:
        message = str(error)
    assert str(path) in message
    assert all(q.id.startswith("toy/") and (q.id + q.text).encode() for q in questions)


@given(content=st.binary(max_size=300) | st.integers(1, 4000).map(lambda n: b"[" * 50 * n))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_log_of_any_bytes_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "samples_toy.jsonl"
    path.write_bytes(content)
    with pytest.raises(CoralError) as error:
        load_log(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arguments": 5}, "its arguments are not lists"),
        ({"arguments": [1, 2]}, "its arguments are not lists"),
        ({"filtered_resps": None, "resps": 7}, "its answers are not pairs"),
        ({"filtered_resps": None, "resps": [{"a": 1}]}, "its answers are not pairs"),
        ({"target": "[" * 5000}, "the right option cannot be told"),
        ({"doc_id": "\ud800"}, "half of a surrogate pair"),
    ],
)
def test_a_malformed_field_is_named(changes: Record, said: str, log: Write) -> None:
    with pytest.raises(CoralError, match=said):
        load_log(log([{**RAGGED[0], **changes}]))
