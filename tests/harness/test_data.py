"""Inside `local_data`, lm-eval's own tasks read our sources and ask what `coral eval` asks, without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import pytest
from lm_eval.api.task import ConfigurableTask
from support.lm_eval_runs import definitions_of, manager, write_task
from support.models import make_hflm, make_model
from support.questions import toy_questions

from coral_lens.data import task_data
from coral_lens.data.assets import embedded_data
from coral_lens.data.settings import TaskOptions
from coral_lens.data.tasks import load_task
from coral_lens.errors import CoralError
from coral_lens.harness.data import Sources, local_data

N = 5


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network here")

    monkeypatch.setattr(datasets, "load_dataset", offline)


def own_manager(folder: str) -> Any:
    return manager(definitions_of(folder))


def requests_of(task: str, folder: str, num_fewshot: int = 0) -> list[tuple[str, str]]:
    """What lm-eval's own task object would send for its first questions."""
    built = own_manager(folder).load([task])["tasks"][task]
    built.set_config("num_fewshot", num_fewshot)
    built.set_fewshot_seed(1234)
    built.build_all_requests(limit=N)
    return [request.args for request in built.instances]


def ours(task: str, **options: Any) -> list[tuple[str, str]]:
    """What `coral eval` would score."""
    rendered = [q.rendered for q in load_task(task, TaskOptions(limit=N, **options))]
    return [pair for r in rendered if r for pair in zip(r.contexts, r.continuations, strict=True)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Real questions as a user's folder: a test split that the embedded data does not have, and a pool of examples."""
    root = embedded_data()
    assert root is not None
    rows = list(datasets.load_from_disk(str(root / "ai2_arc" / "ARC-Easy" / "validation")))
    (tmp_path / "arc_easy").mkdir()
    for split, some in (("test", rows[20:40]), ("train", rows[40:60])):
        lines = "".join(json.dumps(row) + "\n" for row in some)
        (tmp_path / "arc_easy" / f"{split}.jsonl").write_text(lines, "utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("task", "home", "num_fewshot"),
    [
        ("commonsense_qa", "commonsense_qa", 0),
        ("piqa", "piqa", 0),
        ("winogrande", "winogrande", 0),
        ("mmlu_anatomy", "mmlu/default", 0),
        ("mmlu_anatomy", "mmlu/default", 5),
    ],
)
def test_an_lm_eval_task_asks_of_the_embedded_data_what_coral_eval_asks(task: str, home: str, num_fewshot: int) -> None:
    with local_data():
        asked = requests_of(task, home, num_fewshot)
    assert asked == ours(task, num_fewshot=num_fewshot)
    assert len(asked) >= 2 * N


@pytest.mark.parametrize("num_fewshot", [0, 3])
def test_a_folder_gives_questions_and_worked_examples(folder: Path, num_fewshot: int) -> None:
    with local_data(str(folder)):
        asked = requests_of("arc_easy", "arc", num_fewshot)
    assert asked == ours("arc_easy", num_fewshot=num_fewshot, data_dir=folder)
    assert asked[0][0].count("Question: ") == num_fewshot + 1


@pytest.mark.parametrize("split", ["validation", "train", "test"])
def test_another_split_is_asked_as_coral_eval_asks_it_and_the_configuration_says_so(folder: Path, split: str) -> None:
    with local_data(folder, split=split):
        asked = requests_of("arc_easy", "arc", 3)
        config = own_manager("arc").load(["arc_easy"])["tasks"]["arc_easy"].dump_config()
    assert asked == ours("arc_easy", num_fewshot=3, data_dir=folder, split=split)
    assert config["test_split"] == split


def test_a_whole_run_in_python_has_the_questions_and_answers_of_coral_eval() -> None:
    model = make_model("llama")
    arguments = {"tasks": ["arc_easy"], "task_manager": own_manager("arc"), "limit": N, "bootstrap_iters": 0}
    with local_data(split="validation"):
        results = lm_eval.simple_evaluate(model=make_hflm(model), **arguments)
    questions = load_task("arc_easy", TaskOptions(limit=N, split="validation"))
    docs = [sample["doc"]["id"] for sample in results["samples"]["arc_easy"]]
    assert [f"arc_easy/validation/{name}" for name in docs] == [q.id for q in questions]
    assert [int(sample["target"]) for sample in results["samples"]["arc_easy"]] == [q.answer for q in questions]


# ------------------------------------------------------------------------------------------------------ what is missing


def test_data_that_is_nowhere_is_one_sentence_with_what_to_do() -> None:
    with local_data(), pytest.raises(CoralError) as error:
        own_manager("arc").load(["arc_easy"])
    said = str(error.value)
    assert "needs its split 'test', which is not here" in said
    assert "locally: validation; ask for one of those (--split validation)" in said
    assert "--data DIR, as DIR/arc_easy/test.jsonl" in said
    assert "\n" not in said


def test_without_the_embedded_data_coral_assets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_data, "embedded_data", lambda: None)
    with local_data(), pytest.raises(CoralError, match=r"fetch the embedded data .`coral assets`.*--data DIR"):
        own_manager("arc").load(["arc_easy"])


def test_a_pool_of_examples_that_is_nowhere_is_missed_only_when_one_is_to_be_shown() -> None:
    with local_data(split="validation"):
        assert requests_of("arc_easy", "arc") == ours("arc_easy", split="validation")
        with pytest.raises(CoralError, match=r"worked examples from its split 'train'.*train.jsonl.*--num_fewshot 0"):
            requests_of("arc_easy", "arc", 1)


def test_what_a_run_needs_is_known_before_a_task_is_made(folder: Path) -> None:
    config = own_manager("arc").task_index["arc_easy"].cfg
    with pytest.raises(CoralError, match="needs its split 'test'"):
        Sources().require(config, None)
    with pytest.raises(CoralError, match="worked examples from its split 'train'"):
        Sources(split="validation").require(config, 2)
    sources = Sources(folder)
    sources.require(config, 2)
    (folder / "arc_easy" / "test.jsonl").unlink()
    assert len(sources.splits(config)["test"]) == 20, "it is read once"


def test_a_damaged_file_is_named_though_no_example_is_shown(folder: Path) -> None:
    (folder / "arc_easy" / "train.jsonl").write_text("{", "utf-8")
    with local_data(folder), pytest.raises(CoralError, match=r"train\.jsonl, line 1: not valid JSON"):
        own_manager("arc").load(["arc_easy"])


# ------------------------------------------------------------------------------------------------- nothing else changes


def test_lm_evals_class_is_as_before_after_the_block_and_after_an_error() -> None:
    before = ConfigurableTask.download, ConfigurableTask.fewshot_docs
    with local_data():
        assert ConfigurableTask.download is not before[0]
    with pytest.raises(ZeroDivisionError), local_data():
        _ = 1 / 0
    assert (ConfigurableTask.download, ConfigurableTask.fewshot_docs) == before


def test_a_task_that_makes_its_own_data_stays_as_it_is(tmp_path: Path) -> None:
    def rows(**_: Any) -> Any:
        docs = [{"question": "Q", "options": ["a", "b"], "answer": 1}]
        return {"test": datasets.Dataset.from_list(docs)}

    write_task(tmp_path, toy_questions(2))
    with local_data(split="validation"):
        spec = {"group": "one", "task": [{"task": "toy", "custom_dataset": rows}]}
        built = manager(tmp_path).load(spec)["tasks"]["toy"]
    built.build_all_requests()
    assert [request.args[1] for request in built.instances] == [" a", " b"]
