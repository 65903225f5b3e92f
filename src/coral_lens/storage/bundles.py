"""Several files that belong together, in a folder that may hold other people's files too.

One of them, the record, has the digests of the others. A new bundle takes the place of an old one by the renaming of its
record: until then the old files are there under their names, and afterwards the new ones are found by their digests, under
their names or still under temporary ones. So a folder has a whole bundle at every moment, whenever a command is killed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from coral_lens.storage.files import (
    digest_bytes,
    digest_file,
    disk_errors,
    fresh_folder,
    kept_record,
    write_atomic,
    write_record,
)


def write_bundle(
    folder: Path, record: tuple[str, bytes], files: Mapping[str, bytes], *, gone: Iterable[str] = ()
) -> None:
    """Write a record and the files that it has the digests of; `gone` are names of the bundle that it has no more."""
    if not folder.exists() or not any(folder.iterdir()):
        with fresh_folder(folder) as temporary:
            for name, data in (*files.items(), record):
                write_atomic(temporary / name, data)
        return
    digests = {name: digest_bytes(data) for name, data in files.items()}
    for name, data in files.items():
        if not is_whole(folder / name, digests[name]):
            write_atomic(waiting(folder, name, digests[name]), data)
    write_atomic(folder / record[0], record[1])
    settle(folder, digests)
    for name in gone:
        with disk_errors(folder / name):
            (folder / name).unlink(missing_ok=True)


def settle(folder: Path, digests: Mapping[str, str]) -> None:
    """Give new files their names, and remove those of bundles that were never finished."""
    for name, wanted in digests.items():
        new = waiting(folder, name, wanted)
        with disk_errors(folder / name):
            if new.exists():
                new.replace(folder / name)
        for entry in os.listdir(folder):
            if re.fullmatch(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.next", entry):
                with suppress(OSError):
                    (folder / entry).unlink()


def waiting(folder: Path, name: str, wanted: str) -> Path:
    """Return the name under which a file waits for its record."""
    return folder / f".{name}.{wanted[:16]}.next"


def is_whole(path: Path, wanted: str) -> bool:
    """Return whether a file is there and has this digest."""
    try:
        return path.is_file() and digest_file(path) == wanted
    except OSError:
        return False


def bundled(folder: Path, name: str, wanted: str) -> Path | None:
    """Return the file of this digest: under its own name, or as it waits for it; None if there is none."""
    places = (folder / name, waiting(folder, name, wanted))
    return next((path for path in places if is_whole(path, wanted)), None)


# ------------------------------------------------------------------------------- a folder that another library has written

SEALED = "coral.json"
"""A record beside the files of another library, with their digests."""


def seal_files(folder: Path) -> None:
    """Write the digests of all files of a folder into a record beside them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    write_record(
        folder / SEALED, {"sha256": {path.relative_to(folder).as_posix(): digest_file(path) for path in files}}
    )


def is_intact(folder: Path) -> bool:
    """Return whether every file of a folder is as it was written; what earlier versions kept has no record to compare with."""
    if not (folder / SEALED).exists():
        return folder.is_dir() and any(folder.iterdir())
    digests = (kept_record(folder / SEALED) or {}).get("sha256") or {}
    return bool(digests) and all(is_whole(folder / name, wanted) for name, wanted in digests.items())
