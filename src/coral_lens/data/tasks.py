"""Questions from any lm-eval multiple-choice task, with the very prompts that lm-eval would send.

lm-eval's own task object renders them; this file only hands it the data and reads the requests off. It never scores.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from coral_lens.data.licences import LICENCES
from coral_lens.data.settings import TaskOptions
from coral_lens.data.task_data import Splits, count_rows, local_splits, origin_of
from coral_lens.data.task_index import Leaf, definition, is_task, leaves, manager, refuse_code
from coral_lens.errors import CoralError, need
from coral_lens.records import UNKNOWN, Question, Rendered

_ID_COLUMNS = ("id", "idx", "ind", "question_id", "qid", "example_id")
_GROUP_COLUMNS = ("article", "passage", "paragraph", "story", "context", "support", "source_id")
"""Columns that several questions may share: a text that is read first, or where it was taken from."""
_OWN_SCORES = {"agieval", "mutual"}
"""Folders of tasks that score by a function of their own and still have one right option."""


def load_task(name: str, options: TaskOptions | None = None) -> list[Question]:
    """Return the questions of an lm-eval task, of one of our own, or of all multiple-choice tasks of a group or tag."""
    options = options or TaskOptions()
    with _quiet():
        members = leaves(name)
        chosen = [leaf for leaf in members if _is_multiple_choice(leaf, strict=len(members) == 1)]
        if not chosen:
            raise CoralError(f"The group {name!r} holds {len(members)} tasks, but none of them is multiple-choice.")
        return [question for leaf in chosen for question in _questions(leaf, options)]


@dataclass(frozen=True, slots=True)
class AvailableTask:
    """A task whose questions are on this machine."""

    task: str
    splits: Mapping[str, int]
    """Number of questions of each split."""
    source: str
    """`data folder` or `embedded`."""
    licence: str
    """Of the data; empty if not known."""


def available_tasks(data_dir: Path | None = None) -> list[AvailableTask]:
    """Return the well-known tasks, and those with a folder in `data_dir`, that can be used without a network.

    A task with splits from both sources appears twice.
    """
    folders = sorted(p.name for p in data_dir.iterdir() if p.is_dir()) if data_dir and data_dir.is_dir() else []
    rows = []
    with _quiet():
        for name in sorted({*LICENCES, *(f for f in folders if is_task(f))}):
            counts: dict[str, dict[str, int]] = {}
            for leaf in leaves(name):
                for split, place in local_splits(origin_of(definition(leaf), data_dir)).items():
                    of_source = counts.setdefault("embedded" if place.is_dir() else "data folder", {})
                    of_source[split] = of_source.get(split, 0) + count_rows(place)
            rows += [AvailableTask(name, splits, source, LICENCES.get(name, "")) for source, splits in counts.items()]
    return rows


@dataclass(frozen=True, slots=True)
class Definition:
    """What a task's definition says of its data: enough to find leaks before a question is read."""

    task: str
    data: str
    """The dataset; tasks that ask the same questions in different ways share it."""
    test_split: str | None
    shot_split: str | None
    """Where worked examples come from; None if the task brings its own."""
    shots: int | None
    """How many worked examples the task itself asks for; None if it leaves that open."""


def shot_splits(known: Iterable[Definition], asked: int | None) -> list[str]:
    """Return the splits that worked examples come from; none where there are no worked examples."""
    return sorted({d.shot_split for d in known if d.shot_split and number_of_shots(d.shots, asked)})


def definitions(name: str) -> list[Definition]:
    """Return what is known of a task, or of each multiple-choice task of a group or tag."""
    with _quiet():
        members = leaves(name)
        configs = [definition(leaf) for leaf in members if _is_multiple_choice(leaf, strict=len(members) == 1)]
    return [
        Definition(
            task=str(config["task"]),
            data=f"{config.get('dataset_path') or config['task']}/{config.get('dataset_name') or ''}".lower(),
            test_split=config.get("test_split"),
            shot_split=shot_split(config),
            shots=config.get("num_fewshot"),
        )
        for config in configs
    ]


