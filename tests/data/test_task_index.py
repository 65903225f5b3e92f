"""A folder of one's own tasks is read as lm-eval reads it; Python that it names runs only if that was asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from coral_lens.data import task_index
from coral_lens.data.questions import load_questions
from coral_lens.data.settings import TaskOptions
from coral_lens.errors import CoralError

YAML = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "Q: {{{{ask}}}}\\nA:"
doc_to_choice: ["yes", "no"]
doc_to_target: right
{more}
"""


@pytest.fixture(autouse=True)
def forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    yield
    task_index._included.clear()
    task_index._trusted.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"ask": f"{i}?", "right": "no" if i else "yes"}) + "\n" for i in range(3)))
    home = tmp_path / "tasks" / "mine"
    home.mkdir(parents=True)
    define(home, "mine_plain")
    (home / "utils.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n\ndef shout(doc):\n    return doc['ask'] + '!'\n"
    )
    return tmp_path / "tasks"


def define(home: Path, name: str, more: str = "") -> None:
    text = YAML.format(name=name, data=home.parents[1] / "data.jsonl", more=more)
    if "doc_to_text" in more:
        text = "\n".join(line for line in text.splitlines() if not line.startswith('doc_to_text: "Q')) + "\n"
    (home / f"{name}.yaml").write_text(text)


def test_tasks_of_a_folder_are_known_by_their_names(folder: Path) -> None:
    questions = load_questions("mine_plain", TaskOptions(include_path=folder))
    assert [(q.text, q.options, q.answer, q.task) for q in questions[:2]] == [
        ("Q: 0?\nA:", ("yes", "no"), 0, "mine_plain"),
        ("Q: 1?\nA:", ("yes", "no"), 1, "mine_plain"),
    ]


@pytest.mark.parametrize(
    "more",
    [
        "doc_to_text: !function utils.shout",
        "metric_list:\n  - metric: !function utils.shout",
        "include: inner.yaml",
        "{include: [inner.yaml]}",
    ],
)
def test_a_task_that_names_python_is_refused_before_it_runs(folder: Path, tmp_path: Path, more: str) -> None:
    home = folder / "mine"
    (home / "inner.yaml").write_text("process_docs: !function utils.shout\n")
    if more.startswith("{"):
        (home / "hooked.yaml").write_text("{task: hooked, output_type: multiple_choice, include: [inner.yaml]}\n")
    else:
        define(home, "hooked", more)
    name = "hooked" if not more.startswith("{") else "mine_plain"
    if more.startswith("{"):  # a definition in flow style has no name that is found, but may be included by another
        define(home, "mine_plain", "include: hooked.yaml")
    with pytest.raises(
        CoralError, match=r"would run Python: .*\.yaml names the function 'utils.shout'.*--trust-task-code"
    ):
        load_questions(name, TaskOptions(include_path=folder))
    assert not (tmp_path / "ran").exists()


def test_python_runs_where_it_is_trusted_and_only_there(folder: Path, tmp_path: Path) -> None:
    define(folder / "mine", "hooked", "doc_to_text: !function utils.shout")
    questions = load_questions("hooked", TaskOptions(include_path=folder, trust_task_code=True))
    assert questions[0].text == "0?!"
    assert (tmp_path / "ran").exists()
    with pytest.raises(CoralError, match="would run Python"):
        load_questions("hooked", TaskOptions(include_path=folder))


def test_a_template_of_a_task_runs_in_a_sandbox(folder: Path) -> None:
    attack = "doc_to_text: \"{{ ''.__class__.__mro__[1].__subclasses__() }}\""
    define(folder / "mine", "hostile", attack)
    with pytest.raises(CoralError, match=r"unsafe|SecurityError|undefined"):
        load_questions("hostile", TaskOptions(include_path=folder))


@pytest.mark.parametrize(("name", "said"), [("none", "is not a folder"), ("empty", "holds no task definition")])
def test_a_folder_without_tasks_is_refused(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CoralError, match=said):
        load_questions("mine_plain", TaskOptions(include_path=tmp_path / name))
