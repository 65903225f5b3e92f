"""Task questions carry lm-eval's own prompts, to the letter, from whichever source the data comes."""

from __future__ import annotations

import gzip
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coral_lens.data import task_index
from coral_lens.data.settings import TaskOptions
from coral_lens.data.task_index import OWN_TASKS, leaves
from coral_lens.data.tasks import available_tasks, load_task
from coral_lens.errors import CoralError
from coral_lens.records import UNKNOWN, Question

Row = dict[str, Any]
OPTIONS = "a ) rs . 5 , b ) 1,000 , c ) 7 / 2 , d ) none , e ) 3"


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def put(root: Path, task: str, **splits: list[Row]) -> Path:
    """Write `root/task/split.jsonl` for each split and return `root`."""
    folder = root / task
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return root


def ask(root: Path | None, task: str, **options: Any) -> list[Question]:
    return load_task(task, TaskOptions(data_dir=root, **options))


def requests_of(questions: list[Question]) -> list[tuple[str, str]]:
    """Return the (context, continuation) pairs in lm-eval's order."""
    pairs = []
    for question in questions:
        assert question.rendered is not None
        pairs += list(zip(question.rendered.contexts, question.rendered.continuations, strict=True))
    return pairs


def arc(number: int, *, n_options: int = 4, answer: str = "B") -> Row:
    labels = list("ABCDE")[:n_options]
    choices = {"text": [f"option {number}{label}" for label in labels], "label": labels}
    return {"id": f"q{number}", "question": f"Why {number}? ", "choices": choices, "answerKey": answer}


def csqa(number: int, *, answer: str = "E") -> Row:
    return {**arc(number, n_options=5, answer=answer), "question": f" What {number}?", "question_concept": "x"}


def hellaswag(number: int) -> Row:
    endings = [f"ends {number} [substeps] so.", "ends  otherwise.", "go [title] End", "no end"]
    row: Row = {"ind": 7, "activity_label": "Making [x] tea", "ctx_a": f"A man {number}.", "ctx_b": "he POURS"}
    return row | {
        "ctx": "",
        "endings": endings,
        "source_id": f"s{number // 2}",
        "split": "",
        "split_type": "",
        "label": "2",
    }


def race_question(number: int, *, article: str = "Long ago.") -> Row:
    options = [f"answer {number}{c}" for c in "abcd"]
    return {
        "example_id": "h1.txt",
        "article": article,
        "question": f"Who {number}  _  .",
        "options": options,
        "answer": "C",
    }


def mmlu(number: int) -> Row:
    return {
        "question": f" Bone {number}? ",
        "subject": "anatomy",
        "choices": [f"{number}{c}" for c in "wxyz"],
        "answer": 2,
    }


# --- templates, worked by hand


def test_arc_asks_a_question_and_scores_the_option_texts(tmp_path: Path) -> None:
    root = put(tmp_path, "arc_easy", test=[arc(1), arc(2, n_options=3), arc(3, n_options=5, answer="E")])
    first, second, third = ask(root, "arc_easy")
    assert first.text == "Question: Why 1? \nAnswer:"
    assert requests_of([first]) == [(first.text, f" option 1{label}") for label in "ABCD"]
    assert first.options == ("option 1A", "option 1B", "option 1C", "option 1D")
    assert (first.id, first.group, first.version, first.split) == (
        "arc_easy/test/q1",
        "arc_easy/test/q1",
        "1.0",
        "test",
    )
    assert [q.answer for q in (first, second, third)] == [1, 1, 4]
    assert [len(q.options) for q in (first, second, third)] == [4, 3, 5]


def test_hellaswag_is_cleaned_as_lm_eval_cleans_it(tmp_path: Path) -> None:
    (question,) = ask(put(tmp_path, "hellaswag", validation=[hellaswag(1)]), "hellaswag")
    assert question.text == "Making tea: A man 1. He pours"
    assert question.options == ("ends 1 so.", "ends otherwise.", "go. End", "no end")
    assert (question.answer, question.split) == (2, "validation")


