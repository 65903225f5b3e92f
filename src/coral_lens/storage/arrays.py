"""Matrices of states that may be larger than memory. Small ones are plain arrays; a large one is mapped from a file that has no
name, so the system may drop its pages and nothing is left behind, even by a killed run.

Whoever goes through one reads it in chunks and releases what was read: then what is in memory does not grow with the rows.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from coral_lens.ragged import Options
from coral_lens.storage.files import disk_errors

IN_MEMORY = 256 * 2**20
"""Bytes of a matrix that is still a plain array."""
CHUNK_BYTES = 64 * 2**20
"""Bytes of a float64 copy of some rows; so many rows are read at a time."""


def allocate(n_rows: int, width: int) -> Float[np.ndarray, "row width"]:
    """Return a new float32 matrix to write to, in memory or, if it is large, in a file."""
    n_bytes = 4 * n_rows * width
    if n_bytes <= IN_MEMORY:
        return np.empty((n_rows, width), np.float32)
    folder = scratch_folder()
    with disk_errors(folder), tempfile.TemporaryFile(dir=folder, prefix="coral-") as file:
        if hasattr(os, "posix_fallocate"):  # a full disk is a sentence now, and not a crash when a page is written
            os.posix_fallocate(file.fileno(), 0, n_bytes)
        else:
            file.truncate(n_bytes)
        return np.asarray(np.memmap(file, np.float32, "r+", shape=(n_rows, width)))


def scratch_folder() -> Path:
    """Return where large files go: TMPDIR, else /var/tmp, which by convention is on a disk where /tmp may be memory."""
    named, usual = os.environ.get("TMPDIR"), Path("/var/tmp")
    if named is None and os.access(usual, os.W_OK):
        return usual
    return Path(tempfile.gettempdir())


def mapping_of(states: np.ndarray) -> mmap.mmap | None:
    """Return the file mapping behind a matrix or a view of one; None if it is in memory."""
    base: object = states
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None


def release(*states: np.ndarray) -> None:
    """Tell the system that the pages of mapped matrices are not needed just now; their content stays. Others are left alone."""
    for matrix in states:
        mapping = mapping_of(matrix)
        if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapping.madvise(mmap.MADV_DONTNEED)


def row_chunks(n: int, width: int) -> Iterator[slice]:
    """Yield slices of n rows, each of which may be copied in float64."""
    step = max(1, CHUNK_BYTES // (8 * max(1, width)))
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def chunks(states: Float[np.ndarray, "row width"]) -> Iterator[slice]:
    """Yield slices of a matrix for work that copies nothing: all of it if it is in memory, else chunks that are released."""
    if mapping_of(states) is None:
        yield slice(0, len(states))
        return
    for rows in row_chunks(*states.shape):
        yield rows
        release(states)


def question_chunks(options: Options, width: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of questions with those of their rows; a question is never divided."""
    step = max(1, CHUNK_BYTES // (8 * max(1, width)))
    first, edges = 0, options.edges
    while first < len(options):
        last = max(first + 1, int(np.searchsorted(edges, edges[first] + step, side="right")) - 1)
        yield slice(first, last), slice(int(edges[first]), int(edges[last]))
        first = last


def side_by_side(
    read: Callable[[int], Float[np.ndarray, "row width"]], layers: Sequence[int]
) -> Float[np.ndarray, "row _"]:
    """Return the states of some layers next to each other; a single layer is returned as it is read."""
    first = read(layers[0])
    if len(layers) == 1:
        return first
    n, width = first.shape
    joined = allocate(n, width * len(layers))
    for i, layer in enumerate(layers):
        states = first if i == 0 else read(layer)
        for rows in row_chunks(n, width * len(layers)):
            joined[rows, i * width : (i + 1) * width] = states[rows]
            release(states, joined)
    return joined
