"""`coral lm-eval ...`: lm-eval's own command line, which then knows the model `coral` and metrics of calibration.

Releases up to 0.4.13 read no entry points, so that `lm_eval --model coral` works with later ones only. All arguments are
handed on as they are; what cannot be corrected is refused before a model is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from coral_lens.errors import CoralError
from coral_lens.harness.metrics import calibration

MULTIPLE_CHOICE = "multiple_choice"


def run_lm_eval(arguments: Sequence[str]) -> None:
    """Run lm-eval's command line with these arguments."""
    from lm_eval.__main__ import cli_evaluate

    import coral_lens.harness.model  # noqa: F401  (registers the model)

    with command_line(["lm-eval", *arguments]), checked_runs(), calibration():
        cli_evaluate()


@contextmanager
def command_line(arguments: Sequence[str]) -> Iterator[None]:
    """Let `sys.argv`, which lm-eval reads and changes, be these arguments."""
    before = sys.argv
    sys.argv = list(arguments)
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def checked_runs() -> Iterator[None]:
    """Check what lm-eval is about to evaluate at the last moment before it loads the model, when all arguments are read."""
    import lm_eval
    from lm_eval.evaluator import simple_evaluate

    @wraps(simple_evaluate)
    def evaluate(**arguments: Any) -> Any:
        if arguments["model"] == "coral":
            refuse_run(arguments)
        return simple_evaluate(**arguments)

    lm_eval.simple_evaluate = evaluate
    try:
        yield
    finally:
        # lm-eval makes the name up when it is asked for
        del lm_eval.simple_evaluate


def refuse_run(arguments: Mapping[str, Any]) -> None:
    """Refuse, where a lens is to be used, tasks that it cannot correct and answers kept from another run."""
    settings = arguments["model_args"] or {}
    if settings.get("lens") is None or settings.get("gamma") == 0:
        return
    if arguments["use_cache"]:
        from coral_lens.harness.model import refuse_cache

        refuse_cache()
    for task in arguments["tasks"]:
        for name, kind in kinds_of(task, arguments["task_manager"].task_index):
            if kind != MULTIPLE_CHOICE:
                raise CoralError(
                    f"Task {name!r} has output_type {kind!r}; a lens corrects multiple-choice tasks only: leave the task or "
                    "the lens out."
                )


def kinds_of(task: Any, index: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and output type of a task, or of all tasks of a group or tag; those in Python do not tell theirs."""
    config = task if isinstance(task, dict) else {}
    name = config.get("group") or config.get("task") or task
    entry = index.get(name) if isinstance(name, str) else None
    inside = WITHIN.get(entry.kind.name) if entry else None
    if isinstance(config.get("task"), list):
        members = config["task"]
    elif inside is not None:
        members = inside(entry)
    else:
        kind = {**(entry.cfg or {}), **config} if entry else config
        if kind and "class" not in kind:
            yield str(name), str(kind.get("output_type", "generate_until"))
        return
    for member in members:
        yield from kinds_of(member, index)


WITHIN: dict[str, Callable[[Any], Sequence[Any]]] = {
    "GROUP": lambda entry: entry.cfg.get("task") or [],
    "TAG": lambda entry: sorted(entry.tags),
}
"""The tasks within what lm-eval's index holds of each kind."""