def test_openbookqa_asks_the_stem_alone(tmp_path: Path) -> None:
    row = {**arc(1), "question_stem": "The sun is", "answerKey": " D"}
    (question,) = ask(put(tmp_path, "openbookqa", test=[row]), "openbookqa")
    assert requests_of([question])[0] == ("The sun is", " option 1A")
    assert question.answer == 3


def test_commonsense_qa_lists_the_options_and_scores_letters(tmp_path: Path) -> None:
    (question,) = ask(put(tmp_path, "commonsense_qa", validation=[csqa(1)]), "commonsense_qa")
    listed = "".join(f"{label}. option 1{label}\n" for label in "ABCDE")
    assert requests_of([question]) == [(f"Question: What 1?\n{listed}Answer:", f" {label}") for label in "ABCDE"]
    assert question.answer == 4


def test_commonsense_qa_cloze_scores_texts_and_finds_the_data_of_commonsense_qa(tmp_path: Path) -> None:
    (question,) = ask(put(tmp_path, "commonsense_qa", validation=[csqa(1)]), "commonsense_qa_cloze")
    assert requests_of([question]) == [("Question:  What 1?\nAnswer:", f" option 1{label}") for label in "ABCDE"]
    assert (question.answer, question.version) == (4, "1.0")


def test_mmlu_puts_its_description_and_the_first_dev_questions_before_each_question(tmp_path: Path) -> None:
    root = put(tmp_path, "mmlu_anatomy", dev=[mmlu(n) for n in range(5)], test=[mmlu(8), mmlu(9)])
    shown = [f"Bone {n}?\nA. {n}w\nB. {n}x\nC. {n}y\nD. {n}z\nAnswer:" for n in (0, 1, 2, 3, 4, 8, 9)]
    head = "The following are multiple choice questions (with answers) about anatomy.\n\n"
    head += "".join(f"{shot} C\n\n" for shot in shown[:5])
    asked = ask(root, "mmlu_anatomy", num_fewshot=5)
    assert requests_of(asked) == [(head + q, f" {label}") for q in shown[5:] for label in "ABCD"]
    assert [q.answer for q in asked] == [2, 2]


def test_race_shows_the_earlier_questions_with_their_answers_and_asks_the_last(tmp_path: Path) -> None:
    problems = [
        {"question": "The hero is  _  .", "answer": "B", "options": ["bad", "good", "old", "new"]},
        {"question": "Where?", "answer": "A", "options": ["here", "there", "up", "down"]},
        {"question": "He went  _  .", "answer": "D", "options": ["in", "out", "on", "off"]},
    ]
    (question,) = ask(put(tmp_path, "race", test=[{"article": "Text.", "problems": repr(problems)}]), "race")
    before = "Article: Text.\n\nThe hero is good\nQuestion: Where?\nAnswer: here\n"
    assert requests_of([question]) == [(f"{before}He went  _  .", f" {o}") for o in ("in", "out", "on", "off")]
    assert (question.answer, question.version) == (3, "3.0")


def test_race_question_asks_each_question_as_race_asks_its_last(tmp_path: Path) -> None:
    article = "Once. "
    row = race_question(1, article=article)
    (one,) = ask(put(tmp_path, "race_question", test=[row]), "race_question")
    problem = {key: row[key] for key in ("question", "answer", "options")}
    (last,) = ask(put(tmp_path, "race", test=[{"article": article, "problems": repr([problem])}]), "race")
    assert requests_of([one]) == requests_of([last])
    assert requests_of([one])[0] == ("Article: Once. \n\nWho 1  _  .", " answer 1a")
    assert (one.answer, one.group) == (2, last.group)


def test_mathqa_options_are_cut_out_of_one_string(tmp_path: Path) -> None:
    row = {"Problem": "how much ?", "options": OPTIONS, "correct": "c", "category": "gain"}
    (question,) = ask(put(tmp_path, "mathqa", test=[row]), "mathqa")
    assert question.text == "Question: how much ?\nAnswer:"
    assert question.options == ("rs . 5", "1,000", "7 / 2", "none", "3")
    assert question.answer == 2


