"""What is reproduced and where it goes, as settings. Light: they are also the options of `coral reproduce`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from coral_lens.storage.settings import NotEmpty, OneOf, Option, Range, Settings

PARTS = ("probe1", "probe2", "layers", "depth", "transfer", "sae", "corrsteer", "heads", "dimensions")
"""The parts of the paper, in its order."""


def part_names() -> Iterable[str]:
    """Return the parts that can be asked for."""
    return PARTS


@dataclass(frozen=True)
class Reproducing(Settings):
    """What is reproduced, and where it goes."""

    models: Annotated[tuple[str, ...], NotEmpty(), Option("--model")] = ("smollm2",)
    """Hub id, local folder, .gguf file, or `smollm2` (embedded); several fill the columns of the tables."""
    scale: Literal["small", "paper"] = "small"
    """`small`: for 2 cores and the embedded model, some hours. `paper`: the paper's sizes, for a GPU and 7B models."""
    parts: Annotated[tuple[Annotated[str, OneOf(part_names)], ...], Option("--part")] = ()
    """Only this part: probe1, probe2, layers, depth, transfer, sae, corrsteer, heads or dimensions; may be given several times.
    By default all of them."""
    out: Path = Path("reproduction")
    """Folder for the page, the tables, the figures and the report of each part."""
    work: Path | None = None
    """Folder for states, lenses and whatever a killed run goes on from. By default OUT.work."""
    data: Path | None = None
    """Folder with TASK/SPLIT.jsonl[.gz] or .parquet, looked into before the embedded data and the hub."""
    limit: Annotated[int, Range(least=50)] | None = None
    """At most this many questions of each source: a look at every part, in a folder of its own. At least 50."""
    check: bool = False
    """Load no model: say what each part would take in questions, passes, hours and bytes, and stop."""
    mixed: bool = False
    """Go on with states that were begun on another kind of device, although it rounds in another way."""
    anyway: bool = False
    """Go on with a model that is too small or too large for the scale."""
