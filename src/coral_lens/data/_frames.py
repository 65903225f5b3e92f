"""Tables that are in memory already: frames of pandas and polars, datasets, Arrow tables, and rows as a list of dicts.

Nothing is imported: a frame comes with its own library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from coral_lens.data._arrow_tables import arrow_batches
from coral_lens.data.tables import Batch, Table, batches_of_rows, exploded
from coral_lens.errors import CoralError


def frame_table(frame: Any, size: int) -> Table:
    """Return the rows of a frame, a dataset, an Arrow table or a list of dicts."""
    for cls in type(frame).__mro__:
        read = FRAMES.get((cls.__module__.split(".")[0], cls.__name__))
        if read is not None:
            return read(frame, size)
    if isinstance(frame, Iterable) and not isinstance(frame, str | bytes | Mapping):
        rows = (checked_row(number, row) for number, row in enumerate(frame, start=1))
        return Table("the list", "row", batches_of_rows(exploded(rows), size), unit="row", column="field")
    raise CoralError(
        f"Questions come from a file, a task, a frame of pandas or polars, a dataset or a list of dicts. Got a "
        f"{type(frame).__name__} instead."
    )


def checked_row(number: int, row: Any) -> tuple[int, Mapping[str, Any]]:
    """Return a numbered row, which must be a dict."""
    if not isinstance(row, Mapping):
        raise CoralError(f"the list, row {number}: each row must be a dict. Got a {type(row).__name__} instead.")
    return number, {str(name): plain(value) for name, value in row.items()}


def plain(value: Any) -> Any:
    """Return a value without the wrapping of numpy: an array is a list, a scalar a number, and what is missing is None."""
    if hasattr(value, "tolist") and not isinstance(value, type):
        value = value.tolist()
    return None if isinstance(value, float) and value != value else value


def pandas_table(frame: Any, size: int) -> Table:
    """Return the rows of a pandas frame; its index is left out."""
    names = names_of(frame.columns, "the frame")

    def batches() -> Iterator[Batch]:
        for low in range(0, len(frame), size):
            piece = frame.iloc[low : low + size]
            columns = {}
            for i, name in enumerate(names):
                column = piece.iloc[:, i].astype(object)
                known = column.notna().tolist()
                columns[name] = [plain(v) if there else None for v, there in zip(column.tolist(), known, strict=True)]
            yield Batch(columns, range(low + 1, low + 1 + len(piece)))

    return Table("the frame", "row", batches(), unit="row")


def polars_table(frame: Any, size: int) -> Table:
    """Return the rows of a polars frame."""

    def batches() -> Iterator[Batch]:
        start = 1
        for piece in frame.iter_slices(size):
            yield Batch(piece.to_dict(as_series=False), range(start, start + len(piece)))
            start += len(piece)

    return Table("the frame", "row", batches(), unit="row")


def dataset_in_memory(dataset: Any, size: int) -> Table:
    """Return the rows of a `datasets.Dataset`; names of classes come along."""

    def batches() -> Iterator[Batch]:
        start = 1
        for columns in dataset.with_format(None).iter(batch_size=size):
            n = len(next(iter(columns.values()), []))
            yield Batch(dict(columns), range(start, start + n))
            start += n

    features = dataset.features or {}
    classes = {name: tuple(about.names) for name, about in features.items() if type(about).__name__ == "ClassLabel"}
    return Table("the dataset", "row", batches(), unit="row", classes=classes)


def arrow_in_memory(table: Any, size: int) -> Table:
    """Return the rows of an Arrow table."""
    names_of(table.column_names, "the table")
    return Table("the table", "row", arrow_batches(table.to_batches(), size), unit="row")


def refuse_splits(splits: Any, _: int) -> Table:
    """Refuse several splits at once."""
    names = list(splits)
    raise CoralError(
        f"The dataset has the splits {', '.join(map(str, names))}; give one of them: dataset[{names[0]!r}]."
    )


def refuse_lazy(_: Any, __: int) -> Table:
    """Refuse a frame that is not computed yet."""
    raise CoralError("The frame is lazy: give frame.collect().")


def names_of(columns: Iterable[Any], where: str) -> list[str]:
    """Return the names of columns as texts; each may be there once."""
    names = [str(name) for name in columns]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise CoralError(f"{where}: the column {repeated!r} appears twice; rename one of them.")
    return names


FRAMES: dict[tuple[str, str], Callable[[Any, int], Table]] = {
    ("pandas", "DataFrame"): pandas_table,
    ("polars", "DataFrame"): polars_table,
    ("polars", "LazyFrame"): refuse_lazy,
    ("datasets", "Dataset"): dataset_in_memory,
    ("datasets", "IterableDataset"): dataset_in_memory,
    ("datasets", "DatasetDict"): refuse_splits,
    ("datasets", "IterableDatasetDict"): refuse_splits,
    ("pyarrow", "Table"): arrow_in_memory,
}
"""By the library and the name of a type, how its rows are read."""