def test_math_mc_is_asked_by_letters(tmp_path: Path) -> None:
    row = {
        "Question": "$1+1$? ",
        "A": "1",
        "B": "2",
        "C": "3",
        "D": "4",
        "Answer": "B",
        "Level": "1",
        "Type": "Algebra",
    }
    (question,) = ask(put(tmp_path, "math_mc", test=[row]), "math_mc")
    assert requests_of([question])[1] == ("$1+1$?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:", " B")
    assert question.answer == 1


def test_winogrande_has_one_context_per_option_and_one_continuation(tmp_path: Path) -> None:
    row = {"sentence": "Al met Bo since _ was late.", "option1": "Al", "option2": "Bo", "answer": "2"}
    (question,) = ask(put(tmp_path, "winogrande", validation=[row]), "winogrande")
    assert requests_of([question]) == [("Al met Bo since Al", " was late."), ("Al met Bo since Bo", " was late.")]
    assert (question.text, question.answer) == ("Al met Bo since _ was late.", 1)


# --- agreement with lm-eval itself


def lm_eval_requests(task: str, root: Path, *, num_fewshot: int, limit: int, **more: Any) -> list[tuple[str, str]]:
    """Return the requests that lm-eval builds from the same files, by its own loader and its evaluator's steps."""
    from lm_eval.tasks import TaskManager

    (leaf,) = leaves(task)
    files = {f.name.removesuffix(".jsonl"): str(f) for f in (root / task).iterdir()}
    item = {"task": task, "dataset_path": "json", "dataset_name": None}
    item["dataset_kwargs"] = {"data_files": files, "cache_dir": str(root / "datasets")}
    folder = TaskManager(include_defaults=False, include_path=str(leaf.path.parent))
    built: Any = folder.load({"group": "reference", "task": [item]})["tasks"][task]
    built.set_config(key="num_fewshot", value=num_fewshot)
    built.set_fewshot_seed(seed=1234)
    built.build_all_requests(limit=limit, **more)
    return [instance.args for instance in built.instances]


REFERENCE = {
    "arc_easy": {"train": [arc(n) for n in range(50, 70)], "test": [arc(n) for n in range(9)]},
    # no test split: lm-eval then draws one shot more than it needs, which shifts all later ones
    "commonsense_qa": {"train": [csqa(n) for n in range(50, 70)], "validation": [csqa(n) for n in range(9)]},
    "hellaswag": {"train": [hellaswag(n) for n in range(50, 70)], "validation": [hellaswag(n) for n in range(9)]},
    "mmlu_anatomy": {"dev": [mmlu(n) for n in range(50, 55)], "test": [mmlu(n) for n in range(9)]},
    "race_question": {"train": [race_question(n) for n in range(50, 70)], "test": [race_question(n) for n in range(9)]},
}


@pytest.mark.parametrize("num_fewshot", [0, 3])
@pytest.mark.parametrize("task", REFERENCE)
def test_requests_equal_lm_evals_own_and_a_limit_does_not_change_them(
    task: str, num_fewshot: int, tmp_path: Path
) -> None:
    splits = REFERENCE[task]
    if task == "race_question":
        splits = {**splits, "validation": [race_question(90)]}  # lm-eval's loader wants every split that the YAML names
    root = put(tmp_path, task, **splits)
    expected = lm_eval_requests(task, root, num_fewshot=num_fewshot, limit=7)
    asked = ask(root, task, num_fewshot=num_fewshot)
    assert len(asked) == 9
    assert requests_of(asked[:7]) == expected
    assert requests_of(ask(root, task, num_fewshot=num_fewshot, limit=4)) == expected[: len(requests_of(asked[:4]))]