def _is_multiple_choice(leaf: Leaf, *, strict: bool) -> bool:
    """Whether a leaf can be used; with `strict`, say why not."""
    config = definition(leaf)
    kind = config.get("output_type", "generate_until")
    own_score = config.get("process_results")
    if "class" in config or kind != "multiple_choice":
        why = "is written in Python" if "class" in config else f"has output_type {kind!r}"
        why += "; only multiple_choice tasks written in YAML can be used"
    elif own_score is not None and not _OWN_SCORES & set(leaf.path.parts):
        why = f"scores its options by a function of its own ({Path(str(own_score)).name}), so no single option is right"
    else:
        return True
    if strict:
        raise CoralError(f"Task {leaf.task!r} {why}.")
    return False


def _questions(leaf: Leaf, options: TaskOptions) -> list[Question]:
    refuse_code(leaf)
    config = definition(leaf)
    splits = Splits(origin_of(config, options.data_dir))
    split = options.split or evaluation_split(config)
    n_shots = number_of_shots(config.get("num_fewshot"), options.num_fewshot)
    task = _build(leaf, {**_adapted(config, split=split, n_shots=n_shots), "custom_dataset": lambda **_: splits})
    task.set_fewshot_seed(options.seed)
    ids = _ids(task.task_docs, f"{leaf.task}/{split}")
    reader = _TaskReader(task, leaf.task, split, n_shots, options)
    docs = islice(zip(ids, task.task_docs, strict=True), options.limit)
    return [_question(reader, identity, doc) for identity, doc in docs]


def evaluation_split(config: Mapping[str, Any]) -> str:
    """Return the split that lm-eval evaluates: test, else validation."""
    split = config.get("test_split") or config.get("validation_split")
    if split is None:
        raise CoralError(
            f"Task {config['task']!r} names neither a test nor a validation split; ask for one: task:split."
        )
    return str(split)


def number_of_shots(own: int | None, asked: int | None) -> int:
    """Return the number of shots by lm-eval's rule: a task that says 0 itself is never overruled."""
    return int(own or 0) if asked is None or own == 0 else asked


def shot_split(config: Mapping[str, Any]) -> str | None:
    """Return the split that worked examples come from by lm-eval's rule; None if the task brings them itself."""
    shots = config.get("fewshot_config") or {}
    rule = (config.get(f"{kind}_split") for kind in ("fewshot", "training", "validation", "test"))
    return shots.get("split") or (None if shots.get("samples") else next((s for s in rule if s), None))


def _adapted(config: Mapping[str, Any], *, split: str, n_shots: int) -> dict[str, Any]:
    """Return what must change in a task's configuration to ask the questions of `split` with `n_shots` shots.

    Nothing that lm-eval's own run would see changes when `split` is the evaluation split. Without shots the pool that
    they would come from is never read, so that it need not exist.
    """
    changed: dict[str, Any] = {"num_fewshot": n_shots}
    shots = config.get("fewshot_config") or {}
    if n_shots == 0:
        changed |= {"fewshot_split": None, "fewshot_config": {"samples": []}}
    elif split != (config.get("test_split") or config.get("validation_split")) and not shots.get("samples"):
        # lm-eval leaves a question out of its own shots only where both splits are named and equal
        changed["fewshot_split"] = shot_split(config)
    if split != (config.get("test_split") or config.get("validation_split")):
        changed["test_split"] = split
    return changed


def _build(leaf: Leaf, changed: Mapping[str, Any]) -> Any:
    """Let lm-eval build the task: a group of one, which is its public way to override a task's configuration."""
    item = {**leaf.overrides, **changed, "task": leaf.task}
    try:
        built = manager(leaf.path.parent).load({"group": "coral_lens", "task": [item]})
    except CoralError:
        raise
    except Exception as error:  # templates and functions of 8,000 tasks meet the user's data here
        raise CoralError(f"Task {leaf.task!r} does not fit its data: {type(error).__name__}: {error}.") from error
    return built["tasks"][leaf.task]


def _ids(docs: Any, prefix: str) -> Iterator[str]:
    """Yield an id for each document: its own where a column holds unique ones, else its number."""
    for column in _ID_COLUMNS:
        if column in docs.features:
            own = [str(value) for value in docs[column]]
            if all(own) and len(set(own)) == len(own):
                return (f"{prefix}/{value}" for value in own)
    return (f"{prefix}/{number}" for number in range(len(docs)))


