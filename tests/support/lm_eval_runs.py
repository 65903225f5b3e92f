"""A toy task for lm-eval, which asks our toy questions as `coral eval` does, and runs of lm-eval's own evaluator on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.tasks
import yaml
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from coral_lens.records import Question

TASK = "toy"


def write_task(folder: Path, questions: Sequence[Question], **changes: Any) -> Path:
    """Write a task's definition and data; what is asked equals the `text` style of our own questions."""
    folder.mkdir(parents=True, exist_ok=True)
    name = changes.get("task", TASK)
    data = folder / f"{name}.jsonl"
    docs = [{"question": q.text, "options": list(q.options), "answer": q.answer, "id": q.id} for q in questions]
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs), "utf-8")
    metrics = changes.pop("metrics", ["acc", "acc_norm"])
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / ".cache")},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "Question: {{question.strip()}}\nAnswer:",
        "doc_to_choice": "{{options}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in metrics],
        "metadata": {"version": 1.0},
        **changes,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    return folder


def evaluate(lm: Any, folder: Path, **arguments: Any) -> dict[str, Any]:
    """Run lm-eval's own `simple_evaluate` on the tasks of a folder, all of them unless some are named."""
    names = arguments.pop("tasks", [path.stem for path in sorted(folder.glob("*.yaml"))])
    found = lm_eval.simple_evaluate(model=lm, tasks=names, task_manager=manager(folder), bootstrap_iters=0, **arguments)
    assert found is not None
    return dict(found)


def requests_of(folder: Path, task: str = TASK) -> list[Instance]:
    """The requests that lm-eval sends for a task."""
    built = manager(folder).load([task])["tasks"][task]
    built.build_all_requests()
    return list(built.instances)


def manager(folder: Path) -> TaskManager:
    """lm-eval's own, for one folder: it would read 14,000 files otherwise."""
    return TaskManager(include_defaults=False, include_path=str(folder))


def definitions_of(folder: str) -> Path:
    """The folder with lm-eval's own definitions of some tasks."""
    return Path(lm_eval.tasks.__file__).parent / folder