def chat(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    turns = "".join(f"<{m['role']}>{m['content']}" for m in messages)
    return turns + ("<assistant>" if add_generation_prompt else "")


@pytest.mark.parametrize("num_fewshot", [0, 2])
def test_a_chat_template_is_applied_as_lm_eval_applies_it(num_fewshot: int, tmp_path: Path) -> None:
    root = put(tmp_path, "mmlu_anatomy", **REFERENCE["mmlu_anatomy"])
    more = {"apply_chat_template": True, "fewshot_as_multiturn": True, "chat_template": chat}
    expected = lm_eval_requests("mmlu_anatomy", root, num_fewshot=num_fewshot, limit=3, **more)
    asked = ask(root, "mmlu_anatomy", num_fewshot=num_fewshot, limit=3, chat_template=chat)
    assert requests_of(asked) == expected
    context, continuation = requests_of(asked)[0]
    assert context.startswith("<system>The following are")
    assert context.count("<assistant>") == num_fewshot + 1
    assert continuation == "A"  # no delimiter after a turn marker
    assert all(q.rendered is not None and q.rendered.chat for q in asked)


# --- splits and shots


def test_training_questions_use_the_template_and_are_never_their_own_shots(tmp_path: Path) -> None:
    root = put(tmp_path, "arc_easy", train=[arc(n) for n in range(5)], test=[arc(9)])
    asked = ask(root, "arc_easy", split="train", num_fewshot=4)
    assert [q.id for q in asked] == [f"arc_easy/train/q{n}" for n in range(5)]
    for number, question in enumerate(asked):
        shots = question.rendered.contexts[0].split("\n\n") if question.rendered else []
        assert shots.pop() == f"Question: Why {number}? \nAnswer:"
        assert sorted(shots) == [f"Question: Why {n}? \nAnswer: option {n}B" for n in range(5) if n != number]


def test_a_split_that_is_not_needed_need_not_exist(tmp_path: Path) -> None:
    root = put(tmp_path, "mathqa", validation=[{"Problem": "?", "options": OPTIONS, "correct": "b", "category": ""}])
    assert len(ask(root, "mathqa", split="validation")) == 1


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no network here")

    monkeypatch.setattr(datasets, "load_dataset", offline)


@pytest.mark.usefixtures("no_hub")
def test_a_missing_split_is_named_with_what_is_there(tmp_path: Path) -> None:
    root = put(tmp_path, "mathqa", validation=[{"Problem": "?", "options": OPTIONS, "correct": "b", "category": ""}])
    with pytest.raises(
        CoralError, match=r"'test', which is not here.*the hub cannot be asked.*locally: validation.*--data DIR"
    ):
        ask(root, "mathqa")
    with pytest.raises(CoralError, match="needs its split 'train'"):
        ask(root, "mathqa", split="validation", num_fewshot=1)
    with pytest.raises(CoralError, match=r"locally: validation;.*DIR/commonsense_qa/train.jsonl"):
        ask(None, "commonsense_qa_cloze", split="train")
    with pytest.raises(CoralError, match=r"No split of it is here; .*DIR/math_mc/test.jsonl"):
        ask(None, "math_mc")


def test_the_hub_is_asked_last_with_the_tasks_own_path_and_no_remote_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    asked_for: list[Any] = []

    def hub(*args: Any, **kwargs: Any) -> Any:
        asked_for.append((args, kwargs))
        return {"test": datasets.Dataset.from_list([arc(1)])}

    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert ask(None, "arc_easy", split="validation", limit=1)[0].task == "arc_easy"
    assert asked_for == []
    assert [q.id for q in ask(None, "arc_easy")] == ["arc_easy/test/q1"]
    assert asked_for == [(("allenai/ai2_arc", "ARC-Easy"), {})]
    with pytest.raises(CoralError, match="the dataset's splits are test"):
        ask(None, "arc_easy", split="trian")


def test_a_folder_wins_over_the_embedded_data_split_by_split(tmp_path: Path) -> None:
    root = put(tmp_path, "commonsense_qa", train=[csqa(n) for n in range(4)])
    assert len(ask(root, "commonsense_qa", split="train")) == 4
    assert len(ask(root, "commonsense_qa")) == 1221
    put(tmp_path, "commonsense_qa", validation=[csqa(5)])
    assert [q.id for q in ask(root, "commonsense_qa")] == ["commonsense_qa/validation/q5"]


def test_jsonl_gzip_and_parquet_give_the_same_questions(tmp_path: Path) -> None:
    import datasets

    rows = [arc(n) for n in range(3)]
    plain = ask(put(tmp_path / "a", "arc_easy", test=rows), "arc_easy")
    for kind in ("jsonl.gz", "parquet"):
        file = tmp_path / kind / "arc_easy" / f"test.{kind}"
        file.parent.mkdir(parents=True)
        if kind == "parquet":
            datasets.Dataset.from_list(rows).to_parquet(file)
        else:
            file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
        assert ask(tmp_path / kind, "arc_easy") == plain


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no questions"),
        (b'{"question": \n', "line 1: not valid JSON"),
        (b'{"id": "1"}\n[]\n', "line 2: a JSON object is expected"),
        (b"\xff\xfe", "line 1: not valid JSON in UTF-8"),
        (b'{"id": "1", "question": "?"}\n', "Task 'arc_easy' does not fit its data: .*'choices' is undefined"),
        (b'{"a": 1}\n{"a": "x"}\n', "cannot be read as a table"),
    ],
)
def test_bad_data_files_are_refused(content: bytes, said: str, tmp_path: Path) -> None:
    put(tmp_path, "arc_easy")
    (tmp_path / "arc_easy" / "test.jsonl").write_bytes(content)
    with pytest.raises(CoralError, match=said):
        ask(tmp_path, "arc_easy")


