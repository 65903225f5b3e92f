"""ECE, cwECE and Brier over ragged options as metrics of lm-eval's own multiple-choice tasks, for any model.

    with calibration():
        lm_eval.simple_evaluate(model="hf", ...)

lm-eval 0.4.13 hard-codes which metrics a multiple-choice task has, so a registered one would never be asked for; and its
`brier_score` fails where questions have different numbers of options. The methods of its task class are therefore wrapped
while the `with` runs. Tasks that score by a function of their own, or have several right options, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from coral_lens.data.tasks import right_option
from coral_lens.errors import CoralError
from coral_lens.harness.wrapping import replaced_methods
from coral_lens.metrics.scores import METRICS, score
from coral_lens.ragged import Options
from coral_lens.records import UNKNOWN, Predictions

Item = tuple[int, list[float]]
"""The right option of a question and the probabilities of all: what lm-eval collects before it aggregates."""


@contextmanager
def calibration() -> Iterator[None]:
    """Add the metrics to every multiple-choice task that runs inside the block."""
    from lm_eval.api.task import ConfigurableTask

    methods = {
        "process_results": with_calibration(ConfigurableTask.process_results),
        "aggregation": extended(ConfigurableTask.aggregation, aggregations()),
        "higher_is_better": extended(
            ConfigurableTask.higher_is_better, {name: METRICS[name].higher_is_better for name in aggregations()}
        ),
    }
    with replaced_methods(ConfigurableTask, methods):
        yield


def aggregations() -> dict[str, Callable[[Sequence[Any]], float]]:
    """Return how each metric is made of what was collected; lm-eval knows the standard error of its own mean."""
    from lm_eval.api.metrics import mean

    return {"ece": lambda items: gap("ece", items), "cwece": lambda items: gap("cwece", items), "brier": mean}


def with_calibration(process_results: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap a task's `process_results`, which turns the answers to one document into its metrics."""

    def process(task: Any, doc: Any, results: Sequence[Any]) -> dict[str, Any]:
        values = process_results(task, doc, results)
        item = item_of(task, doc, results) if is_plain(task) else None
        if item is None:
            return values
        answer, probs = item
        squares = sum((p - (i == answer)) ** 2 for i, p in enumerate(probs))
        # what the task itself computes comes last: a metric of its own by one of these names stays
        return {"ece": item, "cwece": item, "brier": squares} | values

    return process


def extended(method: Callable[..., Mapping[str, Any]], extra: Mapping[str, Any]) -> Callable[..., dict[str, Any]]:
    """Wrap a method of a task that returns something for each of its metrics."""

    def both(task: Any) -> dict[str, Any]:
        return {**(extra if is_plain(task) else {}), **method(task)}

    return both


def is_plain(task: Any) -> bool:
    """Whether a task is multiple choice by lm-eval's own rule, and its metrics are wanted."""
    return (
        task.OUTPUT_TYPE == "multiple_choice"
        and not callable(task.config.process_results)
        and "bypass" not in task._metric_fn_list
    )


def item_of(task: Any, doc: Any, results: Sequence[Any]) -> Item | None:
    """Return a document's right option and probabilities; None where not exactly one option is right."""
    choices = [str(choice) for choice in task.doc_to_choice(doc)]
    try:
        answer = right_option(task, doc, choices, str(doc))
    except CoralError:
        return None
    # the mutual-information metric adds requests after the ordinary ones
    logprobs = np.array([float(logprob) for logprob, _ in results[: len(choices)]])
    return None if answer == UNKNOWN else (answer, Options.of_sizes([len(choices)]).softmax(logprobs).tolist())


def gap(name: str, items: Sequence[Item]) -> float:
    """Return ECE or cwECE of the collected questions, exactly as `coral eval` computes it."""
    predictions = Predictions(
        method="lm-eval",
        model="",
        task="",
        split="",
        ids=tuple(str(i) for i in range(len(items))),
        answers=np.array([answer for answer, _ in items]),
        offsets=Options.of_sizes([len(probs) for _, probs in items]).edges,
        probs=np.array([p for _, probs in items for p in probs]),
    )
    return score(predictions, name)