@dataclass(frozen=True, slots=True)
class _TaskReader:
    """A task object of lm-eval, and how its documents become questions."""

    task: Any
    name: str
    split: str
    n_shots: int
    options: TaskOptions

    @property
    def version(self) -> str:
        """The task's version and, where there are shots, how many and of which kind."""
        fixed = " fixed" if self.options.fixed_shots else ""
        return f"{self.task.VERSION}, {self.n_shots}{fixed} shots" if self.n_shots else str(self.task.VERSION)


def _question(reader: _TaskReader, identity: str, doc: Mapping[str, Any]) -> Question:
    task = reader.task
    if reader.options.fixed_shots:
        task.set_fewshot_seed(reader.options.seed)
    try:
        rendered = _render(reader, doc)
        text = _text(task, doc)
        answer = right_option(task, doc, rendered.choices, identity)
    except CoralError:
        raise
    except Exception as error:  # as in _build
        raise CoralError(
            f"Question {identity!r} does not fit its template: {type(error).__name__}: {error}."
        ) from error
    return Question(
        id=identity,
        group=_group(doc) or identity,
        text=text,
        # a few published questions have an empty option; it is scored as lm-eval scores it, and shown as such
        options=tuple(choice if choice.strip() else "(empty)" for choice in rendered.choices),
        answer=answer,
        task=reader.name,
        version=reader.version,
        split=reader.split,
        rendered=rendered,
    )


def _render(reader: _TaskReader, doc: Mapping[str, Any]) -> Rendered:
    """Return lm-eval's own requests for a document, one per option."""
    task, template = reader.task, reader.options.chat_template
    chat = template is not None
    context = task.fewshot_context(
        doc,
        num_fewshot=reader.n_shots,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        chat_template=template,
        gen_prefix=task.doc_to_prefix(doc),
    )
    requests = task.construct_requests(
        doc=doc, ctx=context, metadata=(reader.name, 0, 1), apply_chat_template=chat, chat_template=template
    )
    choices = tuple(str(choice) for choice in task.doc_to_choice(doc))
    # the mutual-information metric adds unconditional requests after the ordinary ones
    pairs = [request.args[:2] for request in requests[: len(choices)]]
    return Rendered(tuple(c for c, _ in pairs), tuple(o for _, o in pairs), choices, chat=chat)


def _text(task: Any, doc: Mapping[str, Any]) -> str:
    if not task.multiple_input:
        return str(task.doc_to_text(doc))
    # the options are whole contexts (Winogrande); what they share is the sentence they come from, or its end
    return str(task.doc_to_decontamination_query(doc) or task.doc_to_target(doc))


def right_option(task: Any, doc: Mapping[str, Any], choices: Sequence[str], identity: str) -> int:
    """Return the right option by lm-eval's rule (an index, or the text of an option), or UNKNOWN."""
    target = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    if isinstance(target, list):
        if len(target) > 1:
            raise CoralError(f"Question {identity!r} has {len(target)} right options; only one can be used.")
        target = target[0] if target else UNKNOWN
    if isinstance(target, str):
        target = choices.index(target) if target in choices else UNKNOWN
    return int(target) if target is not None and 0 <= target < len(choices) else UNKNOWN


def _group(doc: Mapping[str, Any]) -> str | None:
    """Return a digest of what several questions share, such as RACE's article; None if there is nothing."""
    for column in _GROUP_COLUMNS:
        shared = doc.get(column)
        if isinstance(shared, str) and shared.strip():
            return f"{column}-{hashlib.sha256(shared.strip().encode()).hexdigest()[:16]}"
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back lm-eval's and datasets' log lines and progress bars, and have each template compiled only once."""
    need("eval", by="A benchmark task")
    import datasets
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from lm_eval.utils import env

    with ExitStack() as stack:
        for name in ("lm_eval", "datasets"):
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        if not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            stack.callback(datasets.enable_progress_bars)
        # lm-eval compiles a template for every document, which is most of the time that a large task takes; and in no sandbox,
        # although a definition may be a stranger's
        sandbox = ImmutableSandboxedEnvironment(
            loader=env.loader, undefined=env.undefined, keep_trailing_newline=env.keep_trailing_newline
        )
        sandbox.filters = env.filters
        env.from_string = lru_cache(maxsize=256)(sandbox.from_string)
        stack.callback(env.__dict__.pop, "from_string", None)
        yield