def test_a_bad_label_later_in_the_file_names_its_question(tmp_path: Path) -> None:
    root = put(tmp_path, "arc_easy", test=[arc(1), arc(2, answer="X")])
    with pytest.raises(CoralError, match="'arc_easy/test/q2' does not fit its template"):
        ask(root, "arc_easy")


def test_a_data_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CoralError, match="does not exist"):
        ask(tmp_path / "none", "arc_easy")


# --- what a question holds


@pytest.mark.parametrize(("task", "answer"), [("commonsense_qa", ""), ("commonsense_qa_cloze", "")])
def test_an_empty_label_is_unknown(task: str, answer: str, tmp_path: Path) -> None:
    root = put(tmp_path, "commonsense_qa", test=[csqa(1, answer=answer), csqa(2, answer="A")])
    assert [q.answer for q in ask(root, task, split="test")] == [UNKNOWN, 0]


@pytest.mark.parametrize("label", ["-1", "7"])
def test_a_label_that_names_no_option_is_unknown(label: str, tmp_path: Path) -> None:
    rows = [hellaswag(1), {**hellaswag(2), "label": label}]
    assert [q.answer for q in ask(put(tmp_path, "hellaswag", validation=rows), "hellaswag")] == [2, UNKNOWN]


def test_ids_are_unique_even_where_the_column_is_not(tmp_path: Path) -> None:
    root = put(tmp_path, "race_question", test=[race_question(n) for n in range(3)])
    assert [q.id for q in ask(root, "race_question")] == [f"race_question/test/{n}" for n in range(3)]


def test_questions_about_one_article_share_a_group_across_splits(tmp_path: Path) -> None:
    rows = [race_question(1, article="x"), race_question(2, article="y"), race_question(3, article="x")]
    root = put(tmp_path, "race_question", test=rows, train=[race_question(4, article="y")])
    first, second, third = (q.group for q in ask(root, "race_question"))
    assert first == third != second
    assert ask(root, "race_question", split="train")[0].group == second


def test_repeated_and_empty_options_are_kept_as_lm_eval_scores_them(tmp_path: Path) -> None:
    texts = ["same", "same", "", "other"]
    root = put(tmp_path, "arc_easy", test=[arc(1), {**arc(2), "choices": {"text": texts, "label": list("ABCD")}}])
    question = ask(root, "arc_easy")[1]
    assert question.options == ("same", "same", "(empty)", "other")
    assert question.rendered is not None
    assert question.rendered.choices == tuple(texts)
    assert question.rendered.continuations == (" same", " same", " ", " other")


