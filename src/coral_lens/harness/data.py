"""lm-eval's own tasks with data from our sources: the user's folder, the embedded data, then the hub.

    with local_data("DIR"):
        lm_eval.simple_evaluate(model="hf", tasks=["hellaswag"], ...)

Two methods of lm-eval's task class are wrapped while the `with` runs: the one that downloads a dataset, and the one that reads
the questions for worked examples, because lm-eval reads these even where it shows none. Prompts, metrics and everything
else stay as lm-eval has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coral_lens.data.task_data import MissingSplitError, Origin, Splits, origin_of
from coral_lens.data.tasks import evaluation_split, number_of_shots, shot_split
from coral_lens.errors import CoralError
from coral_lens.harness.wrapping import replaced_methods


@dataclass(frozen=True)
class Sources:
    """Where the tasks of a run have their data from."""

    data_dir: Path | None = None
    """A folder with `<task>/<split>.jsonl[.gz]` or `.parquet`, looked into before the embedded data and the hub."""
    split: str | None = None
    """Evaluate this split of every task; None: the one that lm-eval evaluates."""
    _read: dict[str, Splits] = field(default_factory=dict, repr=False)

    def splits(self, config: Mapping[str, Any]) -> Splits:
        """Return the splits of a task; what was read of them once is kept."""
        origin = replace(origin_of(config, self.data_dir), asked_as="--split {split}")
        return self._read.setdefault(identity(origin), Splits(origin))

    def require(self, config: Mapping[str, Any], num_fewshot: int | None) -> None:
        """Read what a run will need of a task: data that is nowhere is told before a model is loaded."""
        if "custom_dataset" in config:
            return
        splits = self.splits(config)
        _ = splits[self.split or evaluation_split(config)]
        if number_of_shots(config.get("num_fewshot"), num_fewshot) and (pool := shot_split(config)) is not None:
            try:
                _ = splits[pool]
            except MissingSplitError as error:
                raise no_shots(config) from error


def identity(origin: Origin) -> str:
    """Return what two tasks have in common if they read the same data."""
    return repr((origin.task, origin.path, origin.name, sorted((origin.kwargs or {}).items(), key=str)))


@contextmanager
def local_data(data_dir: str | Path | None = None, *, split: str | None = None) -> Iterator[Sources]:
    """Let every lm-eval task that is made inside the block have its data from our sources."""
    from lm_eval.api.task import ConfigurableTask

    sources = Sources(Path(data_dir) if data_dir is not None else None, split)
    methods = {
        "download": reading(ConfigurableTask.download, sources),
        "fewshot_docs": excusing(ConfigurableTask.fewshot_docs),
    }
    with replaced_methods(ConfigurableTask, methods):
        yield sources


def reading(download: Callable[..., None], sources: Sources) -> Callable[..., None]:
    """Wrap a task's `download`: it gets splits that are read when asked for; a task that makes its data stays as it is."""

    def read(task: Any, dataset_kwargs: dict[str, Any] | None = None, **rest: Any) -> None:
        if callable(task.config.custom_dataset):
            return download(task, dataset_kwargs, **rest)
        config = config_of(task)
        if sources.split is not None:
            ask_split(task, config, sources.split)
        task.dataset = sources.splits(config)

    return read


def config_of(task: Any) -> dict[str, Any]:
    """Return a task's configuration; a task written in Python has its dataset and its name in its class."""
    config = {"task": type(task).__name__, **task.config.to_dict(keep_callable=True)}
    return config | {"dataset_path": task.DATASET_PATH, "dataset_name": task.DATASET_NAME}


def ask_split(task: Any, config: Mapping[str, Any], split: str) -> None:
    """Have a task evaluate another split than its own, which its logged configuration then says."""
    if split == (config.get("test_split") or config.get("validation_split")):
        return
    if task.fewshot_cfg.samples is None:
        # lm-eval leaves a question out of its own shots only where both splits are named and equal
        task.fewshot_cfg.split = shot_split(config)
    task.config.test_split = split


def excusing(fewshot_docs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a task's `fewshot_docs`: where their split is nowhere, that is told only when one is to be shown."""

    def read(task: Any) -> Any:
        try:
            return fewshot_docs(task)
        except MissingSplitError:
            task.sampler = NoShots(no_shots(config_of(task)))
            return None

    return read


@dataclass(frozen=True)
class NoShots:
    """Stands for lm-eval's sampler of worked examples where there are none to draw."""

    error: CoralError

    def set_rnd(self, rnd: int | None) -> None:
        """Take a seed, as lm-eval's sampler does."""

    def sample(self, n: int, eval_doc: Any = None) -> Any:
        """Say why there are none."""
        raise self.error


def no_shots(config: Mapping[str, Any]) -> CoralError:
    """Return the complaint that a task has nowhere to take worked examples from."""
    task, split = config["task"], shot_split(config)
    return CoralError(
        f"Task {task!r} takes its worked examples from its split {split!r}, which is not here and cannot be downloaded; give it "
        f"with --data DIR, as DIR/{task}/{split}.jsonl, or leave worked examples out (--num_fewshot 0)."
    )
