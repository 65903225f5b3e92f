"""Which task name is defined in which YAML file: ours first, then lm-eval's.

lm-eval's own index parses 14,000 YAML files before the first task can be loaded. Here only the few lines that carry
names are read, and the result is cached; a task's definition is then left to lm-eval, restricted to that one folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata, util
from pathlib import Path
from typing import Any

from coral_lens.data.assets import cache_dir
from coral_lens.errors import CoralError, nearest, need
from coral_lens.storage.lines import parse_json

OWN_TASKS = Path(__file__).parent / "lm_eval_tasks"
"""Our own task definitions, which lm-eval reads too (`--include_path`)."""

_NAME_LINE = re.compile(r"""^["']?(task|group|tag|class|include)["']?[ \t]*:[ \t]*(.*)$""", re.MULTILINE)
_ITEM = re.compile(r"\n(?:[ \t]*(?:#.*)?\n)*[ \t]*-[ \t]+([^\n]*)")
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """What a name stands for: a task or group defined in a file, or a tag that names several tasks."""

    path: Path | None
    group: bool = False
    tagged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Leaf:
    """One task to load, with what a group says about it (openllm, for example, sets the number of shots)."""

    task: str
    path: Path
    overrides: Mapping[str, Any] = field(default_factory=dict)


def leaves(name: str) -> list[Leaf]:
    """Return the task called `name`, or all tasks of that group or tag, in lm-eval's order."""
    unique = {leaf.task: leaf for leaf in _expand(name, {}, ())}
    return list(unique.values())


def definition(leaf: Leaf) -> dict[str, Any]:
    """Return the task's configuration as lm-eval reads it, `include:` resolved, functions still as strings."""
    entry = manager(leaf.path.parent).task_index[leaf.task]
    return {**entry.cfg, **leaf.overrides}


@lru_cache(maxsize=32)
def manager(folder: Path) -> Any:
    """Return lm-eval's task manager for one folder only."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False, include_path=str(folder))


def is_task(name: str) -> bool:
    """Whether a task, group or tag of that name is known."""
    return name in _entries(fresh=False)


def lm_eval_names() -> list[str]:
    """Return the names of all tasks, groups and tags that lm-eval itself brings."""
    return list(_cached_scan(_lm_eval_folder(), fresh=False))


def _expand(name: str, overrides: Mapping[str, Any], above: tuple[str, ...]) -> list[Leaf]:
    entry = _entry(name)
    if name in above:
        raise CoralError(f"The task group {name!r} contains itself ({' > '.join((*above, name))}).")
    if entry.tagged:
        return [leaf for task in sorted(entry.tagged) for leaf in _expand(task, overrides, (*above, name))]
    assert entry.path is not None
    if not entry.group:
        return [Leaf(task=name, path=entry.path, overrides=dict(overrides))]
    config = manager(entry.path.parent).task_index[name].cfg
    return list(_members(config, overrides, (*above, name)))


def _members(config: Mapping[str, Any], overrides: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[Leaf]:
    """Yield the leaves of a group: its items are names, or names with overrides, or groups written in place."""
    for item in config.get("task") or []:
        if isinstance(item, str):
            yield from _expand(item, overrides, above)
            continue
        name = item.get("group", item.get("task"))
        extra = {k: v for k, v in item.items() if k not in {"group", "task", "group_alias", "aggregate_metric_list"}}
        if isinstance(name, str) and name in _entries(fresh=False):
            yield from _expand(name, {**overrides, **extra}, above)
        elif isinstance(item.get("task"), list):
            yield from _members(item, overrides, above)
        else:
            raise CoralError(
                f"The task group {above[-1]!r} defines {name!r} in place, which is not supported; ask for its other "
                "tasks by name."
            )


def _entry(name: str) -> Entry:
    for fresh in (False, True):
        # a cached index may be older than the files: before giving up, look again
        entry = _entries(fresh=fresh).get(name)
        if entry is not None and (entry.path is None or entry.path.is_file()):
            return entry
    known = _entries(fresh=False)
    raise CoralError(
        f"There is no task called {name!r}.{nearest(name, known)} `coral tasks` lists what is available offline; a "
        "file of questions must exist or end in .jsonl, .csv, .tsv, .parquet, .arrow, .xlsx or .gz."
    )


_memory: dict[str, dict[str, Entry]] = {}
_included: dict[Path, dict[str, Entry]] = {}
"""The user's own folders of tasks, and the names in each."""
_trusted: set[Path] = set()
"""Those whose Python may run."""


def include_tasks(folder: str | Path, *, trusted: bool = False) -> None:
    """Have the tasks of a folder of the user's known by their names, which win over all others; `trusted`: their code may run."""
    if not Path(folder).is_dir():  # a link that leads to itself is none
        raise CoralError(f"--include-path {folder} is not a folder.")
    path = Path(folder).resolve()
    _included[path] = _scan(path)
    if not _included[path]:
        raise CoralError(f"--include-path {folder} holds no task definition (a .yaml file with `task:`).")
    (_trusted.add if trusted else _trusted.discard)(path)


def refuse_code(leaf: Leaf) -> None:
    """Refuse a task from a folder of the user's whose definition names Python functions, unless that was allowed."""
    home = next((folder for folder in _included if leaf.path.is_relative_to(folder)), None)
    if home is None or home in _trusted:
        return
    if found := next(_functions_in(leaf.path, set()), None):
        raise CoralError(
            f"Task {leaf.task!r} would run Python: {found[0]} names the function {found[1]!r}. Look at it, and give "
            "--trust-task-code if you trust it."
        )


def _functions_in(path: Path, seen: set[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the functions that a definition names, those of the files that it includes too, without making anything of them."""
    import yaml

    if path in seen:
        return
    seen.add(path)
    try:
        tree = yaml.compose(path.read_text("utf-8"), Loader=yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CoralError(f"{path} cannot be read as a task definition: {error}.") from error
    todo = [tree] if tree is not None else []
    while todo:
        node = todo.pop()
        if node.tag.startswith("!"):
            yield path, str(node.value)
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                todo += [key, value]
                if key.value == "include":
                    names = value.value if isinstance(value, yaml.SequenceNode) else [value]
                    for name in names:
                        yield from _functions_in(Path(os.path.normpath(path.parent / str(name.value))), seen)
        elif isinstance(node, yaml.SequenceNode):
            todo += node.value


def _entries(*, fresh: bool) -> dict[str, Entry]:
    """Return lm-eval's names, ours and the user's, the later winning; `fresh` reads the files again."""
    root = _lm_eval_folder()
    if fresh or str(root) not in _memory:
        _memory[str(root)] = {**_cached_scan(root, fresh=fresh), **_scan(OWN_TASKS)}
    if not _included:
        return _memory[str(root)]
    return _memory[str(root)] | {name: entry for known in _included.values() for name, entry in known.items()}


def _lm_eval_folder() -> Path:
    need("eval", by="A benchmark task")
    # find_spec on the top package only: importing lm_eval costs a second
    spec = util.find_spec("lm_eval")
    assert spec is not None, "the extra has it"
    assert spec.origin is not None, "lm_eval is an ordinary package"
    return Path(spec.origin).parent / "tasks"


def _cached_scan(root: Path, *, fresh: bool) -> dict[str, Entry]:
    stat = root.stat()
    key = [_FORMAT, metadata.version("lm_eval"), str(root), stat.st_mtime_ns, len(os.listdir(root))]
    file = cache_dir() / "task-index.json"
    if not fresh:
        try:
            stored = parse_json(file.read_text("utf-8"))
            if stored["key"] == key:
                return {name: _stored_entry(root, *entry) for name, entry in stored["entries"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # no cache, or a damaged one: made again below
    entries = _scan(root)
    rows = {n: (e.path.relative_to(root).as_posix() if e.path else None, e.group, e.tagged) for n, e in entries.items()}
    _write_cache(file, {"key": key, "entries": rows})
    return entries


def _stored_entry(root: Path, path: str | None, group: bool, tagged: list[str]) -> Entry:
    """Return an entry of the cache. It must lie below lm-eval's folder: the functions that a definition names are run."""
    if not all(isinstance(name, str) for name in tagged) or not isinstance(group, bool):
        raise ValueError("an entry of another form")
    if path is None:
        return Entry(None, group, tuple(tagged))
    # not resolved, which would ask the disk 14,000 times: who can put a link into lm-eval's folder can put code there
    if path.startswith(("/", "\\")) or ":" in path or ".." in re.split(r"[/\\]", path):
        raise ValueError(f"{path} lies outside")
    return Entry(root / path, group, tuple(tagged))


def _write_cache(file: Path, content: Mapping[str, Any]) -> None:
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(content), "utf-8")
        scratch.replace(file)
    except OSError:  # an unwritable cache costs a second next time, no more
        with suppress(OSError):
            scratch.unlink()


def _scan(root: Path) -> dict[str, Entry]:
    """Read the names in every YAML file below `root`; as in lm-eval, the first file in path order wins."""
    entries: dict[str, Entry] = {}
    tags: dict[str, list[str]] = {}
    seen: dict[Path, dict[str, list[str]]] = {}
    for path in _yaml_files(root):
        fields = _names_in(path, seen)
        name = (fields.get("group") if "class" not in fields else None) or fields.get("task")
        if not name or (len(name) != 1) or name[0] in entries or name[0] in tags:
            continue
        is_group = "group" in fields and "class" not in fields
        entries[name[0]] = Entry(path, group=is_group)
        if not is_group:
            for tag in fields.get("tag", []):
                if tag not in entries:
                    tags.setdefault(tag, []).append(name[0])
    return entries | {tag: Entry(None, tagged=tuple(sorted(tasks))) for tag, tasks in tags.items()}


def _yaml_files(root: Path) -> Iterable[Path]:
    paths = []
    for folder, inside, files in os.walk(root):
        inside[:] = [d for d in inside if d not in {"__pycache__", ".ipynb_checkpoints"}]
        paths += [Path(folder, f) for f in files if f.endswith(".yaml")]
    return sorted(paths, key=lambda p: p.as_posix())


def _names_in(path: Path, seen: dict[Path, dict[str, list[str]]]) -> dict[str, list[str]]:
    """Return the naming fields of one file, those of its `include:` files below its own."""
    if path in seen:
        return seen[path]
    seen[path] = {}  # a file that includes itself ends here
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    own: dict[str, list[str]] = {}
    for match in _NAME_LINE.finditer(text):
        own[match[1]] = _values(match[2], text[match.end() :])
    merged: dict[str, list[str]] = {}
    for included in own.pop("include", []):
        merged |= _names_in(Path(os.path.normpath(path.parent / included)), seen)
    seen[path] = merged | own
    return seen[path]


def _values(rest_of_line: str, following: str) -> list[str]:
    """Return a scalar, a [flow, list], or the `- items` on the lines that follow."""
    value = re.sub(r"(^|\s)#.*$", "", rest_of_line).strip()
    if value.startswith("["):
        return [_bare(v) for v in value.strip("[]").split(",") if v.strip()]
    if value:
        return [_bare(value)]
    items, position = [], 0
    while match := _ITEM.match(following, position):
        items.append(_bare(re.sub(r"\s#.*$", "", match[1])))
        position = match.end()
    return items


def _bare(value: str) -> str:
    return value.strip().strip("\"'")