# --- names


def test_a_group_is_all_its_tasks_and_a_limit_counts_for_each() -> None:
    asked = ask(None, "mmlu", limit=2)
    assert len(asked) == 2 * 57
    assert len({q.id for q in asked}) == len(asked)
    assert len({q.task for q in asked}) == 57


def test_a_tag_is_inherited_through_include(tmp_path: Path) -> None:
    root = put(put(tmp_path, "arc_easy", test=[arc(1)]), "arc_challenge", test=[arc(2)])
    assert [q.task for q in ask(root, "ai2_arc")] == ["arc_challenge", "arc_easy"]


def test_a_group_sets_the_shots_of_its_tasks(tmp_path: Path) -> None:
    shots = {leaf.task: leaf.overrides.get("num_fewshot") for leaf in leaves("openllm")}
    assert (shots["arc_challenge"], shots["hellaswag"], shots["mmlu_anatomy"]) == (25, 10, 5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("arc_eazy", "no task called 'arc_eazy'. Did you mean 'arc_easy'"),
        ("gsm8k", "has output_type 'generate_until'"),
        ("truthfulqa_mc2", "no single option is right"),
        ("squadv2", "is written in Python"),
        ("gsm8k_cot", "only multiple_choice tasks"),
    ],
)
def test_what_is_not_a_multiple_choice_task_is_refused(name: str, said: str) -> None:
    with pytest.raises(CoralError, match=said):
        load_task(name)


@pytest.mark.parametrize(("option", "value"), [("limit", 0), ("num_fewshot", -1)])
def test_senseless_options_are_refused(option: str, value: int) -> None:
    with pytest.raises(CoralError, match=f"{option} must be at least"):
        TaskOptions(**{option: value})


@pytest.mark.parametrize("folder", ["arc", "mmlu", "super_glue", "agieval", "openllm", "benchmarks", "bbh", "race"])
def test_the_quick_index_says_what_lm_evals_index_says(folder: str) -> None:
    from lm_eval.tasks._index import Kind, TaskIndex

    root = task_index._lm_eval_folder() / folder
    theirs = {
        name: (entry.yaml_path, entry.kind is Kind.GROUP, tuple(sorted(entry.tags)) if entry.kind is Kind.TAG else ())
        for name, entry in TaskIndex.build([root]).items()
    }
    assert {name: (e.path, e.group, e.tagged) for name, e in task_index._scan(root).items()} == theirs


def test_the_index_survives_a_damaged_cache_and_finds_new_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "tasks"
    (root / "one").mkdir(parents=True)
    (root / "one" / "a.yaml").write_text('"task": "a"\ntag: [x, "y"] # comment\n')
    first = task_index._cached_scan(root, fresh=False)
    assert first["x"].tagged == first["y"].tagged == ("a",)
    assert task_index._cached_scan(root, fresh=False) == first
    (root / "one" / "b.yaml").write_text("include: a.yaml\ntask: b\n")
    assert "b" not in task_index._cached_scan(root, fresh=False)  # the folder `tasks` itself did not change
    assert task_index._cached_scan(root, fresh=True)["x"].tagged == ("a", "b")
    (tmp_path / "cache" / "task-index.json").write_text("{")
    assert set(task_index._cached_scan(root, fresh=False)) == {"a", "b", "x", "y"}


@pytest.mark.parametrize(
    "planted", ["../planted/a.yaml", "one/../../planted/a.yaml", "{outside}/a.yaml", "..\\a.yaml", 7]
)
def test_a_planted_entry_of_the_cached_index_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: Any
) -> None:
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path / "cache"))
    root, outside = tmp_path / "tasks", tmp_path / "planted"
    for folder in (root / "one", outside):
        folder.mkdir(parents=True)
        (folder / "a.yaml").write_text("task: a\n")
    honest = task_index._cached_scan(root, fresh=False)
    index = tmp_path / "cache" / "task-index.json"
    content = json.loads(index.read_text())
    path = planted.format(outside=outside) if isinstance(planted, str) else planted
    index.write_text(json.dumps({**content, "entries": {"a": [path, False, []]}}))
    assert task_index._cached_scan(root, fresh=False) == honest
    assert json.loads(index.read_text()) == content  # and the cache is made again


