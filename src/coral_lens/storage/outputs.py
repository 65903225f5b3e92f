"""What may be written where: nothing that somebody else has put there is replaced, and no output is its own input."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from coral_lens.errors import CoralError

MOST_READ = 2**16
"""Bytes of a file that say what it is."""


def refuse_inputs(out: Path, inputs: Iterable[str | Path], *, option: str = "--out") -> None:
    """Refuse an output that is one of the inputs, by whatever name; an input that is no file or folder is a task or a hub id."""
    for given in inputs:
        source = Path(given)
        try:
            same = source.exists() and out.exists() and out.samefile(source)
        except OSError:
            same = False
        if same:
            raise CoralError(f"{option} {out} is {given}, which is read: it would be replaced; choose another place.")


def output_file(path: Path, *, is_ours: Callable[[Path], bool]) -> Path:
    """Return the file to write for `path`; what a link points to is meant. Refuse what is not a new file or one of ours."""
    target = path.resolve() if path.is_symlink() else path
    if target.exists() and not target.is_file():
        raise CoralError(f"--out {path} is a folder, a pipe or a device, not a plain file; choose another place.")
    if target.exists() and target.stat().st_size and not is_ours(target):
        raise CoralError(f"--out {path} exists and was not written by this command; choose another name, or remove it.")
    return target


def refuse_replacing(folder: Path, names: Iterable[str], *, is_ours: Callable[[Path], bool]) -> None:
    """Refuse a folder in which one of these files would be replaced although it is not ours, and not empty."""
    for name in names:
        path = folder / name
        holds = path.exists() and (not path.is_file() or path.stat().st_size > 0)
        if path.is_symlink() or (holds and not is_ours(path)):
            raise CoralError(f"{path} exists and is not ours; choose another folder for --out, or move it away.")


def refuse_folder(folder: Path, kind: str, *, is_ours: bool) -> None:
    """Refuse a folder for results that holds other things and is not ours; what begins with a dot does not count."""
    if folder.exists() and not folder.is_dir():
        raise CoralError(f"{folder} is a file, not a folder for {kind}; choose another --out.")
    if not is_ours and folder.exists() and any(path.name[0] != "." for path in folder.iterdir()):
        raise CoralError(f"{folder} is not empty and holds no {kind}; choose another --out.")


def has_word(path: Path, word: str) -> bool:
    """Return whether a file is there and begins with a word that all of its kind have, which tells ours even where it is damaged.

    An empty one is anybody's: nothing is lost.
    """
    try:
        with path.open("rb") as file:
            beginning = file.read(MOST_READ)
    except OSError:
        return False
    return not beginning or word.encode() in beginning
