"""Temporary files, temporary folders and locks: what a command has on the disk only while it runs.

Each is made exclusively under a name that nobody can have planted, and is locked while it is in use. So the next command knows
what a killed one left behind, and removes that. Never follows a link, and never removes what it has not made.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

fcntl: ModuleType | None
try:
    fcntl = import_module("fcntl")
except ImportError:  # Windows: nothing is locked there, and nothing that was left behind is removed
    fcntl = None

LONGEST = 200
"""Bytes of a name that a temporary name repeats; of a longer one it has a digest. File systems take 255."""
MARK = ".coral"
"""A file in every temporary folder under TMPDIR: it says that the folder is ours, and is locked while it is in use."""
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
"""What a file system says that locks nothing, such as some network file systems."""


# ----------------------------------------------------------------------------------------------------- beside a target


@contextmanager
def file_beside(target: Path, *, sweep: bool = True) -> Iterator[tuple[BinaryIO, Path]]:
    """Yield a new file beside `target`, open for writing, and its path; it is gone afterwards unless it was renamed.

    What killed commands left on the way to `target` is removed, which lists its folder: where that has very many files, they are
    removed once for all (`remove_abandoned_like`) and not with each.
    """
    if sweep:
        remove_abandoned(target)
    number = None
    while number is None:
        path = temporary_name(target)
        number = keep_held(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW, 0o666), path)
    try:
        with os.fdopen(number, "wb") as file:
            yield file, path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def folder_beside(target: Path) -> Iterator[Path]:
    """Yield a new folder beside `target`; it is gone afterwards unless it was renamed."""
    remove_abandoned(target)
    number = None
    while number is None:
        path = temporary_name(target)
        path.mkdir()
        number = keep_held(os.open(path, os.O_RDONLY), path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(number)


def temporary_name(target: Path) -> Path:
    """Return a new name for what will become `target`."""
    return target.with_name(f".{short_name(target.name)}.{secrets.token_hex(4)}.tmp")


def short_name(name: str) -> str:
    """Return a name, or the digest of one that is too long to be made longer."""
    return name if len(os.fsencode(name)) <= LONGEST else sha256(os.fsencode(name)).hexdigest()[:32]


def remove_abandoned(target: Path) -> None:
    """Remove what killed commands left beside `target` on the way to it; of one that still runs nothing is touched.

    Earlier versions called a file `.NAME.tmp` and a folder `.NAME.PID.tmp`, and put `.NAME.PID.old` into safety before they
    replaced it: where they were killed just then, that is the target.
    """
    name = re.escape(short_name(target.name))
    pattern = re.compile(rf"\.{name}(\.[0-9a-f]{{8}})?\.tmp|\.{name}\.(?P<process>\d{{1,7}})\.(tmp|(?P<safe>old))")
    with suppress(OSError):
        for entry in os.listdir(target.parent):
            if match := pattern.fullmatch(entry):
                path = target.parent / entry
                if match["process"] and is_running(int(match["process"])):
                    continue
                if match["safe"] and not target.exists():
                    path.rename(target)
                else:
                    remove_unheld(path)


def remove_abandoned_like(folder: Path, name: str) -> None:
    """Remove what killed commands left on the way to files of this pattern, as `remove_abandoned` does for one file."""
    pattern = re.compile(rf"\.{name}(\.[0-9a-f]{{8}})?\.tmp")
    with suppress(OSError):
        for entry in os.listdir(folder):
            if pattern.fullmatch(entry):
                remove_unheld(folder / entry)


def is_running(process: int) -> bool:
    """Return whether there is a process of this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


# ---------------------------------------------------------------------------------------------------------- in TMPDIR


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder under TMPDIR, which is removed afterwards; those of killed commands are removed now."""
    home = Path(tempfile.gettempdir())
    for path in home.glob("coral-*"):
        remove_unheld(path, mark=MARK)
    number = None
    while number is None:
        folder = Path(tempfile.mkdtemp(prefix="coral-", dir=home))
        mark = folder / MARK
        number = keep_held(os.open(mark, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_FOLLOW, 0o600), mark)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(number)


# -------------------------------------------------------------------------------------------------------------- locks


def hold(number: int) -> bool:
    """Lock an open file or folder until it is closed; False where another process has locked it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def keep_held(number: int, path: Path) -> int | None:
    """Return an open new file that is held from now on; None, and closed, if another process has removed it as abandoned."""
    with suppress(OSError):  # where nothing can be locked, nothing is removed either
        held = hold(number)
        if fcntl is not None and not (held and path.exists()):
            os.close(number)
            return None
    return number


def remove_unheld(path: Path, *, mark: str = "") -> None:
    """Remove a file or a folder of ours that nobody holds; with `mark`, only a folder with such a file, which is what is held."""
    with suppress(OSError):
        number = os.open(path / mark, os.O_RDONLY | NO_FOLLOW | getattr(os, "O_NONBLOCK", 0))
        try:
            about = os.fstat(number)
            if about.st_uid == os.getuid() and not path.is_symlink() and hold(number):
                if stat.S_ISDIR(about.st_mode) or mark:
                    shutil.rmtree(path, ignore_errors=True)
                elif stat.S_ISREG(about.st_mode):
                    path.unlink(missing_ok=True)
        finally:
            os.close(number)


@contextmanager
def lock_file(path: Path) -> Iterator[bool]:
    """Hold a lock under this name and yield True, or False if another process holds it; where files cannot be locked, True.

    The file is empty and is removed at the end. What else may lie there, a link for instance, is refused and left as it is.
    """
    if fcntl is None:
        yield True
        return
    number = open_lock(path)
    try:
        yield number is not None
    finally:
        if number is not None:
            with suppress(OSError):
                if os.fstat(number).st_size == 0:
                    path.unlink()
            os.close(number)


def open_lock(path: Path) -> int | None:
    """Open and lock a file, made if it is not there; None if another process holds it. Where nothing is locked, open it."""
    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW | os.O_NONBLOCK, 0o666)
        try:
            held = hold(number)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return number
            os.close(number)
            raise
        if not held:
            os.close(number)
            return None
        with suppress(FileNotFoundError):  # whoever held it before may have removed it since it was opened
            if os.path.samestat(os.fstat(number), os.stat(path, follow_symlinks=False)):
                return number
        os.close(number)