def test_an_unwritable_cache_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path / "cache"))
    assert set(task_index._cached_scan(OWN_TASKS, fresh=False)) == {"race_question", "commonsense_qa_cloze", "math_mc"}


# --- manners


def test_lm_eval_itself_can_load_our_tasks(tmp_path: Path) -> None:
    from lm_eval.tasks import TaskManager

    found = TaskManager(include_defaults=False, include_path=str(OWN_TASKS))
    assert found.all_subtasks == ["commonsense_qa_cloze", "math_mc", "race_question"]
    for name in found.all_subtasks:
        config = found.task_index[name].cfg
        assert config["metadata"]["version"] == 1.0
        assert [m["metric"] for m in config["metric_list"]] == ["acc", "acc_norm"]


def test_loading_leaves_no_trace_in_logging_progress_bars_or_templates(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import datasets
    from lm_eval.utils import env

    logging.getLogger("lm_eval").setLevel(logging.INFO)
    before = (logging.getLogger("lm_eval").level, logging.getLogger("datasets").level)
    ask(put(tmp_path, "hellaswag", validation=[hellaswag(n) for n in range(50)]), "hellaswag")
    with pytest.raises(CoralError):
        ask(tmp_path, "gsm8k")
    assert (logging.getLogger("lm_eval").level, logging.getLogger("datasets").level) == before
    assert not datasets.are_progress_bars_disabled()
    assert "from_string" not in vars(env)
    assert capfd.readouterr() == ("", "")


def test_the_embedded_data_is_only_read() -> None:
    from coral_lens.data.assets import embedded_data

    folder = embedded_data()
    assert folder is not None
    ask(None, "hellaswag", limit=1)
    assert not list(folder.rglob("cache-*"))


def test_importing_the_question_modules_is_light() -> None:
    code = "import sys, coral_lens.data.questions; print([m for m in ('lm_eval', 'datasets', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_available_offline_is_listed_with_its_sizes_and_source(tmp_path: Path) -> None:
    root = put(tmp_path, "commonsense_qa", train=[csqa(n) for n in range(4)])
    put(root, "not_a_task", train=[csqa(1)])
    listed = {(row.task, row.source): row for row in available_tasks(root)}
    assert listed["mmlu", "embedded"].splits == {"dev": 285, "test": 14042, "validation": 1531}
    assert listed["hellaswag", "embedded"].splits == {"validation": 10042}
    for task in ("commonsense_qa", "commonsense_qa_cloze"):
        assert listed[task, "data folder"].splits == {"train": 4}
        assert listed[task, "embedded"].splits == {"validation": 1221}
        assert listed[task, "embedded"].licence == "MIT"
    assert not any(task in ("not_a_task", "math_mc", "race") for task, _ in listed)


def test_fixed_shots_are_the_same_for_every_question_and_recorded(tmp_path: Path) -> None:
    root = put(
        tmp_path, "commonsense_qa", train=[csqa(i) for i in range(30)], validation=[csqa(i) for i in range(40, 46)]
    )

    def shots(questions: list[Question]) -> set[str]:
        return {q.rendered.contexts[0].removesuffix(q.text) for q in questions if q.rendered}

    how: dict[str, Any] = {"split": "validation", "num_fewshot": 2}
    fixed = ask(root, "commonsense_qa_cloze", **how, fixed_shots=True)
    assert len(shots(fixed)) == 1
    assert {q.version for q in fixed} == {"1.0, 2 fixed shots"}
    drawn = ask(root, "commonsense_qa_cloze", **how)
    assert len(shots(drawn)) > 1
    assert {q.version for q in drawn} == {"1.0, 2 shots"}
