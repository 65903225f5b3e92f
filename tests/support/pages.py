"""Pages that are run: the fenced blocks of a document, or the cells of a notebook, in their order, as one reader runs them.

A block of `sh` is a sequence of commands, one of `python` runs in the namespace of its page, and one with
`title="NAME"` is a file that the page asks its reader to write. A title that names a file of the package says where the
code belongs: it is run in that file's namespace, and an entry of a table is put into that table.
"""

from __future__ import annotations

import glob
import importlib
import json
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from coral_lens.cli import main

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
SHOWN = {"text"}
"""What is looked at and never run: a diagram, or what a command printed."""
FILE_KINDS = {"csv", "jsonl", "toml"}
TABLES = {
    "src/coral_lens/methods/registry.py": "METHODS",
    "src/coral_lens/lens/probes/registry.py": "LENSES",
    "src/coral_lens/engine/architectures.py": "FAMILIES",
    "tests/support/models.py": "FAMILIES",
}
"""The table that a recipe's entry goes to, by the file that holds it."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page, or one cell of a notebook."""

    where: str
    language: str
    code: str
    title: str = ""

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command of a block of `sh`, without comments."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]

    @property
    def is_entry(self) -> bool:
        """Whether it is an entry of a table, `"name": value,`, and no program."""
        return self.language == "python" and bool(re.match(r'"[\w-]+": ', self.code))


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a document, or the cells with code of a notebook."""
    name, text = page.relative_to(ROOT).as_posix(), page.read_text("utf-8")
    if page.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        return [Block(f"{name}, cell {i}", "python", "".join(c["source"])) for i, c in enumerate(cells, start=1)]
    lines = [text.count("\n", 0, found.start()) + 1 for found in FENCE.finditer(text)]
    found = [(f["language"], f["code"], f["title"] or "") for f in FENCE.finditer(text)]
    assert 2 * len(found) == len(re.findall(r"^```", text, re.MULTILINE)), f"{name}: a fence that cannot be read"
    return [Block(f"{name}, line {line}", *parts) for line, parts in zip(lines, found, strict=True)]


@dataclass
class Reader:
    """Someone who does what a page says, in the current folder."""

    monkeypatch: pytest.MonkeyPatch
    skipped: dict[str, str]
    """The commands that cannot run here, with the reason."""
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})

    def follow(self, page: Path) -> None:
        """Do everything that the page says."""
        for block in blocks_of(page):
            self.do(block)

    def do(self, block: Block) -> None:
        """Run one block, or write the file that it is."""
        if block.language == "sh":
            for words in block.commands:
                self.run(words, block.where)
        elif block.is_entry:
            self.add_entry(block)
        elif block.language == "python":
            self.execute(block)
        elif block.title and block.language in FILE_KINDS:
            Path(block.title).write_text(block.code, "utf-8")
        else:
            assert block.language in SHOWN, f"{block.where}: {block.language or 'no'} language, and no title of a file"

    def run(self, words: list[str], where: str) -> None:
        """Run a command line of ours in this process, as the installed command does."""
        command = " ".join(words)
        if command in self.skipped:
            return
        assert words[0] == "coral", f"{where}: nobody runs `{command}`; say why in the list of what cannot run"
        found = [name for word in words for name in (sorted(glob.glob(word)) or [word])]
        self.monkeypatch.setattr(sys, "argv", found)
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code, f"{where}: `{command}` ended with {end.value.code}"

    def execute(self, block: Block) -> None:
        """Run a block of Python; one that belongs to a file of the package finds the names of that file."""
        if block.title and (ROOT / block.title).exists():
            self.names = {**vars(module_of(block.title)), **self.names}
        exec(compile(block.code, block.where, "exec"), self.names)

    def add_entry(self, block: Block) -> None:
        """Put an entry into the table of the file that the block's title names."""
        module = module_of(block.title)
        ((key, value),) = eval(f"{{{block.code}}}", {**vars(module), **self.names}).items()
        table = getattr(module, TABLES[block.title])
        assert key not in table, f"{block.where}: the package has {key!r} already"
        self.monkeypatch.setitem(table, key, value)


def module_of(path: str) -> Any:
    """Return the module that a file of the package or of the tests' support is."""
    return importlib.import_module(re.sub(r"^(src|tests)/|\.py$", "", path).replace("/", "."))
