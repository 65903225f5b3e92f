"""`coral lm-eval ...`: lm-eval's own command line, which then knows the model `coral` and metrics of calibration.

Releases up to 0.4.13 read no entry points, so `lm_eval --model coral` works with later ones only. All arguments are handed on
as they are. Data comes from our own sources; what is missing, and what cannot be corrected, is told before a model is
loaded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from coral_lens.data.task_index import lm_eval_names
from coral_lens.errors import CoralError, nearest, need
from coral_lens.harness.data import Sources, local_data
from coral_lens.harness.metrics import calibration

MULTIPLE_CHOICE = "multiple_choice"
MISTAKES = (ValueError, TypeError, OSError)
"""What lm-eval raises while it reads its arguments."""


def run_lm_eval(arguments: Sequence[str], *, data_dir: Path | None = None, split: str | None = None) -> None:
    """Run lm-eval's command line with these arguments; a mistake in them is a CoralError."""
    need("eval", by="lm-eval's command line")
    from lm_eval.__main__ import cli_evaluate

    import coral_lens.harness.model  # noqa: F401  (registers the model)

    with (
        command_line(["lm-eval", *arguments]),
        local_data(data_dir, split=split) as sources,
        checked_runs(sources) as begun,
        calibration(),
    ):
        try:
            cli_evaluate()
        except MISTAKES as error:
            # a task written in Python asks the hub by itself
            if begun and not isinstance(error, ConnectionError):
                raise
            raise CoralError(sentence_of(error)) from error


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
def checked_runs(sources: Sources) -> Iterator[list[str]]:
    """Check what lm-eval is about to evaluate at the last moment before it loads the model, when all arguments are read.

    The list that is given holds the model's name from that moment on.
    """
    import lm_eval
    from lm_eval.evaluator import simple_evaluate

    begun: list[str] = []

    @wraps(simple_evaluate)
    def evaluate(**arguments: Any) -> Any:
        refuse_run(arguments, sources)
        begun.append(arguments["model"])
        return simple_evaluate(**arguments)

    lm_eval.simple_evaluate = evaluate
    try:
        yield begun
    finally:
        # lm-eval makes the name up when it is asked for
        del lm_eval.simple_evaluate


def sentence_of(error: Exception) -> str:
    """Return lm-eval's complaint about its arguments in one line, with names close to that of an unknown task."""
    said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    missing = re.fullmatch(r"Tasks not found: (.+)", said)
    hint = nearest(missing[1].split(", ")[0], lm_eval_names()) if missing else ""
    return f"lm-eval: {said}.{hint}"


# ---------------------------------------------------------------------------------------------------------- refusals


def refuse_run(arguments: Mapping[str, Any], sources: Sources) -> None:
    """Refuse a model or its arguments if they are unknown, tasks that a lens cannot correct, and tasks without data."""
    refuse_model(arguments["model"])
    configs = [c for task in arguments["tasks"] for c in configs_of(task, arguments["task_manager"].task_index)]
    if arguments["model"] == "coral":
        refuse_uncorrectable(arguments, configs)
    for config in configs:
        sources.require(config, arguments["num_fewshot"])


def refuse_model(name: str) -> None:
    """Refuse a model that lm-eval does not know."""
    from lm_eval.api.registry import model_registry

    if name not in model_registry:
        known = sorted(model_registry.keys())
        raise CoralError(f"lm-eval knows no model called {name!r}.{nearest(name, known)} Known: {', '.join(known)}.")


def refuse_uncorrectable(arguments: Mapping[str, Any], configs: Sequence[Mapping[str, Any]]) -> None:
    """Refuse unknown arguments and, where a lens is to be used, tasks that it cannot correct and answers kept before."""
    from coral_lens.harness.model import refuse_cache, refuse_unknown_arguments

    settings = arguments["model_args"] or {}
    refuse_unknown_arguments(settings)
    if settings.get("lens") is None or settings.get("gamma") == 0:
        return
    if arguments["use_cache"]:
        refuse_cache()
    for config in configs:
        kind = config.get("output_type", "generate_until")
        if kind != MULTIPLE_CHOICE:
            raise CoralError(
                f"Task {config['task']!r} has output_type {kind!r}; a lens corrects multiple-choice tasks only: leave the task "
                "or the lens out."
            )


# ------------------------------------------------------------------------------------------------- tasks of a run

STRUCTURE = {"group", "group_alias", "task", "tag", "aggregate_metric_list", "metadata", "version"}
"""What a group says about itself; everything else it says changes its tasks."""


def configs_of(
    task: Any, index: Mapping[str, Any], changes: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the configuration of a task, or of each task of a group or tag, with what these change.

    Tasks written in Python do not tell theirs and are left out.
    """
    item = task if isinstance(task, dict) else {"task": task}
    name = item.get("group") or item.get("task")
    entry = index.get(name) if isinstance(name, str) else None
    kind = entry.kind.name if entry else "GROUP" if isinstance(item.get("task"), list) else "TASK"
    config = {**((entry and entry.cfg) or {}), **(changes or {}), **item}
    if kind in MEMBERS:
        below = {key: value for key, value in config.items() if key not in STRUCTURE}
        for member in MEMBERS[kind](entry, item):
            yield from configs_of(member, index, below)
    elif "class" not in config and (entry or isinstance(task, dict)):
        yield config


MEMBERS: dict[str, Callable[[Any, Mapping[str, Any]], Sequence[Any]]] = {
    "GROUP": lambda entry, item: (entry.cfg.get("task") if entry else item["task"]) or [],
    "TAG": lambda entry, item: sorted(entry.tags),
}
"""The tasks within what lm-eval's index holds, or a user writes in place, of each kind."""
